/** Every group of the OpenSHMEM-like interface, by programs that check themselves against plain oracles. */
import { describe, expect, it } from 'vitest';
import { RANK_KINDS, runRanks } from './ranks.js';

describe.each(RANK_KINDS)('ranks as %s', (kind) => {
  it.each([1, 2, 4])('put, get, p, g, strided, signalled and through ptr, %i PEs', async (size) => {
    await runRanks(kind, size, 'rma', { seed: size, phases: 6 });
  });

  it.each([1, 4])('atomics, %i PEs', async (size) => {
    await runRanks(kind, size, 'atomics', { seed: 5, steps: 300, tickets: 100 });
  });

  it.each([
    { size: 2, slow: false },
    { size: 2, slow: true },
    { size: 4, slow: false },
  ])('waits and tests, $size PEs, slow writer: $slow', async ({ size, slow }) => {
    await runRanks(kind, size, 'waits', { slow, rounds: 300 });
  });

  it.each([1, 3])('the symmetric heap, %i PEs', async (size) => {
    await runRanks(kind, size, 'heap', { seed: 11, steps: 120, heapBytes: 1 << 18 });
  });

  it.each([1, 2, 4, 5])('teams and collectives, %i PEs', async (size) => {
    await runRanks(kind, size, 'teams');
  });
});

// 128 of them: worlds/many.test.ts.
it('65 PEs as threads', async () => {
  expect(await runRanks('threads', 65, 'many')).toEqual(new Array(65).fill((65 * 64) / 2));
});
