import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  balanceExperts,
  type ExpertMap,
  expertLoad,
  explainMoe,
  localExperts,
  type MoePlan,
  mapExperts,
  moeDigest,
  placeRows,
  planMoe,
  rankReceives,
  rankSends,
  routingLayout,
  routingOfRanks,
  spreadExperts,
  topkExperts,
  validateExpertMap,
  validateMoe,
  withLostRanks,
} from '../../src/moe/index.js';
import { expectPlanError } from '../expect-error.js';
import { moeCases } from './arbitraries.js';

/** 5 experts on 3 ranks: 0 1 | 2 3 | 4. Rank 2 has no token. */
const map = spreadExperts(5, 3);
const routing = routingOfRanks(5, 2, [Int32Array.of(0, 4, 2, 0), Int32Array.of(4, -1, 0, 3), Int32Array.of()]);
const replicated = mapExperts({
  worldSize: 3,
  experts: 2,
  rankOffsets: Int32Array.of(0, 1, 2, 4),
  expert: Int32Array.of(0, 0, 0, 1),
});

describe('expert maps', () => {
  it('spread what does not divide, and leave ranks empty when experts are few', () => {
    expect([...map.rankOffsets]).toEqual([0, 2, 4, 5]);
    expect([...map.rank]).toEqual([0, 0, 1, 1, 2]);
    expect(map.maxLocalExperts).toBe(2);
    expect([...spreadExperts(2, 4).rankOffsets]).toEqual([0, 1, 2, 2, 2]);
    expect(localExperts(spreadExperts(2, 4), 3)).toBe(0);
  });

  it('list the replicas of each expert', () => {
    expect([...replicated.expertOffsets]).toEqual([0, 3, 4]);
    expect([...replicated.replicas]).toEqual([0, 1, 2, 3]);
    expect([...replicated.rank]).toEqual([0, 1, 2, 2]);
  });

  it('are copies: what the caller does to its arrays later changes nothing', () => {
    const expert = Int32Array.of(0, 1);
    const made = mapExperts({ worldSize: 1, experts: 2, rankOffsets: Int32Array.of(0, 2), expert });
    expert.fill(0);
    validateExpertMap(made);
    expect([...made.expert]).toEqual([0, 1]);
  });

  it.each([
    [{ expert: Int32Array.of(0, 0, 0, 0) }, ['expert 1 has no replica', '4 replicas of 2 experts']],
    [{ expert: Int32Array.of(0, 0, 0, 2) }, ['expert[3] must be in [0, 1], found 2']],
    [{ rankOffsets: Int32Array.of(0, 1, 2, 3) }, ['rankOffsets must end at 4']],
    [{ rankOffsets: Int32Array.of(0, 2, 1, 4) }, ['rankOffsets[2]']],
    [{ worldSize: 65_537 }, ['worldSize', '65536']],
    [{ experts: 65_537 }, ['experts', '65536']],
    [{ expert: [0, 0, 0, 1] }, ['expert must be an Int32Array']],
  ])('refuse %j', (change, parts) => {
    expectPlanError(() => mapExperts({ ...replicated, ...change } as never), 'EP_INVALID_ARGUMENT', ...parts);
  });
});

