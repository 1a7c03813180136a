import { checkInt32Array, checkInteger, checkObject, checkRange, checkRows, maxRows } from '../check.js';
import { unwrittenColumn } from '../column.js';
import { invalidArgument, shown } from '../error.js';
import { checkMap, type ExpertMap, maxWorldSize } from './experts.js';
import { type RankMask, rankMask } from './ranks.js';
import { checkTopk } from './routing.js';

/**
 * Which replica of an expert serves a choice. 'spread': a source rank takes an expert's replicas in turn, beginning with replica number
 * (its rank modulo their count), so that no two of them differ by more than one choice of each source. 'nearest': the same among the
 * replicas on the source itself, or else on its node, or else all.
 */
export type ReplicaPolicy = 'spread' | 'nearest';

export interface ReplicaOptions {
  readonly policy?: ReplicaPolicy;
  /** Rank r is on node floor(r / ranksPerNode); by default all ranks are on one. */
  readonly ranksPerNode?: number;
  /** Ranks that are known to be there before the call: no choice goes to a replica elsewhere. All, by default. */
  readonly activeRanks?: RankMask;
}

/** What one rank's choices come to; needs nothing from other ranks. */
export interface RoutingLayout {
  readonly rank: number;
  readonly tokens: number;
  readonly topK: number;
  /** Replica that serves each choice, parallel to `topkIdx`; -1 for none, and where no active rank holds the expert. */
  readonly replica: Int32Array;
  /** Place of the choice among those of this rank to that replica, in token order; -1 as above. */
  readonly slot: Int32Array;
  /** Choices to each replica. */
  readonly tokensPerReplica: Int32Array;
  /** Choices of each expert that a replica serves. */
  readonly tokensPerExpert: Int32Array;
  /** Tokens with at least one choice on each rank, and on each node: what travels if a token goes there once. */
  readonly tokensPerRank: Int32Array;
  readonly tokensPerNode: Int32Array;
  /** Choices whose expert no active rank holds. */
  readonly unserved: number;
}

export interface LayoutInput extends ReplicaOptions {
  readonly map: ExpertMap;
  /** The source rank, and its choices, token-major. */
  readonly rank: number;
  readonly topK: number;
  readonly topkIdx: Int32Array;
}

/** The layout step of one source rank. Time is linear in choices + replicas + ranks. */
export function routingLayout(input: LayoutInput): RoutingLayout {
  checkObject(input, 'input');
  const { map, topkIdx } = input;
  checkMap(map);
  const topK = checkInteger(input.topK, 'topK', 1, maxRows);
  checkInteger(input.rank, 'rank', 0, map.worldSize - 1);
  checkInt32Array(topkIdx, 'topkIdx');
  checkInt32Array(topkIdx, 'topkIdx', Math.ceil(topkIdx.length / topK) * topK);
  checkTopk(topkIdx, topK, map.experts);
  const selection = selectReplicas(map, input);
  const replica = unwrittenColumn(topkIdx.length);
  const slot = unwrittenColumn(topkIdx.length);
  return layOut(selection, input.rank, topK, topkIdx, { replica, slot });
}

/** Options of a selection, checked. */
export interface ReplicaSelection {
  readonly map: ExpertMap;
  readonly policy: ReplicaPolicy;
  readonly ranksPerNode: number;
  readonly activeRanks: Uint8Array;
}

export function selectReplicas(map: ExpertMap, options: ReplicaOptions): ReplicaSelection {
  checkObject(options, 'options');
  const { policy = 'spread', ranksPerNode = map.worldSize } = options;
  checkPolicy(policy, 'policy');
  checkInteger(ranksPerNode, 'ranksPerNode', 1, maxWorldSize);
  return { map, policy, ranksPerNode, activeRanks: rankMask(options.activeRanks, 'activeRanks', map.worldSize, 1) };
}

export function checkPolicy(policy: unknown, name: string): void {
  if (policy === 'spread' || policy === 'nearest') return;
  throw invalidArgument(`${name} must be 'spread' or 'nearest', found ${shown(policy)}`, { name });
}

