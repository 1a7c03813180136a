import { describe, it } from 'vitest';
import { planAttention } from '../../src/index.js';
import { planMoe, routingOfRanks, spreadExperts } from '../../src/moe/index.js';
import * as api from '../../src/reference/index.js';
import { expectPlanError } from '../expect-error.js';
import { describeMisuse } from '../misuse.js';

const shape = { queries: 1, keys: 2, heads: 2, kvHeads: 1, headDim: 2, scale: 0.5 };
const query = Float32Array.of(1, 0, 0, 1);
const attention = planAttention(
  {
    worldSize: 2,
    shardOffsets: Int32Array.of(0, 1, 3),
    lengths: Int32Array.of(4, 2, 3),
    documents: 2,
    document: Int32Array.of(0, 0, 1),
    position: Int32Array.of(0, 1, 0),
  },
  Int32Array.of(1, 0, 1),
);
const rows = (counts: Int32Array) => Array.from(counts, (n) => new Float32Array(n * 2));
const routing = routingOfRanks(2, 1, [Int32Array.of(0, 1), Int32Array.of(1)]);
const plan = planMoe(routing, spreadExperts(2, 2), { mode: 'high-throughput', alignment: 1 });
const tokens = [new Float32Array(4), new Float32Array(2)];
const weights = [Float32Array.of(1, 1), Float32Array.of(1)];
const combine = { hidden: 2, precision: 'f32', weights, renormalise: true, lostRanks: [0, 0], bias: [tokens] } as const;

/** Arguments that are right, for every function of the entry point. */
const right: Readonly<Record<string, readonly unknown[]>> = {
  attentionBackward: [shape, query, query, query, query],
  attentionForward: [shape, query, query, query],
  castRow: ['f8e4m3+f32', [1, 2], { roundScales: true }],
  moeCombine: [plan, rows(plan.placement.recvRows), combine],
  moeDense: [routing, tokens, weights, 2, (_expert: number, row: Float64Array) => row],
  moeDispatch: [plan, tokens, 2, 1],
  movePlan: [attention.fwdQ, rows(attention.fwdQ.sendTokens), 2, 0],
  sumReplicas: [attention.reduction, rows(attention.revKv.recvTokens), 2, 'dense', 'f32'],
  uncastRow: ['f8e4m3+f32', 2, new Uint8Array(6)],
};

describeMisuse('@ep/plan/reference', api, right);

describe('what the arrays and numbers say', () => {
  const { fwdQ, reduction } = attention;
  const source = rows(fwdQ.sendTokens);
  const gradients = rows(attention.revKv.recvTokens);
  const sum = (change: object) => api.sumReplicas({ ...reduction, ...change }, gradients, 2, 'dense', 'f64');
  const y = rows(plan.placement.recvRows);

  it.each<readonly [string, () => unknown, readonly string[]]>([
    [
      'a receiver',
      () => api.movePlan({ ...fwdQ, dstRank: fwdQ.dstRank.map(() => 7) }, source, 2),
      ['leaves its tensors'],
    ],
    [
      'a row',
      () => api.movePlan({ ...fwdQ, dstOffset: fwdQ.dstOffset.map(() => -1) }, source, 2),
      ['leaves its tensors'],
    ],
    [
      'no rows',
      () => api.movePlan({ ...fwdQ, srcOffset: new Int32Array(0) }, source, 2),
      ['plan.srcOffset', '3 elements', 'found 0'],
    ],
    [
      'a tensor of less than nothing',
      () => api.movePlan({ ...fwdQ, recvTokens: Int32Array.of(-1, 9) }, source, 2),
      ['the tensor of rank 0', 'found -2'],
    ],
    ['a tensor that is none', () => api.movePlan(fwdQ, [[1] as never, source[1]!], 2), ['source[0]', 'an array of 1']],
    ['a home row', () => sum({ homeRow: reduction.homeRow.map(() => 99) }), ['reduction.homeRow[0]', '99']],
    ['a replica row', () => sum({ denseRow: reduction.denseRow.map(() => 99) }), ['reduction.denseRow[0]', '99']],
    ['slots', () => sum({ slotOffsets: reduction.slotOffsets.map((n) => 2 * n) }), ['reduction.slotOffsets']],
    ['a length', () => sum({ lengths: reduction.lengths.with(1, -2) }), ['reduction.lengths[1]', '-2']],
    [
      'a choice beyond its tensor',
      () => api.moeCombine({ ...plan, row: plan.row.with(0, 9) }, y, combine),
      ['plan.row[0]', 'row 9 of replica 0'],
    ],
    [
      'a choice of a rank that was lost',
      () => api.moeDispatch({ ...plan, lostRanks: Uint8Array.of(0, 1) }, tokens, 2),
      ['plan.row[1]', 'taking part'],
    ],
    [
      'an expert that gives too little',
      () => api.moeDense(routing, tokens, weights, 2, () => new Float64Array(1)),
      ['what apply gives for expert 0', '2 elements', 'found 1'],
    ],
    ['the precision', () => api.moeCombine(plan, y, { ...combine, precision: 'f16' as never }), ['precision', 'f16']],
    ['no channels', () => api.moeDispatch(plan, tokens, 0), ['hidden', 'found 0']],
    ['half a channel', () => api.moeCombine(plan, y, { ...combine, hidden: 0.5 }), ['hidden', '0.5']],
    ['less than a channel', () => api.moeDense(routing, tokens, weights, -2, (_, row) => row), ['hidden', '-2']],
    ['a filling', () => api.moeDispatch(plan, tokens, 2, '1' as never), ['fill', 'string 1']],
    ['a filling of rows', () => api.movePlan(fwdQ, source, 2, null as never), ['fill', 'null']],
    [
      'a flag',
      () => api.moeCombine(plan, y, { ...combine, renormalise: 1 as never }),
      ['renormalise', 'true or false'],
    ],
    ['no elements', () => api.movePlan(fwdQ, source, 0), ['rowElements', 'found 0']],
    ['half an element', () => api.sumReplicas(reduction, gradients, 0.5, 'dense', 'f64'), ['rowElements', '0.5']],
    ['how to sum', () => api.sumReplicas(reduction, gradients, 2, 'dense', 'f16' as never), ['precision', 'f16']],
    ['home rows', () => sum({ homeRow: new Int32Array(0) }), ['reduction.homeRow', '3 elements', 'found 0']],
    [
      'a rank that is none',
      () => api.moeCombine({ ...plan, map: { ...plan.map, rank: plan.map.rank.map(() => 7) } }, y, combine),
      ['plan.row[0]', 'of a rank'],
    ],
    ['integers of 64 bits', () => api.castRow('logfmt10', new BigInt64Array(2) as never), ['row[0]', 'bigint 0']],
  ])('%s is refused', (_, call, parts) => {
    expectPlanError(call, 'EP_INVALID_ARGUMENT', ...parts);
  });
});
