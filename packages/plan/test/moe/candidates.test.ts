import fc from 'fast-check';
import { expect, it } from 'vitest';
import { balanceExperts, replicaCandidates, routingLayout } from '../../src/moe/index.js';

it('says what routingLayout chooses from, and in which order', () => {
  const map = balanceExperts([9, 1, 5, 2, 2], { worldSize: 4, places: 3 }).map;
  fc.assert(
    fc.property(
      fc.integer({ min: 0, max: 3 }),
      fc.constantFrom('spread' as const, 'nearest' as const),
      fc.array(fc.boolean(), { minLength: 4, maxLength: 4 }),
      fc.array(fc.integer({ min: -1, max: 4 }), { maxLength: 40 }),
      (rank, policy, activeRanks, choices) => {
        const options = { policy, ranksPerNode: 2, activeRanks };
        const { offsets, replicas } = replicaCandidates(map, rank, options);
        const topkIdx = Int32Array.from(choices);
        const { replica } = routingLayout({ ...options, map, rank, topK: 1, topkIdx });
        const next = new Int32Array(map.experts).fill(rank);
        const expected = choices.map((e) => {
          const count = e < 0 ? 0 : offsets[e + 1]! - offsets[e]!;
          return count === 0 ? -1 : replicas[offsets[e]! + (next[e]!++ % count)]!;
        });
        expect([...replica]).toEqual(expected);
        expect(replicas.every((p) => activeRanks[map.rank[p]!])).toBe(true);
        expect(replicas.length).toBe(offsets[map.experts]);
      },
    ),
  );
});