/** The layout of checked choices, into arrays that may be parts of larger ones. */
export function layOut(
  selection: ReplicaSelection,
  rank: number,
  topK: number,
  topkIdx: Int32Array,
  into: { readonly replica: Int32Array; readonly slot: Int32Array },
): RoutingLayout {
  const { map, ranksPerNode } = selection;
  const { replica, slot } = into;
  const { offsets, candidates } = candidatesOf(selection, rank);
  const next = new Int32Array(map.experts).fill(rank);
  const tokensPerReplica = new Int32Array(map.expert.length);
  const tokensPerExpert = new Int32Array(map.experts);
  const tokensPerRank = new Int32Array(map.worldSize);
  const tokensPerNode = new Int32Array(Math.ceil(map.worldSize / ranksPerNode));
  const lastToRank = new Int32Array(map.worldSize).fill(-1);
  const lastToNode = new Int32Array(tokensPerNode.length).fill(-1);
  let unserved = 0;
  const tokens = topkIdx.length / topK;
  for (let t = 0, i = 0; t < tokens; t++) {
    for (let k = 0; k < topK; k++, i++) {
      const e = topkIdx[i]!;
      const copies = e < 0 ? 0 : offsets[e + 1]! - offsets[e]!;
      if (copies === 0) {
        if (e >= 0) unserved++;
        replica[i] = -1;
        slot[i] = -1;
        continue;
      }
      const p = candidates[offsets[e]! + (copies === 1 ? 0 : next[e]!++ % copies)]!;
      replica[i] = p;
      slot[i] = tokensPerReplica[p]!++;
      tokensPerExpert[e]!++;
      const r = map.rank[p]!;
      if (lastToRank[r] === t) continue;
      lastToRank[r] = t;
      tokensPerRank[r]!++;
      const node = ranksPerNode >= map.worldSize ? 0 : Math.floor(r / ranksPerNode);
      if (lastToNode[node] === t) continue;
      lastToNode[node] = t;
      tokensPerNode[node]!++;
    }
  }
  return Object.freeze({
    rank,
    tokens,
    topK,
    replica,
    slot,
    tokensPerReplica,
    tokensPerExpert,
    tokensPerRank,
    tokensPerNode,
    unserved,
  });
}

/** Replicas that a source rank may take, in CSR form: those of expert e are `replicas[offsets[e] .. offsets[e + 1])`, ascending. */
export interface ReplicaCandidates {
  readonly offsets: Int32Array;
  readonly replicas: Int32Array;
}

/** What `routingLayout` chooses from: its i-th choice of expert e, counted from the source's own number, takes candidate `i mod (how many e has)`. */
export function replicaCandidates(map: ExpertMap, rank: number, options: ReplicaOptions = {}): ReplicaCandidates {
  checkMap(map);
  checkInteger(rank, 'rank', 0, map.worldSize - 1);
  const { offsets, candidates } = candidatesOf(selectReplicas(map, options), rank);
  return Object.freeze({ offsets, replicas: candidates.slice(0, offsets[map.experts]) });
}

/** The replicas of each expert that a source may take, ascending; a source that is not active takes none. */
function candidatesOf(
  { map, policy, ranksPerNode, activeRanks }: ReplicaSelection,
  source: number,
): { readonly offsets: Int32Array; readonly candidates: Int32Array } {
  const { expertOffsets, replicas, rank } = map;
  if (activeRanks[source] === 0) return { offsets: new Int32Array(map.experts + 1), candidates: new Int32Array(0) };
  if (policy === 'spread' && !activeRanks.includes(0)) return { offsets: expertOffsets, candidates: replicas };
  const node = Math.floor(source / ranksPerNode);
  const distance = (r: number) => (r === source ? 0 : Math.floor(r / ranksPerNode) === node ? 1 : 2);
  const offsets = new Int32Array(map.experts + 1);
  const candidates = new Int32Array(replicas.length);
  let count = 0;
  for (let e = 0; e < map.experts; e++) {
    let nearest = 3;
    if (policy === 'nearest') {
      for (let i = expertOffsets[e]!; i < expertOffsets[e + 1]!; i++) {
        const r = rank[replicas[i]!]!;
        if (activeRanks[r] !== 0) nearest = Math.min(nearest, distance(r));
      }
    }
    for (let i = expertOffsets[e]!; i < expertOffsets[e + 1]!; i++) {
      const r = rank[replicas[i]!]!;
      if (activeRanks[r] !== 0 && (policy === 'spread' || distance(r) === nearest)) candidates[count++] = replicas[i]!;
    }
    offsets[e + 1] = count;
  }
  return { offsets, candidates };
}

/** Dense helper: element `t * worldSize + r` is 1 where token t has a choice on rank r. */
export function inRankMask(layout: RoutingLayout, map: ExpertMap): Uint8Array {
  checkMap(map);
  checkLayout(layout, map.expert.length);
  checkRows(layout.tokens * map.worldSize, 'the mask (tokens * ranks)', { tokens: layout.tokens });
  const mask = new Uint8Array(layout.tokens * map.worldSize);
  layout.replica.forEach((p, i) => {
    if (p >= 0) mask[Math.floor(i / layout.topK) * map.worldSize + map.rank[p]!] = 1;
  });
  return mask;
}

/** What follows a layout's choices needs of it: their kinds and lengths, and that each has a replica of so many, or none. */
export function checkLayout(layout: RoutingLayout, replicas: number): void {
  checkObject(layout, 'layout');
  const tokens = checkInteger(layout.tokens, 'layout.tokens', 0, maxRows);
  const topK = checkInteger(layout.topK, 'layout.topK', 1, maxRows);
  checkRange(checkInt32Array(layout.replica, 'layout.replica', tokens * topK), 'layout.replica', -1, replicas - 1);
  checkRange(checkInt32Array(layout.slot, 'layout.slot', tokens * topK), 'layout.slot', -1, maxRows);
}
