import { describe, expect, it } from 'vitest';
import * as api from '../../src/moe/index.js';
import { expectPlanError } from '../expect-error.js';
import { describeMisuse } from '../misuse.js';

const map = api.mapExperts({
  worldSize: 2,
  experts: 3,
  rankOffsets: Int32Array.of(0, 2, 4),
  expert: Int32Array.of(0, 1, 1, 2),
});
const routing = api.routingOfRanks(3, 2, [Int32Array.of(0, 1, 2, -1), Int32Array.of(2, 0)]);
const form = { mode: 'high-throughput', alignment: 4 } as const;
const options = { policy: 'nearest', ranksPerNode: 1, activeRanks: [1, 1], lostRanks: [0, 0] } as const;
const plan = api.planMoe(routing, map, form, options);
const layoutInput = { map, rank: 0, topK: 2, topkIdx: api.rankTopk(routing, 0), ...options };
const layout = api.routingLayout(layoutInput);
const shape = {
  design: 'high-throughput',
  experts: map,
  maxTokens: 4,
  topK: 2,
  hidden: 256,
  dispatch: 'f8e4m3+f32',
  combine: 'bf16',
  calls: 2,
  staged: true,
  recvRows: 16,
  alignment: 4,
} as const;
const generated = {
  worldSize: 2,
  tokens: [2, 1],
  experts: 3,
  topK: 2,
  popularity: { kind: 'k-hot', hot: 2, share: 0.9 },
  seed: 7,
  emptyShare: 0.1,
} as const;
const topk = {
  experts: 4,
  topK: 2,
  limit: { groups: 2, topGroups: 1, groupScore: 'top2-sum' },
  bias: [0, 0, 0.5, 0],
  normalise: true,
  scale: 2,
} as const;
const trace = { worldSize: 2, experts: 3, topK: 2, steps: [routing] };

/** Arguments that are right, for every function of the entry point. */
const right: Readonly<Record<string, readonly unknown[]>> = {
  alignedRowBytes: ['bf16', 256],
  balanceExperts: [[4, 2, 1, 1], { worldSize: 2, places: [3, 3], groups: 2, ranksPerNode: 1 }],
  bufferSizes: [shape],
  bufferText: [api.bufferSizes(shape)],
  bytesText: [4096],
  expectedChoices: [{ kind: 'zipf', exponent: 1 }, 8, 2],
  expectedGroups: [8, 2, 2],
  expertLoad: [routing],
  explainMoe: [plan],
  generateRouting: [generated],
  generateWeights: [routing, 7],
  gini: [[1, 2]],
  inRankMask: [layout, map],
  largestMaxTokens: [shape, 1e6],
  loadOfRanks: [map, [4, 2, 1]],
  localExperts: [map, 0],
  mapExperts: [map],
  messageBytes: ['bf16', 256],
  moeDigest: [plan],
  moeExplanationText: [api.explainMoe(plan)],
  moeTraffic: [plan, { hidden: 256, dispatch: 'bf16', combine: 'bf16' }],
  parseRoutingTrace: [api.routingTraceText(trace)],
  payloadBytes: ['bf16', 256],
  placeRows: [map, new Int32Array(8), form],
  planMoe: [routing, map, form, options],
  rankReceives: [plan, 0],
  rankSends: [plan, 0],
  rankTopk: [routing, 0],
  replicaCandidates: [map, 0, options],
  routingLayout: [layoutInput],
  routingOfRanks: [3, 2, [Int32Array.of(0, 1), Int32Array.of(2, 0)]],
  routingTraceText: [trace],
  rowsOfChoices: [plan.placement, layout],
  spreadExperts: [3, 2],
  topkExperts: [Float32Array.of(4, 3, 2, 1), topk],
  validateExpertMap: [map],
  validateMoe: [plan],
  withLostRanks: [plan, [0, 1]],
};

// What is made again of the rest of a map, and what is no part of where the rows of a layout go.
describeMisuse('@ep/plan/moe', api, right, {
  unread:
    /^(mapExperts: argument 0|planMoe: argument 1)\.(rank|expertOffsets|replicas) |^(inRankMask|rowsOfChoices): argument .\.tokensPer/,
});

