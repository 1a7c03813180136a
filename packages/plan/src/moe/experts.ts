import { checkInt32Array, checkInteger, checkObject, checkOffsets, checkRange, maxRows, partOf } from '../check.js';
import { invalidArgument } from '../error.js';

/** Version of the format of expert maps and plans: raised when the meaning of any field changes. */
export const moeVersion = 1;

/** Most ranks, and most experts, of one map. HAZARD: tables have an element for each of them, whatever the data behind a number in a file. */
export const maxWorldSize = 65_536;
export const maxExperts = 65_536;

/**
 * Which rank holds which experts. An **expert** is what the router chooses, its **replicas** are the copies of it that ranks hold, one or
 * more. Replicas are numbered rank-major: rank r holds the replicas `rankOffsets[r] .. rankOffsets[r+1]`, and the i-th of those is its local
 * expert i. Ranks may hold different numbers of them, or none. Where every expert has one replica and experts ascend over ranks, the
 * replica's number is the expert's.
 */
export interface ExpertMap {
  readonly version: typeof moeVersion;
  readonly worldSize: number;
  readonly experts: number;
  /** worldSize + 1 elements. */
  readonly rankOffsets: Int32Array;
  /** Expert of each replica. */
  readonly expert: Int32Array;
  /** Rank of each replica. */
  readonly rank: Int32Array;
  /** experts + 1 elements: the replicas of expert e are `replicas[expertOffsets[e] .. expertOffsets[e+1])`, ascending. */
  readonly expertOffsets: Int32Array;
  readonly replicas: Int32Array;
  /** Local experts of the rank that has most: what every rank's part of a symmetric buffer is sized for. */
  readonly maxLocalExperts: number;
}

/** What an expert map is made of; see the fields of the same names. */
export interface ExpertTable {
  readonly worldSize: number;
  readonly experts: number;
  readonly rankOffsets: Int32Array;
  readonly expert: Int32Array;
}

/** A map from explicit lists. Every expert needs at least one replica; the arrays are copied. */
export function mapExperts(table: ExpertTable): ExpertMap {
  checkObject(table, 'table');
  const worldSize = checkInteger(table.worldSize, 'worldSize', 1, maxWorldSize);
  const experts = checkInteger(table.experts, 'experts', 1, maxExperts);
  const expert = checkInt32Array(table.expert, 'expert').slice();
  const rankOffsets = checkInt32Array(table.rankOffsets, 'rankOffsets', worldSize + 1).slice();
  checkOffsets(rankOffsets, 'rankOffsets', expert.length);
  checkRange(expert, 'expert', 0, experts - 1);
  const rank = new Int32Array(expert.length);
  let maxLocalExperts = 0;
  for (let r = 0; r < worldSize; r++) {
    rank.fill(r, rankOffsets[r]!, rankOffsets[r + 1]!);
    maxLocalExperts = Math.max(maxLocalExperts, rankOffsets[r + 1]! - rankOffsets[r]!);
  }
  const expertOffsets = new Int32Array(experts + 1);
  for (let p = 0; p < expert.length; p++) expertOffsets[expert[p]! + 1]!++;
  for (let e = 0; e < experts; e++) {
    if (expertOffsets[e + 1] === 0) {
      throw invalidArgument(
        `expert ${e} has no replica on any rank: ${expert.length} replicas of ${experts} experts; give each expert one`,
        { name: 'expert', expert: e, replicas: expert.length, experts },
      );
    }
    expertOffsets[e + 1]! += expertOffsets[e]!;
  }
  const next = expertOffsets.slice(0, experts);
  const replicas = new Int32Array(expert.length);
  for (let p = 0; p < expert.length; p++) replicas[next[expert[p]!]!++] = p;
  return Object.freeze({
    version: moeVersion,
    worldSize,
    experts,
    rankOffsets,
    expert,
    rank,
    expertOffsets,
    replicas,
    maxLocalExperts,
  });
}

/** Experts in order over the ranks, one replica each. Where they do not divide evenly the first `experts % worldSize` ranks hold one more. */
export function spreadExperts(experts: number, worldSize: number): ExpertMap {
  checkInteger(experts, 'experts', 1, maxExperts);
  checkInteger(worldSize, 'worldSize', 1, maxWorldSize);
  const least = Math.floor(experts / worldSize);
  const more = experts % worldSize;
  return mapExperts({
    worldSize,
    experts,
    rankOffsets: Int32Array.from({ length: worldSize + 1 }, (_, r) => r * least + Math.min(r, more)),
    expert: Int32Array.from({ length: experts }, (_, e) => e),
  });
}

/** Local experts of a rank. */
export function localExperts(map: ExpertMap, rank: number): number {
  checkMapForm(map);
  checkInteger(rank, 'rank', 0, map.worldSize - 1);
  const [from, to] = partOf(map.rankOffsets, 'map.rankOffsets', rank, map.expert.length);
  return to - from;
}

/** EP_INVALID_ARGUMENT unless its fields are of the kinds and lengths of an expert map's, in constant time; what they hold is not looked at. */
export function checkMapForm(map: ExpertMap, name = 'map'): void {
  checkObject(map, name);
  const worldSize = checkInteger(map.worldSize, `${name}.worldSize`, 1, maxWorldSize);
  const experts = checkInteger(map.experts, `${name}.experts`, 1, maxExperts);
  const { length } = checkInt32Array(map.expert, `${name}.expert`);
  checkInt32Array(map.rank, `${name}.rank`, length);
  checkInt32Array(map.replicas, `${name}.replicas`, length);
  checkInt32Array(map.rankOffsets, `${name}.rankOffsets`, worldSize + 1);
  checkInt32Array(map.expertOffsets, `${name}.expertOffsets`, experts + 1);
  checkInteger(map.maxLocalExperts, `${name}.maxLocalExperts`, 0, maxRows);
}

/**
 * The form, and that every index in the map leads somewhere: for those who follow them. Linear in ranks + experts + replicas. That the lists
 * agree with each other is what `validateExpertMap` finds out.
 */
export function checkMap(map: ExpertMap, name = 'map'): void {
  checkMapForm(map, name);
  const replicas = map.expert.length;
  checkOffsets(map.rankOffsets, `${name}.rankOffsets`, replicas);
  checkOffsets(map.expertOffsets, `${name}.expertOffsets`, replicas);
  checkRange(map.expert, `${name}.expert`, 0, map.experts - 1);
  checkRange(map.rank, `${name}.rank`, 0, map.worldSize - 1);
  checkRange(map.replicas, `${name}.replicas`, 0, replicas - 1);
}
