/** Promises about order under other seeds, in small pieces; and that a protocol which assumes more than is promised is found out. */
import { resolveModule, World } from '@ep/conformance';
import { describe, expect, it } from 'vitest';
import type { SoftEfaConfig } from '../src/index.js';

/** Pieces here and there that take 2 ms: long enough for all that was posted after them. JS waits for each put for a moment, so otherwise few would meet. */
const late = (seed: number): SoftEfaConfig => ({
  seed,
  fragmentBytes: 64,
  faults: Array.from({ length: 8 }, (_, i) => `delay stage=land ns=2000000 skip=${seed * 7 + i * 37} count=1`).join(
    '\n',
  ),
});

async function run(suite: { readonly module: string; readonly name: string }, id: string, config: SoftEfaConfig) {
  const world = new World('threads', 2);
  const provider = { module: resolveModule('@ep/efa-gda'), name: 'efaGda.soft' };
  try {
    await world.run({ suite, id, provider, config, limitMs: 60_000, seed: config.seed ?? 1 });
  } finally {
    await world.close();
  }
}

describe('a visible signal means that its own put has landed, and nothing is counted twice', () => {
  const suite = { module: resolveModule('@ep/conformance/cases'), name: 'transportCases' };
  const seeds = process.env.EP_TEST_FULL === '1' ? 50 : 5;
  it.each(['order/bundled', 'order/counted-completion', 'signal/add'])(
    `%s, ${seeds} seeds`,
    { timeout: 600_000 },
    async (id) => {
      for (let seed = 1; seed <= seeds; seed++) await run(suite, id, late(seed));
    },
  );
});

it('fails for some seed where only the last of several puts carries a signal', async () => {
  const suite = { module: resolveModule('@ep/conformance/naive'), name: 'naiveCases' };
  const failures: string[] = [];
  for (let seed = 1; seed <= 20 && failures.length === 0; seed++) {
    await run(suite, 'naive/last-signal', late(seed)).catch((error: unknown) => {
      failures.push(String(error));
    });
  }
  expect(failures[0]).toMatch(/round \d+/);
});