describe('what the arrays say', () => {
  const at = (values: Int32Array, i: number, value: number) => values.with(i, value);
  const { placement } = plan;
  const holed = new Array<Int32Array>(2);
  holed[1] = Int32Array.of(0, 1);
  const sizes = api.bufferSizes(shape);
  const scores = Float32Array.of(4, 3, 2, 1);
  const text = (change: object) => api.moeExplanationText({ ...api.explainMoe(plan), ...change });

  it.each<readonly [string, () => unknown, readonly string[]]>([
    ['a rank', () => api.routingLayout({ ...layoutInput, map: { ...map, rank: at(map.rank, 1, 2) } }), ['map.rank[1]']],
    ['a replica', () => api.replicaCandidates({ ...map, replicas: at(map.replicas, 3, 4) }, 0), ['map.replicas[3]']],
    [
      'offsets of experts',
      () => api.loadOfRanks({ ...map, expertOffsets: at(map.expertOffsets, 1, 5) }, [1, 1, 1]),
      ['map.expertOffsets[2]', 'at least', '5'],
    ],
    [
      'an expert',
      () => api.placeRows({ ...map, expert: at(map.expert, 0, -1) }, new Int32Array(8), form),
      ['expert[0]'],
    ],
    ['a list too short', () => api.localExperts({ ...map, replicas: new Int32Array(3) }, 0), ['map.replicas', '4']],
    [
      'offsets of ranks',
      () => api.localExperts({ ...map, rankOffsets: Int32Array.of(0, 9, 4) }, 0),
      ['map.rankOffsets[0]', 'within [0, 4]', 'found 0 and 9'],
    ],
    ['a load too long', () => api.loadOfRanks(map, [1, 1, 1, 1]), ['load must have 3 elements', 'found 4']],
    [
      'offsets of tokens',
      () => api.rankTopk({ ...routing, tokenOffsets: Int32Array.of(0, 9, 3) }, 1),
      ['tokenOffsets[1]', 'within [0, 3]', 'found 9 and 3'],
    ],
    [
      'offsets of the tokens of a plan',
      () => api.rankSends({ ...plan, routing: { ...routing, tokenOffsets: Int32Array.of(0, -1, 3) } }, 1),
      ['plan.routing.tokenOffsets[1]', 'found -1 and 3'],
    ],
    ['a column too short', () => api.rankSends({ ...plan, row: new Int32Array(5) }, 0), ['plan.row', '6', 'found 5']],
    ['a row too far', () => api.rankReceives({ ...plan, row: plan.row.map(() => 99) }, 0), ['plan.row[']],
    ['no such replica', () => api.rankReceives({ ...plan, replica: plan.replica.map(() => 9) }, 0), ['replica 9']],
    [
      'rows of a tensor',
      () => api.rankReceives({ ...plan, placement: { ...placement, recvRows: Int32Array.of(-1, 4) } }, 0),
      ['plan.placement.recvRows[0]', 'found -1'],
    ],
    [
      'a choice beyond the replicas',
      () => api.rowsOfChoices(placement, { ...layout, replica: at(layout.replica, 0, 4) }),
      ['layout.replica[0]', '[-1, 3]'],
    ],
    ['a rank beyond the world', () => api.rowsOfChoices(placement, { ...layout, rank: 2 }), ['layout.rank', '[0, 1]']],
    ['a mask for another map', () => api.inRankMask(layout, api.spreadExperts(2, 2)), ['layout.replica[', '[-1, 1]']],
    [
      'a world of another size',
      () => api.moeDigest({ ...plan, map: api.spreadExperts(3, 3) }),
      ['plan.routing.worldSize'],
    ],
    ['ranks left out', () => api.routingOfRanks(3, 2, holed), ['ranks[0]', 'undefined']],
    ['a world without end', () => api.routingOfRanks(3, 2, new Array<Int32Array>(2 ** 32 - 1)), ['ranks.length']],
    ['numbers as texts', () => api.balanceExperts(['4', '2'] as never, { worldSize: 1 }), ['load[0]', 'string 4']],
    ['loads without end', () => api.gini({ length: 2 ** 40 }), ['load.length']],
    ['choices without end', () => api.expectedGroups(8, 2, Number.POSITIVE_INFINITY), ['topK', 'Infinity']],
    [
      'a share as a text',
      () => api.expectedChoices({ kind: 'k-hot', hot: 1, share: '0.5' as never }, 4, 1),
      ['share must be in [0, 1]', 'string 0.5'],
    ],
    ['a share of nothing', () => api.generateRouting({ ...generated, emptyShare: null as never }), ['emptyShare']],
    ['a flag', () => api.bufferSizes({ ...shape, staged: 1 as never }), ['staged', 'true or false', 'number 1']],
    ['another flag', () => api.bufferSizes({ ...shape, zeroCopy: 'x' as never }), ['zeroCopy', 'true or false']],
    [
      'a flag as a text',
      () => api.topkExperts(scores, { ...topk, normalise: 'no' as never }),
      ['normalise', 'string no'],
    ],
    ['a shape', () => api.largestMaxTokens('x' as never, 1), ['shape must be an object', 'string x']],
    [
      'factors',
      () => api.bufferText({ ...sizes, components: [{ ...sizes.components[0]!, factors: 5 as never }] }),
      ['[0].factors'],
    ],
    [
      'offsets of the ranks of a buffer',
      () => api.bufferSizes({ ...shape, experts: { ...map, rankOffsets: Int32Array.of(0, 5, 4) } }),
      ['experts.rankOffsets[2]', 'at least', 'found 4'],
    ],
    [
      'a replica of a plan',
      () => api.explainMoe({ ...plan, map: { ...map, rank: at(map.rank, 0, 7) } }),
      ['plan.map.rank[0]', 'found 7'],
    ],
    [
      'a replica whose bytes are counted',
      () =>
        api.moeTraffic(
          { ...plan, map: { ...map, rank: at(map.rank, 0, 7) } },
          { hidden: 1, dispatch: 'f32', combine: 'f32' },
        ),
      ['plan.map.rank[0]', 'found 7'],
    ],
    ['the most of a rank', () => api.localExperts({ ...map, maxLocalExperts: 0.5 }, 0), ['map.maxLocalExperts', '0.5']],
    ['no experts', () => api.expectedGroups(0, 2, 0), ['experts', 'found 0']],
    ['no groups', () => api.expectedGroups(8, 0, 2), ['groups', 'found 0']],
    ['a rank of a report', () => text({ ranks: [{}] }), ['explanation.ranks[0].rank']],
    [
      'an expert of a report',
      () => text({ byLoad: [{ expert: 0, replicas: [5] }] }),
      ['explanation.byLoad[0].replicas'],
    ],
    [
      'a mask of another world',
      () => api.rankSends({ ...plan, activeRanks: new Uint8Array(3) }, 0),
      ['plan.activeRanks', 'found 3'],
    ],
    ['what was not served', () => api.moeDigest({ ...plan, unserved: -1 }), ['plan.unserved', 'found -1']],
    [
      'rows of another world',
      () => api.moeDigest({ ...plan, placement: { ...placement, recvRows: new Int32Array(3) } }),
      ['plan.placement.recvRows', 'found 3'],
    ],
    ['experts without end', () => api.expectedChoices({ kind: 'uniform' }, 2 ** 40, 2), ['experts', '1099511627776']],
    ['more choices than experts', () => api.expectedChoices({ kind: 'uniform' }, 4, 5), ['topK', 'found 5']],
    ['no map', () => api.planMoe(routing, null as never, form), ['map must be an object', 'null']],
    ['half an expert', () => api.rankTopk({ ...routing, experts: 0.5 }, 0), ['experts', '0.5']],
    ['no choices', () => api.rankTopk({ ...routing, topK: 0 }, 0), ['topK', 'found 0']],
    ['the world of a trace', () => api.routingTraceText({ ...trace, worldSize: -1, steps: [] }), ['worldSize', '-1']],
    ['the experts of a trace', () => api.routingTraceText({ ...trace, experts: -1, steps: [] }), ['experts', '-1']],
    ['the choices of a trace', () => api.routingTraceText({ ...trace, topK: 4, steps: [] }), ['topK', 'found 4']],
    [
      'an array of nothing',
      () => api.bufferText({ ...api.bufferSizes(shape), components: [null as never] }),
      ['components'],
    ],
  ])('%s is refused', (_, call, parts) => {
    expectPlanError(call, 'EP_INVALID_ARGUMENT', ...parts);
  });

  it('a plan without its policy is no whole plan', () => {
    expectPlanError(() => api.validateMoe({ ...plan, policy: undefined as never }), 'EP_INVALID_PLAN', 'policy');
    expectPlanError(() => api.validateMoe({ ...plan, ranksPerNode: null as never }), 'EP_INVALID_PLAN', 'ranksPerNode');
  });

  it('places for more replicas than int32 numbers are refused before they are made', () => {
    const options = { worldSize: 65_536, places: 65_536 };
    expectPlanError(() => api.balanceExperts(new Float64Array(65_536), options), 'EP_CAPACITY', '4294967296 rows');
  });

  it('a mask of more elements than int32 numbers is refused before it is made', () => {
    const wide = api.spreadExperts(1, 65_536);
    const long = api.routingLayout({ map: wide, rank: 0, topK: 1, topkIdx: new Int32Array(32_768) });
    expectPlanError(() => api.inRankMask(long, wide), 'EP_CAPACITY', 'the mask (tokens * ranks) needs 2147483648');
  });

  it('who chooses more than all experts reaches every group', () => {
    expect(api.expectedGroups(8, 4, 2 ** 31 - 1)).toBe(4);
  });
});
