import {
  checkInt32Array,
  checkInteger,
  checkNumbers,
  checkObject,
  checkOffsets,
  checkRange,
  checkRows,
  maxRows,
  partOf,
  wrongKind,
} from '../check.js';
import { invalidArgument } from '../error.js';
import { maxExperts, maxWorldSize } from './experts.js';

/**
 * What the router chose, for the tokens of all ranks. Rank r has the tokens `tokenOffsets[r] .. tokenOffsets[r+1]`; token t chose the
 * experts `topkIdx[t * topK .. (t + 1) * topK)`, -1 = none. A token chooses an expert at most once.
 */
export interface TokenRouting {
  readonly worldSize: number;
  readonly experts: number;
  readonly topK: number;
  /** worldSize + 1 elements. */
  readonly tokenOffsets: Int32Array;
  /** tokens * topK elements, token-major. */
  readonly topkIdx: Int32Array;
}

/** A routing of the choices of each rank: `ranks[r]` holds tokens * topK expert indices. Copies and checks them. */
export function routingOfRanks(experts: number, topK: number, ranks: readonly Int32Array[]): TokenRouting {
  checkInteger(topK, 'topK', 1, maxRows);
  if (!Array.isArray(ranks)) throw wrongKind('ranks', 'an array of Int32Array', ranks);
  checkInteger(ranks.length, 'ranks.length', 1, maxWorldSize);
  const tokenOffsets = new Int32Array(ranks.length + 1);
  let tokens = 0;
  Array.from<Int32Array>(ranks).forEach((topkIdx, r) => {
    checkInt32Array(topkIdx, `ranks[${r}]`);
    if (topkIdx.length % topK !== 0) {
      throw invalidArgument(`ranks[${r}] must hold a multiple of topK = ${topK} elements, found ${topkIdx.length}`, {
        name: 'ranks',
        rank: r,
        topK,
        found: topkIdx.length,
      });
    }
    tokens += topkIdx.length / topK;
    checkRows(tokens * topK, 'the routing', { tokens, topK });
    tokenOffsets[r + 1] = tokens;
  });
  const topkIdx = new Int32Array(tokens * topK);
  ranks.forEach((mine, r) => {
    topkIdx.set(mine, tokenOffsets[r]! * topK);
  });
  const routing = Object.freeze({ worldSize: ranks.length, experts, topK, tokenOffsets, topkIdx });
  checkRouting(routing);
  return routing;
}

/** The choices of one rank; a view. */
export function rankTopk(routing: TokenRouting, rank: number): Int32Array {
  checkRoutingForm(routing);
  checkInteger(rank, 'rank', 0, routing.worldSize - 1);
  return routing.topkIdx.subarray(...choicesOf(routing, rank));
}

/** Where the choices of a rank begin and end among those of all. */
export function choicesOf({ tokenOffsets, topkIdx, topK }: TokenRouting, rank: number, at = ''): [number, number] {
  const [from, to] = partOf(tokenOffsets, `${at}tokenOffsets`, rank, topkIdx.length / topK);
  return [from * topK, to * topK];
}

/** Times each expert was chosen. */
export function expertLoad(routing: TokenRouting): Float64Array {
  checkRouting(routing);
  const load = new Float64Array(routing.experts);
  for (const e of routing.topkIdx) if (e >= 0) load[e]!++;
  return load;
}

/**
 * Gini coefficient of a load: half the mean absolute difference of two of its elements, over their mean. 0 = all alike; `1 - 1/n` = one of n
 * has everything; 0 too where there is no load.
 */
export function gini(load: ArrayLike<number>): number {
  const sorted = Float64Array.from(checkNumbers(load, 'load')).sort();
  const n = sorted.length;
  let sum = 0;
  let weighted = 0;
  for (let i = 0; i < n; i++) {
    const x = sorted[i]!;
    // Negated, so that NaN is refused too.
    if (!(x >= 0)) throw invalidArgument(`a load must be at least 0, found ${x}`, { name: 'load', found: x });
    sum += x;
    weighted += (2 * i + 1 - n) * x;
  }
  return sum === 0 ? 0 : weighted / (n * sum);
}

/** Throws EP_INVALID_ARGUMENT that names the first thing wrong. */
export function checkRouting(routing: TokenRouting): void {
  checkRoutingForm(routing);
  const { worldSize, topK, tokenOffsets, topkIdx } = routing;
  checkOffsets(tokenOffsets, 'tokenOffsets');
  checkInt32Array(topkIdx, 'topkIdx', tokenOffsets[worldSize]! * topK);
  checkTopk(topkIdx, topK, routing.experts);
}

/** The kinds of its fields, their names behind `at`, in constant time; what they hold is not looked at. */
export function checkRoutingForm(routing: TokenRouting, at = ''): void {
  checkObject(routing, `${at}routing`);
  const worldSize = checkInteger(routing.worldSize, `${at}worldSize`, 1, maxWorldSize);
  checkInteger(routing.experts, `${at}experts`, 1, maxExperts);
  checkInteger(routing.topK, `${at}topK`, 1, maxRows);
  checkInt32Array(routing.tokenOffsets, `${at}tokenOffsets`, worldSize + 1);
  checkInt32Array(routing.topkIdx, `${at}topkIdx`);
}

/** Choices of whole tokens, in range, none twice in a token. */
export function checkTopk(topkIdx: Int32Array, topK: number, experts: number): void {
  checkInteger(experts, 'experts', 1, maxExperts);
  checkRange(topkIdx, 'topkIdx', -1, experts - 1);
  if (topkIdx.length === 0) return;
  // HAZARD: a token that chose an expert twice would own two rows of one (expert, source, token); a combine that addresses rows so would add one
  // of them twice and lose the other.
  const lastChosen = new Int32Array(experts).fill(-1);
  for (let first = 0; first < topkIdx.length; first += topK) {
    for (let i = first; i < first + topK; i++) {
      const e = topkIdx[i]!;
      if (e < 0) continue;
      if (lastChosen[e]! >= first) {
        throw invalidArgument(
          `topkIdx[${i}] repeats expert ${e}, which token ${first / topK} already chose at topkIdx[${lastChosen[e]}]`,
          { name: 'topkIdx', index: i, token: first / topK, expert: e },
        );
      }
      lastChosen[e] = i;
    }
  }
}
