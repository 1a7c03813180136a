import { checkRows } from './check.js';
import type { DocumentIndex, DocumentShards } from './shards.js';

/**
 * What each server holds: runs of rows, back to back, each a document from its start to some part of it. A run is named by its first query
 * shard in global-index order, its leader. Servers fill up in global-index order of the leaders, so every pass here streams over shards or
 * documents with one counter per server; nothing is looked up at random.
 */
export interface PrefixRuns {
  /** Leader of the run that each query shard reads. */
  readonly leader: Int32Array;
  /** By leader: first row and first slot of the run on its server. */
  readonly row: Int32Array;
  readonly slot: Int32Array;
  /** By server, then in row order: the runs' first and last part, as indices into `DocumentIndex.shards`. */
  readonly offsets: Int32Array;
  readonly firstPart: Int32Array;
  readonly lastPart: Int32Array;
  readonly recvShards: Int32Array;
  readonly recvTokens: Int32Array;
}

/** A run for each query shard: `each-query`. */
export function runsOfQueries(shards: DocumentShards, index: DocumentIndex, serverRank: Int32Array): PrefixRuns {
  const leader = new Int32Array(serverRank.length);
  for (let g = 0; g < leader.length; g++) leader[g] = g;
  return placeRuns(shards, index, serverRank, leader, shards.position);
}

/** A run for each document of a server, as long as its last query there needs: `each-server`. */
export function runsOfDocuments(shards: DocumentShards, index: DocumentIndex, serverRank: Int32Array): PrefixRuns {
  const leader = new Int32Array(serverRank.length);
  const lastPosition = new Int32Array(serverRank.length);
  const seenIn = new Int32Array(shards.worldSize).fill(-1);
  const leaderOn = new Int32Array(shards.worldSize);
  for (let d = 0; d < shards.documents; d++) {
    const first = index.offsets[d]!;
    const end = index.offsets[d + 1]!;
    for (let i = first; i < end; i++) {
      const g = index.shards[i]!;
      const t = serverRank[g]!;
      if (seenIn[t] !== d || g < leaderOn[t]!) leaderOn[t] = g;
      seenIn[t] = d;
    }
    for (let i = first; i < end; i++) {
      const g = index.shards[i]!;
      leader[g] = leaderOn[serverRank[g]!]!;
      lastPosition[leader[g]!] = i - first;
    }
  }
  return placeRuns(shards, index, serverRank, leader, lastPosition);
}

/** `lastPosition` is read for leaders only. */
function placeRuns(
  shards: DocumentShards,
  index: DocumentIndex,
  serverRank: Int32Array,
  leader: Int32Array,
  lastPosition: Int32Array,
): PrefixRuns {
  const { worldSize, document } = shards;
  const n = serverRank.length;
  const offsets = new Int32Array(worldSize + 1);
  for (let g = 0; g < n; g++) if (leader[g] === g) offsets[serverRank[g]! + 1]!++;
  for (let t = 0; t < worldSize; t++) offsets[t + 1]! += offsets[t]!;
  const next = offsets.slice(0, worldSize);
  const firstPart = new Int32Array(offsets[worldSize]!);
  const lastPart = new Int32Array(offsets[worldSize]!);
  const row = new Int32Array(n);
  const slot = new Int32Array(n);
  const recvShards = new Int32Array(worldSize);
  // Float64 while filling: a sum beyond int32 stays exact and is refused below instead of wrapping.
  const rows = new Float64Array(worldSize);
  for (let g = 0; g < n; g++) {
    if (leader[g] !== g) continue;
    const t = serverRank[g]!;
    const first = index.offsets[document[g]!]!;
    const last = first + lastPosition[g]!;
    const end = index.shards[last]!;
    row[g] = rows[t]!;
    slot[g] = recvShards[t]!;
    rows[t]! += index.context[end]! + shards.lengths[end]!;
    recvShards[t]! += last - first + 1;
    const run = next[t]!++;
    firstPart[run] = first;
    lastPart[run] = last;
  }
  const recvTokens = new Int32Array(worldSize);
  for (let t = 0; t < worldSize; t++)
    recvTokens[t] = checkRows(rows[t]!, `the key-value receive tensor of rank ${t}`, { rank: t });
  return { leader, row, slot, offsets, firstPart, lastPart, recvShards, recvTokens };
}
