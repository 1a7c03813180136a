import { checkInteger } from '../check.js';
import { invalidArgument } from '../error.js';
import { type MoePlan, rankReceives, rankSends } from '../moe/plan.js';
import { type RankMask, rankMask } from '../moe/ranks.js';
import type { TokenRouting } from '../moe/routing.js';
import type { RankTensors } from './movement.js';

/**
 * Rows that experts receive: for each rank `[recvRows, hidden]`, in either form. What no token wrote is `fill` in low-latency form, where it is
 * undefined, and 0 in high-throughput form, where padding and the rows of lost ranks are promised to be. `x[s]` holds `tokens * hidden` numbers;
 * that of a rank that is not active or was lost is not looked at.
 */
export function moeDispatch(plan: MoePlan, x: RankTensors, hidden: number, fill = 0): Float64Array[] {
  const { worldSize } = plan.map;
  checkInteger(hidden, 'hidden', 1, 2 ** 24);
  checkTensors(plan, x, 'x', hidden, (s) => rankSends(plan, s).tokens);
  return Array.from({ length: worldSize }, (_, r) => {
    const { recvRows, sourceRank, sourceToken } = rankReceives(plan, r);
    const received = new Float64Array(recvRows * hidden).fill(plan.form.mode === 'low-latency' ? fill : 0);
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
  const { map, routing } = plan;
  const { hidden, weights, bias = [], renormalise = false } = options;
  const round = options.precision === 'f32' ? Math.fround : (x: number) => x;
  const lost = rankMask(options.lostRanks, 'lostRanks', map.worldSize, 0);
  const tokensOf = (s: number) => rankSends(plan, s).tokens;
  checkInteger(hidden, 'hidden', 1, 2 ** 24);
  checkTensors(plan, y, 'y', hidden, (r) => plan.placement.recvRows[r]!, lost);
  if (weights !== undefined) checkTensors(plan, weights, 'weights', routing.topK, tokensOf, lost);
  if (bias.length > 2) throw invalidArgument(`bias must be at most 2 tensors, found ${bias.length}`, { name: 'bias' });
  bias.forEach((b, i) => {
    checkTensors(plan, b, `bias[${i}]`, hidden, tokensOf, lost);
  });
  return Array.from({ length: map.worldSize }, (_, s) => {
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
  const { topK, tokenOffsets, topkIdx } = routing;
  return Array.from({ length: routing.worldSize }, (_, s) => {
    const tokens = tokenOffsets[s + 1]! - tokenOffsets[s]!;
    const out = new Float64Array(tokens * hidden);
    for (let t = 0; t < tokens; t++) {
      const row = Float64Array.from({ length: hidden }, (__, h) => x[s]![t * hidden + h]!);
      for (let k = 0; k < topK; k++) {
        const e = topkIdx[(tokenOffsets[s]! + t) * topK + k]!;
        if (e < 0) continue;
        const result = apply(e, row);
        for (let h = 0; h < hidden; h++) out[t * hidden + h]! += weights[s]![t * topK + k]! * result[h]!;
      }
    }
    return out;
  });
}

/** One tensor for each rank that takes part, of so many rows. */
function checkTensors(
  plan: MoePlan,
  tensors: RankTensors,
  name: string,
  rowElements: number,
  rows: (rank: number) => number,
  lost: Uint8Array = new Uint8Array(plan.map.worldSize),
): void {
  const { worldSize } = plan.map;
  if (tensors.length !== worldSize) {
    throw invalidArgument(`${name} must hold ${worldSize} tensors, one for each rank, found ${tensors.length}`, {
      name,
      expected: worldSize,
      found: tensors.length,
    });
  }
  for (let r = 0; r < worldSize; r++) {
    if (plan.activeRanks[r] === 0 || plan.lostRanks[r] === 1 || lost[r] === 1) continue;
    const expected = rows(r) * rowElements;
    if (tensors[r]!.length !== expected) {
      throw invalidArgument(`${name}[${r}] must hold ${expected} elements, found ${tensors[r]!.length}`, {
        name,
        rank: r,
        expected,
        found: tensors[r]!.length,
      });
    }
  }
}
