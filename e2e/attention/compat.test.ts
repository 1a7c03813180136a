/** The per-token kernel of the original, from JS: right where it is right, refused where it would hang or crash. */
import { describe, expect, it } from 'vitest';
import { runRanks, valuesOf } from './ranks.js';

const LANES = { blocks: 2, executor: { lanes: 40, warpLanes: 4, seed: 3 } };

describe('the per-token kernel', () => {
  for (const [what, worldSize, mode, extra] of [
    ['one thread per rank', 1, 'threads', {}],
    ['three ranks as processes', 3, 'processes', {}],
    ['two blocks per rank', 2, 'threads', { options: { blocks: 2 } }],
    ['warps of four lanes under the interleaver', 2, 'threads', { options: LANES }],
    [
      'a transport that reorders and delays everything it may',
      2,
      'threads',
      { transport: 'hostile', config: { seed: 6, maxDelayUs: 50 } },
    ],
    ['bf16 on three threads', 3, 'threads', { dtype: 'bf16' }],
    ['raw bytes on two threads', 2, 'threads', { dtype: 'u8' }],
    ['raw bytes, lanes of warps under the interleaver', 2, 'threads', { dtype: 'u8', options: LANES }],
  ] as const) {
    it(`moves what the plan says: ${what}`, { timeout: 120_000 }, async () => {
      const seeds = [1, 2, 3, 4, 5, 6];
      const reports = await runRanks('compat', worldSize, mode, {
        data: { seeds, dtype: 'f32', ...extra },
        timeoutMs: 100_000,
      });
      const counts = valuesOf<{ compared: number; refused: number; bytes: number }>(reports);
      // The even plan is accepted whole; of the random ones some are.
      expect(counts[0]!.compared).toBeGreaterThan(9);
      expect(counts[0]!.compared / 3 + counts[0]!.refused).toBe(3 * (seeds.length + 1));
      for (const { compared, refused, bytes } of counts) {
        expect({ compared, refused }).toEqual({ compared: counts[0]!.compared, refused: counts[0]!.refused });
        expect(bytes).toBeGreaterThan(0);
      }
    });
  }

  it('leaves rows of replicas that do not exist as they were', { timeout: 60_000 }, async () => {
    const kept = valuesOf<number>(await runRanks('compatInto', 2, 'threads'));
    expect(kept.some((count) => count > 0)).toBe(true);
  });

  it('refuses what the original would hang or crash on, alike on all ranks', { timeout: 60_000 }, async () => {
    const [first, second] = valuesOf<Record<string, string>>(await runRanks('compatRefusals', 2, 'threads'));
    const alike = {
      width: 'EP_UNSUPPORTED',
      kinds: 'EP_UNSUPPORTED',
      compact: 'EP_UNSUPPORTED',
      reduce: 'EP_UNSUPPORTED',
      dtypes: 'EP_UNSUPPORTED',
      idleRank: 'EP_UNSUPPORTED',
      replicas: 'EP_UNSUPPORTED',
      emptyFirstShard: 'EP_UNSUPPORTED',
      capacity: 'EP_CAPACITY',
      mismatch: 'EP_MISMATCH',
      strided: 'EP_UNSUPPORTED',
      into: 'EP_INVALID_ARGUMENT',
      busy: 'EP_BUSY',
      closed: 'EP_CLOSED',
    };
    expect(first).toEqual({ ...alike, absent: 'EP_TIMEOUT', poisoned: 'EP_POISONED' });
    expect(second).toEqual(alike);
  });
});
