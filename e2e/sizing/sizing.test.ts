/** docs/sizing.md says what ranks over the fabric take: its formulas, and the numbers beside them, are compared with what ranks count, and with constants of the code. */
import { fork } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { openTcpStoreServer } from '@ep/core';
import { teamMemory } from '@ep/native/ranks';
import { nvshmem } from '@ep/nvshmem';
import { describe, expect, it } from 'vitest';

const probe = await nvshmem.fabric.probe({ provider: 'tcp;ofi_rxm', address: '127.0.0.1' });
const missing = probe.available ? '' : probe.reason;
const PROGRAM = fileURLToPath(new URL('rank.mjs', import.meta.url));
const text = (path: string): string => readFileSync(new URL(`../../${path}`, import.meta.url), 'utf8');
const page = text('docs/sizing.md');

/** Rows of the page, `| what | \`formula of W\` | W = 8 | W = 64 |`, by the name in the first column. */
const rows = new Map(
  [...page.matchAll(/^\| ([^|]+?) \| `([^`|]+)` \| ([\d,]+) \| ([\d,]+) \|$/gm)].map(
    ([, name, formula, eight, many]) => [name!, { formula: formula!, eight: eight!, many: many! }] as const,
  ),
);

function amountOf(name: string, W: number): number {
  const row = rows.get(name);
  if (row === undefined) throw new Error(`docs/sizing.md has no row "${name}"`);
  if (!/^[\dW\s+*()\-,.]*$/.test(row.formula.replace(/\b(max|min|ceil)\b/g, ''))) throw new Error(row.formula);
  return new Function('W', 'max', 'min', 'ceil', `return ${row.formula}`)(W, Math.max, Math.min, Math.ceil) as number;
}

interface Held {
  readonly all: number;
  readonly sockets: number;
}
interface Told {
  readonly before: Held;
  readonly spoken: Held;
  readonly opened: number;
  readonly allocated: number;
  readonly grouped: number;
}

const byteLength = 1 << 20;

async function measure(worldSize: number): Promise<readonly Told[]> {
  const server = await openTcpStoreServer({ port: 0, secret: 'none' });
  try {
    return await Promise.all(
      Array.from({ length: worldSize }, async (_, rank) => {
        const start = { rank, worldSize, port: server.port, byteLength, signalSlots: 8 };
        const child = fork(PROGRAM, [JSON.stringify(start)], { env: { ...process.env, EP_JOB_SECRET: 'none' } });
        const [told] = (await once(child, 'message')) as [Told];
        await once(child, 'exit');
        return told;
      }),
    );
  } finally {
    await server.close();
  }
}

it('prints what its formulas come to', () => {
  expect(rows.size).toBeGreaterThanOrEqual(6);
  for (const [name, { eight, many }] of rows) {
    const numbers = [amountOf(name, 8), amountOf(name, 64)].map((value) => value.toLocaleString('en-US'));
    expect([eight, many], name).toEqual(numbers);
  }
});

it('has the constants of the code', () => {
  for (const W of [1, 2, 3, 8, 64, 1000])
    expect(amountOf('team of the world, bytes', W)).toBe(teamMemory(W).byteLength);
  const number = (path: string, pattern: RegExp): number => {
    const found = pattern.exec(text(path));
    if (found === null) throw new Error(`${path}: ${pattern} is not there`);
    return Number(new Function(`return ${found[1]!}`)());
  };
  const receives = number('native/core/fabric/engine.cpp', /constexpr int receives = (\d+);/);
  const message = number('native/core/fabric/wire.hpp', /sizeof\(wire_message\) == (\d+)/);
  expect(amountOf('receives posted, bytes', 8)).toBe(receives * message);
  const slots = number('native/core/fabric/mailbox.hpp', /uint64_t slots = (\d+);/);
  const brief = number('native/core/fabric/wire.hpp', /sizeof\(wire_brief\) == (\d+)/);
  expect(amountOf('mailbox, bytes', 8)).toBe(8 * slots * brief);
  const ring = number('packages/nvshmem/src/fabric/config.ts', /ringCapacity \?\? (\d+)/);
  const entry = number('native/include/ep/abi/memory.h', /sizeof\(ep_proxy_request\) == (\d+)/);
  expect(amountOf('ring of kernels, bytes', 8)).toBe(ring * entry);
  const window = number('native/core/fabric/wire.hpp', /request_window = (\d+);/);
  expect(amountOf('requests under way, at most', 8)).toBe(7 * window);
  expect(amountOf('requests under way, at most', 64)).toBe(63 * window);
  const connections = number('packages/core/src/stores/tcp/server.ts', /connections: (\d+),/);
  expect(page).toContain(`at most ${connections} connections`);
  const most = number('native/core/fabric/wire.hpp', /most_ranks = (\d+);/);
  expect(page).toContain(`at most ${most} ranks`);
});

describe.skipIf(missing)(`ranks hold what it says${missing && ` (skipped: ${missing})`}`, { timeout: 120_000 }, () => {
  it.each([2, 5])('in a world of %i', async (W) => {
    const ranks = await measure(W);
    for (const { opened, allocated, grouped } of ranks) {
      expect(opened).toBe(amountOf('mailbox, bytes', W) + amountOf('team of the world, bytes', W));
      expect(allocated - opened).toBe(byteLength);
      const ofGroups = ['groups, bytes', 'small calls of groups, bytes', 'large calls of groups, bytes'];
      expect(grouped - allocated).toBe(ofGroups.reduce((sum, name) => sum + amountOf(name, W), 0));
    }
    const most = (kind: keyof Held): number =>
      Math.max(...ranks.map(({ before, spoken }) => spoken[kind] - before[kind]));
    // A client of the store that happens to wait keeps one more.
    for (const [kind, name] of [
      ['sockets', 'sockets'],
      ['all', 'descriptors'],
    ] as const) {
      expect(most(kind), name).toBeLessThanOrEqual(amountOf(name, W) + 1);
      expect(most(kind), name).toBeGreaterThanOrEqual(amountOf(name, W) - 2);
    }
  });
});
