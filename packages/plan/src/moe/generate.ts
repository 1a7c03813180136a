import { checkInteger, checkNumber, checkObject, checkRows, maxRows } from '../check.js';
import { invalidArgument, shown } from '../error.js';
import { maxExperts, maxWorldSize } from './experts.js';
import { randomNumbers, shuffle } from './random.js';
import { integersOfRanks } from './ranks.js';
import { checkRouting, gini, routingOfRanks, type TokenRouting } from './routing.js';

/**
 * How often experts are chosen; which ones are the popular ones is drawn from the seed.
 *
 * - 'uniform': all alike.
 * - 'k-hot': `hot` of them get `share` of all choices, evenly; the others the rest.
 * - 'zipf': the i-th most popular in proportion to `i ** -exponent`, but none by more than every token.
 * - 'gini': a zipf whose expected load has the Gini coefficient `target`. Real text gives 0.10 to 0.38, depending on the model.
 */
export type Popularity =
  | { readonly kind: 'uniform' }
  | { readonly kind: 'k-hot'; readonly hot: number; readonly share: number }
  | { readonly kind: 'zipf'; readonly exponent: number }
  | { readonly kind: 'gini'; readonly target: number };

export interface GenerateOptions {
  readonly worldSize: number;
  /** Tokens of every rank, or of each. */
  readonly tokens: number | ArrayLike<number>;
  readonly experts: number;
  readonly topK: number;
  readonly popularity: Popularity;
  readonly seed: number;
  /** Share of choices that are left out (-1), independently. 0 by default. */
  readonly emptyShare?: number;
}

/**
 * A random routing, the same for the same options on every machine. Each token chooses `topK` different experts; an expert is among them with
 * exactly the probability that `popularity` asks for (systematic sampling over experts shuffled anew for each token), so measured loads differ
 * from expected ones by chance only. Few tokens have a higher Gini coefficient than asked for, by chance alone. Time is linear in tokens * experts.
 */
export function generateRouting(options: GenerateOptions): TokenRouting {
  checkObject(options, 'options');
  const { popularity, emptyShare = 0 } = options;
  const worldSize = checkInteger(options.worldSize, 'worldSize', 1, maxWorldSize);
  const experts = checkInteger(options.experts, 'experts', 1, maxExperts);
  const topK = checkInteger(options.topK, 'topK', 1, experts);
  const random = randomNumbers(checkInteger(options.seed, 'seed', 0, 2 ** 32 - 1));
  checkNumber(emptyShare, 'emptyShare', 0, 1);
  const tokens = integersOfRanks(options.tokens, 'tokens', worldSize, maxRows);
  checkRows(tokens.reduce((sum, n) => sum + n, 0) * topK, 'the routing', { topK });
  const expected = expectedChoices(popularity, experts, topK);
  const identity = shuffle(identityOrder(experts), random);
  const probability = new Float64Array(experts);
  for (let i = 0; i < experts; i++) probability[identity[i]!] = expected[i]!;
  const order = identityOrder(experts);
  const ranks = Array.from(tokens, (count) => {
    const topkIdx = new Int32Array(count * topK);
    for (let t = 0; t < count; t++) {
      const chosen = topkIdx.subarray(t * topK, (t + 1) * topK);
      choose(probability, shuffle(order, random), random, chosen);
      if (emptyShare === 0) continue;
      for (let k = 0; k < topK; k++) if (random() < emptyShare) chosen[k] = -1;
    }
    return topkIdx;
  });
  return routingOfRanks(experts, topK, ranks);
}

/** Weights for a routing: positive, of sum 1 over each token's choices, 0 for those that are -1. */
export function generateWeights(routing: TokenRouting, seed: number): Float32Array {
  checkRouting(routing);
  const random = randomNumbers(checkInteger(seed, 'seed', 0, 2 ** 32 - 1));
  const { topkIdx, topK } = routing;
  const weights = new Float64Array(topkIdx.length);
  for (let first = 0; first < weights.length; first += topK) {
    let sum = 0;
    for (let i = first; i < first + topK; i++) {
      weights[i] = topkIdx[i]! < 0 ? 0 : 0.25 + random();
      sum += weights[i]!;
    }
    if (sum > 0) for (let i = first; i < first + topK; i++) weights[i]! /= sum;
  }
  return Float32Array.from(weights);
}