describe('planMoe', () => {
  it('low latency: a block of ranks * maxTokens rows for each local expert', () => {
    const plan = planMoe(routing, map, { mode: 'low-latency', maxTokens: 2 });
    expect([...plan.row]).toEqual([0, 0, 0, 1, 1, -1, 2, 6]);
    expect([...plan.placement.recvRows]).toEqual([12, 12, 6]);
    const receive = rankReceives(plan, 0);
    expect([...receive.recvCount]).toEqual([3, 0]);
    expect([...receive.layoutRange]).toEqual([2n, (2n << 32n) | 1n, 3n << 32n, 0n, 0n, 0n]);
    expect([...receive.sourceRank.subarray(0, 4)]).toEqual([0, 0, 1, -1]);
    expect([...receive.sourceToken.subarray(0, 4)]).toEqual([0, 1, 1, -1]);
    expect([...receive.sourceChoice.subarray(0, 4)]).toEqual([0, 1, 0, -1]);
  });

  it('high throughput: blocks back to back, each padded to the alignment', () => {
    const plan = planMoe(routing, map, { mode: 'high-throughput', alignment: 4 });
    expect([...plan.row]).toEqual([0, 0, 0, 1, 1, -1, 2, 4]);
    expect([...plan.placement.recvRows]).toEqual([4, 8, 4]);
    expect([...plan.placement.rows]).toEqual([3, 0, 1, 1, 2]);
    expect([...rankSends(plan, 1).tokensPerRank]).toEqual([1, 1, 1]);
  });

  it('takes replicas in turn, or the nearest', () => {
    const tokens = routingOfRanks(2, 1, [Int32Array.of(0, 0, 0, 0), Int32Array.of(0, 0), Int32Array.of(0, 1)]);
    const form = { mode: 'high-throughput' } as const;
    expect([...planMoe(tokens, replicated, form).replica]).toEqual([0, 1, 2, 0, 1, 2, 2, 3]);
    expect([...planMoe(tokens, replicated, form, { policy: 'nearest' }).replica]).toEqual([0, 0, 0, 0, 1, 1, 2, 3]);
    const withoutOne = planMoe(tokens, replicated, form, { activeRanks: [1, 0, 1] });
    // Rank 1 neither sends nor serves; the others share its part of expert 0.
    expect([...withoutOne.replica]).toEqual([0, 2, 0, 2, -1, -1, 0, 3]);
    const withoutTwo = planMoe(tokens, replicated, form, { activeRanks: [true, true, false] });
    expect(withoutTwo.unserved).toBe(0);
    expect([...withoutTwo.replica]).toEqual([0, 1, 0, 1, 1, 0, -1, -1]);
  });

  it('counts choices of experts that no active rank holds', () => {
    const tokens = routingOfRanks(2, 2, [Int32Array.of(0, 1, 1, -1), Int32Array.of(), Int32Array.of()]);
    const plan = planMoe(tokens, replicated, { mode: 'high-throughput' }, { activeRanks: [1, 1, 0] });
    expect(plan.unserved).toBe(2);
    expect([...plan.row]).toEqual([0, -1, -1, -1]);
  });

  it('a lost rank: packed together in low latency, a gap of zero rows in high throughput', () => {
    const low = withLostRanks(planMoe(routing, map, { mode: 'low-latency', maxTokens: 2 }), [1, 0, 0]);
    expect([...low.row]).toEqual([-1, -1, -1, -1, 0, -1, -1, 6]);
    const high = withLostRanks(planMoe(routing, map, { mode: 'high-throughput' }), [1, 0, 0]);
    expect([...high.row]).toEqual([-1, -1, -1, -1, 1, -1, -1, 1]);
    expect([...rankReceives(high, 2).layoutRange]).toEqual([0n, (1n << 32n) | 1n, 2n << 32n]);
    expect([...rankReceives(high, 2).recvCount]).toEqual([1]);
    expect([...rankReceives(high, 2).blockRows]).toEqual([2]);
    expect(rankReceives(high, 2).recvRows).toBe(2);
  });

  it('group-limited choices reach no more nodes than groups, where groups are placed on nodes', () => {
    const [experts, groups, topGroups, tokens] = [64, 8, 2, 50];
    let x = 1;
    const scores = Float32Array.from({ length: 4 * tokens * experts }, () => {
      x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
      return x / 2 ** 32;
    });
    const limit = { groups, topGroups, groupScore: 'top2-sum' } as const;
    const { topkIdx } = topkExperts(scores, { experts, topK: 6, limit });
    const part = tokens * 6;
    const limited = routingOfRanks(
      experts,
      6,
      Array.from({ length: 4 }, (_, r) => topkIdx.subarray(r * part, (r + 1) * part)),
    );
    const nodesOf = (m: ExpertMap) =>
      explainMoe(planMoe(limited, m, { mode: 'high-throughput' }, { ranksPerNode: 1 })).nodesPerToken;
    const options = { worldSize: 4, places: 18 };
    const grouped = balanceExperts(expertLoad(limited), { ...options, groups, ranksPerNode: 1 });
    expect(nodesOf(grouped.map)).toBeLessThanOrEqual(topGroups);
    expect(nodesOf(balanceExperts(expertLoad(limited), options).map)).toBeGreaterThan(topGroups);
  });

  it('plans nothing: no tokens, one rank', () => {
    const plan = planMoe(routingOfRanks(1, 1, [Int32Array.of()]), spreadExperts(1, 1), { mode: 'high-throughput' });
    validateMoe(plan);
    expect([...plan.placement.recvRows]).toEqual([0]);
  });

  it('more than 1024 tokens from one rank to one expert', () => {
    const plan = planMoe(
      routingOfRanks(2, 1, [new Int32Array(3000).fill(1), new Int32Array(2000).fill(1)]),
      spreadExperts(2, 2),
      { mode: 'low-latency', maxTokens: 3000 },
    );
    expect([...rankReceives(plan, 1).layoutRange]).toEqual([3000n, (3000n << 32n) | 2000n]);
  });

  it.each([
    [
      'tokens beyond maxTokens',
      routing,
      { mode: 'low-latency', maxTokens: 1 },
      {},
      'EP_CAPACITY',
      ['rank 0 has 2 tokens', 'maxTokens is 1'],
    ],
    ['another mode', routing, { mode: 'normal' }, {}, 'EP_INVALID_ARGUMENT', ["'high-throughput'", 'normal']],
    [
      'a mask of another length',
      routing,
      { mode: 'high-throughput' },
      { activeRanks: [1, 1] },
      'EP_INVALID_ARGUMENT',
      ['activeRanks must have 3 elements', 'found 2'],
    ],
    [
      'a mask of other values',
      routing,
      { mode: 'high-throughput' },
      { lostRanks: [0, 2, 0] },
      'EP_INVALID_ARGUMENT',
      ['lostRanks[1] must be 0 or 1'],
    ],
    [
      'no mask at all',
      routing,
      { mode: 'high-throughput' },
      { lostRanks: null },
      'EP_INVALID_ARGUMENT',
      ['lostRanks must have 3'],
    ],
    [
      'a policy',
      routing,
      { mode: 'high-throughput' },
      { policy: 'random' },
      'EP_INVALID_ARGUMENT',
      ["'nearest'", 'random'],
    ],
    [
      'a routing for others',
      { ...routing, experts: 6 },
      { mode: 'high-throughput' },
      {},
      'EP_INVALID_ARGUMENT',
      ['for 3 ranks and 6 experts', 'the map for 3 and 5'],
    ],
    [
      'an expert out of range',
      { ...routing, topkIdx: Int32Array.of(0, 4, 2, 0, 4, -1, 0, 5) },
      { mode: 'high-throughput' },
      {},
      'EP_INVALID_ARGUMENT',
      ['topkIdx[7] must be in [-1, 4], found 5'],
    ],
    [
      'an expert twice',
      { ...routing, topkIdx: Int32Array.of(0, 4, 2, 2, 4, -1, 0, 3) },
      { mode: 'high-throughput' },
      {},
      'EP_INVALID_ARGUMENT',
      ['topkIdx[3] repeats expert 2, which token 1 already chose at topkIdx[2]'],
    ],
    [
      'a part of a token',
      { ...routing, topkIdx: Int32Array.of(0, 4, 2) },
      { mode: 'high-throughput' },
      {},
      'EP_INVALID_ARGUMENT',
      ['topkIdx must have 8 elements, found 3'],
    ],
    [
      'rows beyond int32',
      routing,
      { mode: 'low-latency', maxTokens: 2 ** 30 },
      {},
      'EP_CAPACITY',
      ['the receive tensor of rank 0', 'int32'],
    ],
  ] as const)('refuses %s', (_, tokens, form, options, code, parts) => {
    expectPlanError(() => planMoe(tokens, map, form as never, options as never), code, ...parts);
  });

  it('refuses counts that cannot be, before it places them', () => {
    const form = { mode: 'low-latency', maxTokens: 4 } as const;
    const counts = Int32Array.of(5, 0, 0, 0);
    expectPlanError(
      () => placeRows(spreadExperts(2, 2), counts, form),
      'EP_CAPACITY',
      'rank 0 sends 5 rows to expert 0',
    );
    expectPlanError(() => placeRows(spreadExperts(2, 2), new Int32Array(3), form), 'EP_INVALID_ARGUMENT', 'counts');
    const one = { mode: 'low-latency', maxTokens: 2 ** 30 } as const;
    const none = new Int32Array(4);
    expectPlanError(() => placeRows(spreadExperts(2, 2), none, one), 'EP_CAPACITY', 'the receive tensor of rank 0');
    const huge = new Int32Array(4).fill(2 ** 31 - 1);
    expectPlanError(() => placeRows(spreadExperts(2, 2), huge, { mode: 'high-throughput' }), 'EP_CAPACITY', 'expert 0');
  });

  it('refuses the layout of a part of a token', () => {
    const input = { map, rank: 0, topK: 2, topkIdx: Int32Array.of(1, 2, 3) };
    expectPlanError(() => routingLayout(input), 'EP_INVALID_ARGUMENT', 'topkIdx must have 4 elements, found 3');
    expectPlanError(() => routingOfRanks(5, 2, [Int32Array.of(1)]), 'EP_INVALID_ARGUMENT', 'multiple of topK = 2');
  });
});

