import { checkAttached, checkBoolean, checkInteger, checkNumbers, checkObject, describe } from '../check.js';
import { invalidArgument, shown } from '../error.js';
import { maxExperts } from './experts.js';

/**
 * Experts in `groups` equal groups, in order. A token may only choose from its `topGroups` best groups. A group is as good as its best expert
 * ('max', DeepSeek-V2), or as the sum of its two best ('top2-sum', DeepSeek-V3).
 */
export interface GroupLimit {
  readonly groups: number;
  readonly topGroups: number;
  readonly groupScore: 'max' | 'top2-sum';
}

export interface TopkOptions {
  readonly experts: number;
  readonly topK: number;
  readonly limit?: GroupLimit;
  /** Added to each expert's score for choosing, not for weighing: the correction that balances load without a loss term (DeepSeek-V3). */
  readonly bias?: ArrayLike<number>;
  /** Divide the weights of a token by their sum. False by default. */
  readonly normalise?: boolean;
  /** Weights are multiplied by this, after that. 1 by default. */
  readonly scale?: number;
}

export interface Topk {
  /** tokens * topK elements, best first; among equals the lower index first. */
  readonly topkIdx: Int32Array;
  /** Scores of the chosen, without bias. */
  readonly topkWeights: Float32Array;
}

/**
 * The `topK` best experts of each token, `scores[t * experts + e]` being what the router gave (after its sigmoid or softmax). Computed in
 * fp64, weights rounded to fp32 once. Scores that are not finite are refused: NaN has no place in any order.
 */
export function topkExperts(scores: Float32Array | Float64Array, options: TopkOptions): Topk {
  checkObject(options, 'options');
  const experts = checkInteger(options.experts, 'experts', 1, maxExperts);
  const topK = checkInteger(options.topK, 'topK', 1, experts);
  const limit = checkLimit(options.limit ?? { groups: 1, topGroups: 1, groupScore: 'max' }, experts, topK);
  const bias = checkBias(options.bias, experts);
  const { normalise = false, scale = 1 } = options;
  checkAttached(scores, 'scores');
  if (!(scores instanceof Float32Array || scores instanceof Float64Array) || scores.length % experts !== 0) {
    const found = ArrayBuffer.isView(scores) ? `${scores.length} of a ${shown(scores)}` : describe(scores);
    throw invalidArgument(
      `scores must be a float array of a multiple of experts = ${experts} elements, found ${found}`,
      { name: 'scores', experts, found },
    );
  }
  checkBoolean(normalise, 'normalise');
  if (!Number.isFinite(scale)) throw invalidArgument(`scale must be finite, found ${shown(scale)}`, { name: 'scale' });
  const tokens = scores.length / experts;
  const topkIdx = new Int32Array(tokens * topK);
  const topkWeights = new Float32Array(tokens * topK);
  const biased = new Float64Array(experts);
  for (let t = 0; t < tokens; t++) {
    for (let e = 0; e < experts; e++) {
      const score = scores[t * experts + e]!;
      if (!Number.isFinite(score)) {
        throw invalidArgument(`scores[${t * experts + e}] (token ${t}, expert ${e}) must be finite, found ${score}`, {
          name: 'scores',
          token: t,
          expert: e,
          found: score,
        });
      }
      biased[e] = score + bias[e]!;
    }
    keepBestGroups(biased, limit);
    const chosen = topkIdx.subarray(t * topK, (t + 1) * topK);
    best(biased, chosen);
    let sum = 0;
    for (const e of chosen) sum += scores[t * experts + e]!;
    const factor = normalise && sum !== 0 ? scale / sum : scale;
    chosen.forEach((e, k) => {
      topkWeights[t * topK + k] = scores[t * experts + e]! * factor;
    });
  }
  return { topkIdx, topkWeights };
}

/** What does not belong to the best groups becomes -infinity. */
function keepBestGroups(scores: Float64Array, { groups, topGroups, groupScore }: GroupLimit): void {
  if (topGroups === groups) return;
  const size = scores.length / groups;
  const groupScores = Float64Array.from({ length: groups }, (_, g) => {
    const two = best(scores.subarray(g * size, (g + 1) * size), new Int32Array(groupScore === 'max' ? 1 : 2));
    return two.reduce((sum, e) => sum + scores[g * size + e]!, 0);
  });
  const kept = new Set(best(groupScores, new Int32Array(topGroups)));
  for (let g = 0; g < groups; g++) if (!kept.has(g)) scores.fill(Number.NEGATIVE_INFINITY, g * size, (g + 1) * size);
}

/** Indices of the `into.length` largest, descending, among equals the lower first: insertion into a short sorted list. */
function best(scores: Float64Array, into: Int32Array): Int32Array {
  let held = 0;
  for (let i = 0; i < scores.length; i++) {
    if (held === into.length && !(scores[i]! > scores[into[held - 1]!]!)) continue;
    let at = held < into.length ? held++ : held - 1;
    for (; at > 0 && scores[i]! > scores[into[at - 1]!]!; at--) into[at] = into[at - 1]!;
    into[at] = i;
  }
  return into;
}

function checkLimit(limit: GroupLimit, experts: number, topK: number): GroupLimit {
  checkObject(limit, 'limit');
  const groups = checkInteger(limit.groups, 'groups', 1, experts);
  if (experts % groups !== 0) {
    throw invalidArgument(`groups must divide experts = ${experts}, found ${groups}`, {
      name: 'groups',
      found: groups,
    });
  }
  const size = experts / groups;
  const topGroups = checkInteger(limit.topGroups, 'topGroups', 1, groups);
  if (limit.groupScore !== 'max' && limit.groupScore !== 'top2-sum') {
    throw invalidArgument(`groupScore must be 'max' or 'top2-sum', found ${shown(limit.groupScore)}`, {
      name: 'groupScore',
    });
  }
  if (limit.groupScore === 'top2-sum' && size < 2) {
    throw invalidArgument(
      `'top2-sum' needs groups of at least 2 experts, ${groups} groups of ${experts} have ${size}`,
      {
        name: 'groupScore',
      },
    );
  }
  if (topGroups * size < topK) {
    throw invalidArgument(
      `topK = ${topK} exceeds the ${topGroups * size} experts of topGroups = ${topGroups} groups of ${size}`,
      { name: 'topK', topK, topGroups, size },
    );
  }
  return limit;
}

function checkBias(bias: ArrayLike<number> | undefined, experts: number): ArrayLike<number> {
  if (bias === undefined) return new Float64Array(experts);
  checkNumbers(bias, 'bias', experts);
  for (let e = 0; e < experts; e++) {
    if (!Number.isFinite(bias[e])) {
      throw invalidArgument(`bias[${e}] must be finite, found ${bias[e]}`, { name: 'bias', index: e });
    }
  }
  return bias;
}
