import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { type GradientReduction, planAttention, planReplicas, validateReduction } from '../../src/index.js';
import { placements } from '../arbitraries.js';
import { expectPlanError } from '../expect-error.js';

describe('validateReduction', () => {
  it('takes the reduction of every plan', () => {
    fc.assert(
      fc.property(
        placements(),
        fc.constantFrom('each-query' as const, 'each-server' as const),
        (placement, sharing) => {
          const { reduction, revKvCompact } = planAttention(placement.shards, placement.serverRank, { sharing });
          validateReduction(reduction, revKvCompact);
        },
      ),
    );
    const shards = { worldSize: 2, shardOffsets: Int32Array.of(0, 1, 3), lengths: Int32Array.of(4, 0, 3) };
    const table = {
      replicas: 2,
      offsets: Int32Array.of(0, 2, 3, 3),
      dstRank: Int32Array.of(0, 1, 0),
      replica: Int32Array.of(0, 1, 1),
    };
    const { reduction, revKvCompact } = planReplicas(shards, table);
    validateReduction(reduction, revKvCompact);
  });

  const shards = { worldSize: 2, shardOffsets: Int32Array.of(0, 2, 4), lengths: Int32Array.of(4, 2, 3, 5) };
  const table = {
    replicas: 2,
    offsets: Int32Array.of(0, 2, 3, 5, 6),
    dstRank: Int32Array.of(0, 1, 0, 1, 0, 1),
    replica: Int32Array.of(0, 1, 0, 0, 1, 1),
  };
  const { reduction, revKvCompact, revKv } = planReplicas(shards, table);

  it.each(['shardOffsets', 'lengths', 'homeRow', 'slotOffsets', 'replica', 'compactRow'] as const)(
    'finds any change of %s that moves a row',
    (name) => {
      for (let i = 0; i < reduction[name].length; i++) {
        for (const to of [-1, 0, 1, 2, 5, 2 ** 31 - 1]) {
          if (to === reduction[name][i]) continue;
          // The last shard of a home may lie anywhere behind the others: nobody but the home tensor's owner knows how long that is.
          const last = name === 'homeRow' && (i === 1 || i === 3) && to >= reduction.homeRow[i]! && to < 2 ** 31 - 1;
          const changed = { ...reduction, [name]: reduction[name].with(i, to) };
          const look = (): void => validateReduction(changed, revKvCompact);
          if (last) look();
          else expectPlanError(look, 'EP_INVALID_PLAN', `reduction.`);
        }
      }
    },
  );

  it('refuses what is none, and that of another plan', () => {
    for (const odd of [undefined, null, 5, {}, { ...reduction, replica: [0] }, { ...reduction, worldSize: 3 }])
      expectPlanError(() => validateReduction(odd as GradientReduction, revKvCompact), 'EP_INVALID_PLAN', 'reduction');
    expectPlanError(() => validateReduction(reduction, revKv), 'EP_INVALID_PLAN', 'rev-kv-compact');
    const other = planReplicas(shards, { ...table, dstRank: Int32Array.of(0, 1, 0, 0, 1, 1) });
    // Who computes is of no matter to the sums: only what comes back is.
    validateReduction(other.reduction, revKvCompact);
    const longer = planReplicas({ ...shards, lengths: Int32Array.of(4, 2, 3, 6) }, table);
    expectPlanError(() => validateReduction(longer.reduction, revKvCompact), 'EP_INVALID_PLAN', 'reduction.lengths[3]');
    expect(() => validateReduction(reduction, revKvCompact)).not.toThrow();
  });
});
