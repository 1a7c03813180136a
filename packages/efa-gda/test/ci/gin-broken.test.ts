/** The cases of GIN contexts have teeth: over each context that breaks a promise, the case that tells of it fails. */
import { resolveModule, World } from '@ep/conformance';
import { ginBreaks, ginCases } from '@ep/conformance/gin';
import { afterAll, describe, expect, it } from 'vitest';

it('break each case at least once', () => {
  const broken = new Set(ginBreaks.flatMap(({ fails }) => fails));
  expect([...broken].sort()).toEqual(ginCases.map(({ id }) => id).sort());
});

describe('GIN contexts that are broken', () => {
  const module = new URL('./broken-gin.mjs', import.meta.url).href;
  const suite = { module: resolveModule('@ep/conformance/gin'), name: 'ginCases' };
  let world: World | undefined;
  afterAll(() => world?.close());

  for (const { id: name, sentence, fails, faults } of ginBreaks) {
    it.each(fails)(`%s fails: ${sentence}`, async (id) => {
      if (world === undefined || world.spent) {
        await world?.close();
        world = new World('threads', 2);
      }
      const provider = { module, name: `providers.${name}` };
      const config = { seed: 3, timeoutMs: 1000, ...(faults === undefined ? {} : { faults }) };
      const run = world.run({ suite, id, provider, config, limitMs: 60_000, seed: 1 });
      // By what it found, not by an accident of set-up.
      await expect(run).rejects.toThrow(/EP_TIMEOUT|AssertionError|[Ee]xpected/);
    });
  }
});
