import { checkBoolean, checkInteger, checkNumbers, checkObject, wrongKind } from '../check.js';
import { invalidArgument } from '../error.js';
import { checkMoePlan } from '../moe/form.js';
import { maxHidden } from '../moe/payload.js';
import { type MoePlan, nowhere, rankReceives, rankSends } from '../moe/plan.js';
import { type RankMask, rankMask } from '../moe/ranks.js';
import { checkRouting, choicesOf, type TokenRouting } from '../moe/routing.js';
import { checkFill, checkPrecision } from './movement.js';
import { checkTensors, elementsOf, type RankTensors } from './tensors.js';

/**
 * Rows that experts receive: for each rank `[recvRows, hidden]`, in either form. What no token wrote is `fill` in low-latency form, where it is
 * undefined, and 0 in high-throughput form, where padding and the rows of lost ranks are promised to be. `x[s]` holds `tokens * hidden` numbers;
 * that of a rank that is not active or was lost is not looked at.
 */
export function moeDispatch(plan: MoePlan, x: RankTensors, hidden: number, fill = 0): Float64Array[] {
  checkMoePlan(plan);
  checkChoices(plan);
  const { worldSize } = plan.map;
  checkInteger(hidden, 'hidden', 1, maxHidden);
  checkFill(fill);
  const elements = (s: number) => rankSends(plan, s).tokens * hidden;
  checkTensors(x, 'x', worldSize, whereAlive(plan, elements));
  return Array.from({ length: worldSize }, (_, r) => {
    const { recvRows, sourceRank, sourceToken } = rankReceives(plan, r);
    const received = new Float64Array(elementsOf(recvRows, hidden, `the tensor of rank ${r}`)).fill(
      plan.form.mode === 'low-latency' ? fill : 0,
    );
    for (let row = 0; row < recvRows; row++) {
      if (sourceRank[row]! < 0) continue;
      for (let h = 0; h < hidden; h++) {
        received[row * hidden + h] = x[sourceRank[row]!]![sourceToken[row]! * hidden + h]!;
      }
    }
    return received;
  });
}

export interface MoeCombineOptions {
  readonly hidden: number;
  /** 'f64', or 'f32': every product and every sum rounded to fp32 by itself (no fused multiply-add), which is what a kernel must do to agree bit by bit. */
  readonly precision: 'f64' | 'f32';
  /** Weights of each rank's choices, tokens * topK. Without them rows are summed as they are: the backward pass of dispatch. */
  readonly weights?: RankTensors;
  /** Where some of a token's experts are gone, scale what is left so that the weights of its choices keep their sum. */
  readonly renormalise?: boolean;
  /** Ranks found dead in the combine, besides those that the plan knows. Their rows are dropped for all of their experts. */
  readonly lostRanks?: RankMask;
  /** Up to two tensors like the result, added to it. */
  readonly bias?: readonly RankTensors[];
}

/**
 * Results back at their tokens: for each rank `[tokens, hidden]`. `y[r]` is like the receive tensor of rank r.
 *
 * The order of summation is fixed and the same in both forms: begin with the first bias, or 0; add the second bias; then add the choices of
 * the token, first to last (k = 0 first), each as weight * row. Choices that are empty or whose rank is gone are skipped, not added as 0: what
 * their rows hold, be it NaN, does not matter. A token without any choice left is its biases alone, or 0.
 *
 * Renormalised weights are `w * (sum of the weights of all choices that are not empty / sum of those that are left)`, both sums in order of k
 * and the quotient rounded to the same precision; where the latter is 0 the factor is 1.
 */