/** Expected choices per token of the most popular expert, the second, and so on: each at most 1, together `topK`. */
export function expectedChoices(popularity: Popularity, experts: number, topK: number): Float64Array {
  checkObject(popularity, 'popularity');
  checkInteger(experts, 'experts', 1, maxExperts);
  checkInteger(topK, 'topK', 1, experts);
  switch (popularity.kind) {
    case 'uniform':
      return new Float64Array(experts).fill(topK / experts);
    case 'k-hot':
      return kHot(popularity.hot, popularity.share, experts, topK);
    case 'zipf':
      return zipf(checkNumber(popularity.exponent, 'exponent', 0, largestExponent(experts)), experts, topK);
    case 'gini':
      return zipfOfGini(popularity.target, experts, topK);
    default:
      throw invalidArgument(
        `popularity.kind must be 'uniform', 'k-hot', 'zipf' or 'gini', found ${shown((popularity as { kind: unknown }).kind)}`,
        { name: 'popularity.kind' },
      );
  }
}

function kHot(hot: number, share: number, experts: number, topK: number): Float64Array {
  checkInteger(hot, 'hot', 1, experts);
  checkNumber(share, 'share', 0, 1);
  const each = (share * topK) / hot;
  const other = hot === experts ? 0 : ((1 - share) * topK) / (experts - hot);
  if (each > 1 || other > 1 || (hot === experts && share !== 1)) {
    const [least, most] = [Math.max(0, 1 - (experts - hot) / topK), Math.min(1, hot / topK)];
    throw invalidArgument(
      `${hot} of ${experts} experts can get a share of ${least} to ${most} of top-${topK} choices, since no token chooses one twice; share is ${share}`,
      { name: 'share', hot, experts, topK, found: share, least, most },
    );
  }
  return Float64Array.from({ length: experts }, (_, i) => (i < hot ? each : other));
}

function zipf(exponent: number, experts: number, topK: number): Float64Array {
  const weights = Float64Array.from({ length: experts }, (_, i) => (i + 1) ** -exponent);
  const expected = new Float64Array(experts);
  // What would exceed 1 is 1, and the rest is shared among the others, most popular first.
  let left = weights.reduce((sum, w) => sum + w, 0);
  let full = 0;
  while (full < topK && (topK - full) * weights[full]! >= left) {
    expected[full] = 1;
    left -= weights[full]!;
    full++;
    // Subtraction leaves rounding errors of the large ones in the sum of the small ones.
    if (left < weights[full - 1]!) left = weights.subarray(full).reduce((sum, w) => sum + w, 0);
  }
  for (let i = full; i < experts; i++) expected[i] = left === 0 ? 0 : ((topK - full) * weights[i]!) / left;
  return expected;
}

function zipfOfGini(target: number, experts: number, topK: number): Float64Array {
  let [low, high] = [0, largestExponent(experts)];
  const most = gini(zipf(high, experts, topK));
  if (typeof target !== 'number' || !(target >= 0 && target <= most)) {
    throw invalidArgument(
      `target must be in [0, ${most}], the Gini coefficients that top-${topK} of ${experts} experts can have, found ${shown(target)}`,
      { name: 'target', experts, topK, found: target, most },
    );
  }
  for (let step = 0; step < 60; step++) {
    const middle = (low + high) / 2;
    if (gini(zipf(middle, experts, topK)) < target) low = middle;
    else high = middle;
  }
  return zipf(high, experts, topK);
}

/** Beyond this the weight of the last expert would underflow. */
function largestExponent(experts: number): number {
  return experts === 1 ? 1 : 300 / Math.log10(experts);
}

/**
 * Systematic sampling: expert i owns a stretch of `probability[i]` of a line of length topK; of the points u, u + 1, u + 2, … each picks whose
 * stretch it lies on. No stretch is longer than 1, so nobody is picked twice.
 */
export function choose(probability: Float64Array, order: Int32Array, random: () => number, chosen: Int32Array): void {
  let point = random();
  let end = 0;
  let picked = 0;
  for (let i = 0; i < order.length && picked < chosen.length; i++) {
    end += probability[order[i]!]!;
    if (point >= end) continue;
    chosen[picked++] = order[i]!;
    point += 1;
  }
  // Stretches add up to topK but for rounding: the last point may lie a hair behind the end of the line.
  for (let i = order.length - 1; picked < chosen.length; i--) {
    const e = order[i]!;
    if (probability[e]! > 0 && !chosen.subarray(0, picked).includes(e)) chosen[picked++] = e;
  }
}

function identityOrder(length: number): Int32Array {
  return Int32Array.from({ length }, (_, i) => i);
}