/** The plan with one element of one of its arrays changed. */
function changed(plan: MoePlan, path: string, index: number): MoePlan {
  const copy: MoePlan = structuredClone(plan);
  const values = path.split('.').reduce<unknown>((at, key) => (at as Record<string, unknown>)[key], copy) as Int32Array;
  values[index % values.length]! ^= 1;
  return copy;
}

const arrays = [
  'map.rankOffsets',
  'map.expert',
  'map.rank',
  'map.expertOffsets',
  'map.replicas',
  'routing.tokenOffsets',
  'activeRanks',
  'lostRanks',
  'replica',
  'slot',
  'row',
  'tokensPerRank',
  'tokensPerNode',
  'placement.count',
  'placement.begin',
  'placement.rows',
  'placement.blockStart',
  'placement.recvRows',
];

const inputs = ['lostRanks', 'activeRanks', 'routing.tokenOffsets'];

describe('validateMoe', () => {
  it('notices any changed element, as does the digest', () => {
    fc.assert(
      fc.property(moeCases, fc.constantFrom(...arrays), fc.nat(), (given, path, index) => {
        const plan = planMoe(given.routing, given.map, given.form, given.options);
        const values = path.split('.').reduce<unknown>((at, key) => (at as Record<string, unknown>)[key], plan);
        fc.pre((values as Int32Array).length > 0);
        const other = changed(plan, path, index);
        expect(moeDigest(other)).not.toBe(moeDigest(plan));
        // Another input may make no difference to where rows go, such as whose token an unserved one is: then the changed plan is a plan, too.
        if (inputs.includes(path)) return;
        expectPlanError(() => validateMoe(other), 'EP_INVALID_PLAN');
      }),
      { numRuns: 300 },
    );
  });

  it.each([
    [{ version: 2 }, 'EP_PLAN_VERSION', ['version 2', 'reads version 1']],
    [{ unserved: 1 }, 'EP_INVALID_PLAN', ['unserved must be 0, found 1']],
    [{ row: new Int32Array(2) }, 'EP_INVALID_PLAN', ['row.length must be 8, found 2']],
    [{ slot: [0] }, 'EP_INVALID_PLAN', ['slot must be']],
    [{ placement: undefined }, 'EP_INVALID_PLAN', ['placement.count']],
    [{ policy: 'far' }, 'EP_INVALID_PLAN', ["plan's own", 'policy']],
    [{ map: { ...map, maxLocalExperts: 3 } }, 'EP_INVALID_PLAN', ['map.maxLocalExperts must be 2, found 3']],
    [{ map: { ...map, version: 2 } }, 'EP_PLAN_VERSION', ['version 2']],
  ] as const)('refuses %j', (change, code, parts) => {
    const plan = planMoe(routing, map, { mode: 'high-throughput' });
    expectPlanError(() => validateMoe({ ...plan, ...change } as never), code, ...parts);
  });

  it('refuses what is no plan and no map', () => {
    expectPlanError(() => validateMoe(null as never), 'EP_INVALID_PLAN', 'null');
    expectPlanError(() => validateExpertMap(undefined as never), 'EP_INVALID_PLAN', 'an expert map');
    const other: ExpertMap = { ...map, rank: Int32Array.of(0, 0, 1, 1, 1) };
    expectPlanError(() => validateExpertMap(other), 'EP_INVALID_PLAN', 'rank[4] must be 2, found 1');
  });
});