export function moeCombine(plan: MoePlan, y: RankTensors, options: MoeCombineOptions): Float64Array[] {
  checkMoePlan(plan);
  checkChoices(plan);
  checkObject(options, 'options');
  const { map, routing } = plan;
  const { worldSize } = map;
  const { hidden, weights, bias = [], renormalise = false } = options;
  checkPrecision(options.precision);
  checkBoolean(renormalise, 'renormalise');
  const round = options.precision === 'f32' ? Math.fround : (x: number) => x;
  const lost = rankMask(options.lostRanks, 'lostRanks', worldSize, 0);
  const tokensOf = (s: number) => rankSends(plan, s).tokens;
  checkInteger(hidden, 'hidden', 1, maxHidden);
  const check = (tensors: RankTensors, name: string, elements: (rank: number) => number) =>
    checkTensors(tensors, name, worldSize, whereAlive(plan, elements, lost));
  check(y, 'y', (r) => plan.placement.recvRows[r]! * hidden);
  if (weights !== undefined) check(weights, 'weights', (s) => tokensOf(s) * routing.topK);
  if (!Array.isArray(bias)) throw wrongKind('bias', 'an array of at most 2 tensors for each rank', bias);
  if (bias.length > 2) throw invalidArgument(`bias must be at most 2 tensors, found ${bias.length}`, { name: 'bias' });
  bias.forEach((b, i) => {
    check(b, `bias[${i}]`, (s) => tokensOf(s) * hidden);
  });
  return Array.from({ length: worldSize }, (_, s) => {
    const { tokens, topkIdx, replica, row } = rankSends(plan, s);
    const out = new Float64Array(tokens * hidden);
    if (plan.activeRanks[s] === 0 || plan.lostRanks[s] === 1 || lost[s] === 1) return out;
    for (let t = 0; t < tokens; t++) {
      const isLeft = (k: number) =>
        row[t * routing.topK + k]! >= 0 && lost[map.rank[replica[t * routing.topK + k]!]!] === 0;
      let all = 0;
      let left = 0;
      for (let k = 0; k < routing.topK; k++) {
        const w = weights === undefined ? 1 : weights[s]![t * routing.topK + k]!;
        if (topkIdx[t * routing.topK + k]! >= 0) all = round(all + w);
        if (isLeft(k)) left = round(left + w);
      }
      const scale = renormalise && left !== 0 ? round(all / left) : 1;
      for (let h = 0; h < hidden; h++) {
        const at = t * hidden + h;
        let sum = 0;
        if (bias[0] !== undefined) sum = round(bias[0][s]![at]!);
        if (bias[1] !== undefined) sum = round(sum + bias[1][s]![at]!);
        for (let k = 0; k < routing.topK; k++) {
          if (!isLeft(k)) continue;
          const i = t * routing.topK + k;
          const value = y[map.rank[replica[i]!]!]![row[i]! * hidden + h]!;
          const w = weights === undefined ? 1 : round(weights[s]![i]! * scale);
          sum = round(sum + round(w * value));
        }
        out[at] = sum;
      }
    }
    return out;
  });
}

/**
 * The mixture computed where the tokens are, with no plan at all: `sum over k of weight * expert(e_k, x)`, k = 0 first, in fp64. What dispatch,
 * experts and combine together must give. `apply` gets one token's row and returns the expert's row.
 */
export function moeDense(
  routing: TokenRouting,
  x: RankTensors,
  weights: RankTensors,
  hidden: number,
  apply: (expert: number, row: Float64Array) => Float64Array,
): Float64Array[] {
  checkRouting(routing);
  checkInteger(hidden, 'hidden', 1, maxHidden);
  if (typeof apply !== 'function') throw wrongKind('apply', 'a function', apply);
  const { topK, tokenOffsets, topkIdx } = routing;
  const tokensOf = (s: number) => tokenOffsets[s + 1]! - tokenOffsets[s]!;
  checkTensors(x, 'x', routing.worldSize, (s) => tokensOf(s) * hidden);
  checkTensors(weights, 'weights', routing.worldSize, (s) => tokensOf(s) * topK);
  return Array.from({ length: routing.worldSize }, (_, s) => {
    const tokens = tokensOf(s);
    const out = new Float64Array(tokens * hidden);
    for (let t = 0; t < tokens; t++) {
      const row = Float64Array.from({ length: hidden }, (__, h) => x[s]![t * hidden + h]!);
      for (let k = 0; k < topK; k++) {
        const e = topkIdx[(tokenOffsets[s]! + t) * topK + k]!;
        if (e < 0) continue;
        const result = checkNumbers(apply(e, row), `what apply gives for expert ${e}`, hidden);
        for (let h = 0; h < hidden; h++) out[t * hidden + h]! += weights[s]![t * topK + k]! * result[h]!;
      }
    }
    return out;
  });
}

/** How many elements the tensors of ranks that take part hold; those of others are not looked at. */
function whereAlive(
  { activeRanks, lostRanks }: MoePlan,
  elements: (rank: number) => number,
  lost?: Uint8Array,
): (rank: number) => number | undefined {
  return (r) => (activeRanks[r] === 0 || lostRanks[r] === 1 || lost?.[r] === 1 ? undefined : elements(r));
}

/** Every choice that travels does so between ranks that take part, to a row that there is. Linear in choices. */
function checkChoices(plan: MoePlan): void {
  const { map, routing, row, replica, activeRanks, lostRanks, placement } = plan;
  const takesPart = (r: number) => activeRanks[r] === 1 && lostRanks[r] === 0;
  for (let s = 0; s < map.worldSize; s++) {
    const [from, to] = choicesOf(routing, s, 'plan.routing.');
    for (let i = from; i < to; i++) {
      if (row[i]! < 0) continue;
      const at = map.rank[replica[i]!];
      if (at === undefined || !takesPart(s) || !takesPart(at) || row[i]! >= placement.recvRows[at]!)
        throw nowhere(plan, i);
    }
  }
}
