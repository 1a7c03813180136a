import { checkRows } from './check.js';
import { emptyReverse, type ReverseEntries, type Routing, reverseOffsets } from './directions.js';
import { PlanError } from './error.js';
import type { DocumentIndex, DocumentShards, ShardRows } from './shards.js';

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

/** A dispatch per query that needs the shard: replica c of KV shard p serves the query at position p + c of the document. */
export function routeToQueries(
  shards: DocumentShards,
  index: DocumentIndex,
  serverRank: Int32Array,
  runs: PrefixRuns,
): Routing {
  const counts = new Int32Array(serverRank.length);
  for (let d = 0; d < shards.documents; d++) {
    const end = index.offsets[d + 1]!;
    for (let i = index.offsets[d]!; i < end; i++) counts[index.shards[i]!] = end - i;
  }
  const routing = emptyRouting(counts, runs);
  const { offsets, dstRank, dstOffset, dstShard, replica } = routing;
  for (let d = 0; d < shards.documents; d++) {
    const first = index.offsets[d]!;
    const end = index.offsets[d + 1]!;
    for (let i = first; i < end; i++) {
      const g = index.shards[i]!;
      const context = index.context[g]!;
      const e = offsets[g]! - i;
      for (let j = i; j < end; j++) {
        const query = index.shards[j]!;
        dstRank[e + j] = serverRank[query]!;
        dstOffset[e + j] = runs.row[query]! + context;
        dstShard[e + j] = runs.slot[query]! + i - first;
        replica[e + j] = j - i;
      }
    }
  }
  return routing;
}

/**
 * A dispatch per server that needs the shard. Replica ids number its distinct servers by first use in document order: walking a document
 * from its end, the server of the shard in hand moves to the front of a linked list over ranks, and the list is what the shard is sent to.
 */
export function routeToServers(
  shards: DocumentShards,
  index: DocumentIndex,
  serverRank: Int32Array,
  runs: PrefixRuns,
): Routing {
  const { worldSize, documents } = shards;
  const counts = new Int32Array(shards.lengths.length);
  const countedIn = new Int32Array(worldSize).fill(-1);
  for (let d = 0; d < documents; d++) {
    let distinct = 0;
    for (let i = index.offsets[d + 1]! - 1; i >= index.offsets[d]!; i--) {
      const g = index.shards[i]!;
      const t = serverRank[g]!;
      if (countedIn[t] !== d) {
        countedIn[t] = d;
        distinct++;
      }
      counts[g] = distinct;
    }
  }
  const routing = emptyRouting(counts, runs);
  const { offsets, dstRank, dstOffset, dstShard, replica } = routing;
  const after = new Int32Array(worldSize).fill(-1);
  const before = new Int32Array(worldSize).fill(-1);
  const leaderOn = new Int32Array(worldSize);
  const listedIn = new Int32Array(worldSize).fill(-1);
  for (let d = 0; d < documents; d++) {
    const first = index.offsets[d]!;
    let head = -1;
    for (let i = index.offsets[d + 1]! - 1; i >= first; i--) {
      const g = index.shards[i]!;
      const t = serverRank[g]!;
      if (head !== t) {
        if (listedIn[t] === d) {
          after[before[t]!] = after[t]!;
          if (after[t]! >= 0) before[after[t]!] = before[t]!;
        }
        listedIn[t] = d;
        leaderOn[t] = runs.leader[g]!;
        after[t] = head;
        before[t] = -1;
        if (head >= 0) before[head] = t;
        head = t;
      }
      let e = offsets[g]!;
      for (let server = head, c = 0; server >= 0; server = after[server]!, c++, e++) {
        const run = leaderOn[server]!;
        dstRank[e] = server;
        dstOffset[e] = runs.row[run]! + index.context[g]!;
        dstShard[e] = runs.slot[run]! + i - first;
        replica[e] = c;
      }
    }
  }
  return routing;
}

/**
 * The reverse entries of runs, written server by server. HAZARD for speed: servers visit documents in random order, so what a part needs is
 * packed into one record of 8 words, half a cache line, instead of being gathered from six arrays.
 */
export function reverseOfRuns(
  shards: DocumentShards,
  rows: ShardRows,
  index: DocumentIndex,
  runs: PrefixRuns,
  routing: Routing,
  eachQuery: boolean,
): { readonly entries: ReverseEntries; readonly compactOffset: Int32Array } {
  const { worldSize, shardOffsets, lengths, document, position } = shards;
  const count = routing.dstRank.length;
  const records = new Int32Array(8 * lengths.length);
  for (let r = 0; r < worldSize; r++) {
    let compact = 0;
    for (let g = shardOffsets[r]!; g < shardOffsets[r + 1]!; g++) {
      const at = 8 * (index.offsets[document[g]!]! + position[g]!);
      records[at] = r;
      records[at + 1] = g - shardOffsets[r]!;
      records[at + 2] = rows.start[g]!;
      records[at + 3] = lengths[g]!;
      records[at + 4] = rows.tokens[r]!;
      records[at + 5] = compact;
      compact += (routing.offsets[g + 1]! - routing.offsets[g]!) * lengths[g]!;
    }
  }
  const entries = emptyReverse(count);
  const compactOffset = new Int32Array(count);
  const { dstRank, srcOffset, dstOffset, length, srcShard, dstShard, replica } = entries;
  if (!eachQuery) {
    const revOffsets = reverseOffsets(runs.recvShards);
    for (let e = 0; e < count; e++)
      replica[revOffsets[routing.dstRank[e]!]! + routing.dstShard[e]!] = routing.replica[e]!;
  }
  let back = 0;
  for (let t = 0; t < worldSize; t++) {
    let row = 0;
    let slot = 0;
    for (let run = runs.offsets[t]!; run < runs.offsets[t + 1]!; run++) {
      const end = runs.lastPart[run]!;
      for (let i = runs.firstPart[run]!; i <= end; i++, back++) {
        const at = 8 * i;
        const c = eachQuery ? end - i : replica[back]!;
        const tokens = records[at + 3]!;
        dstRank[back] = records[at]!;
        srcOffset[back] = row;
        dstOffset[back] = c * records[at + 4]! + records[at + 2]!;
        length[back] = tokens;
        srcShard[back] = slot++;
        dstShard[back] = records[at + 1]!;
        replica[back] = c;
        compactOffset[back] = records[at + 5]! + c * tokens;
        row += tokens;
      }
    }
  }
  return { entries, compactOffset };
}

/** Entry arrays for `counts[g]` dispatches of each shard. */
function emptyRouting(counts: Int32Array, runs: PrefixRuns): Routing {
  const n = counts.length;
  const offsets = new Int32Array(n + 1);
  let entries = 0;
  let replicas = 1;
  for (let g = 0; g < n; g++) {
    entries += counts[g]!;
    if (counts[g]! > replicas) replicas = counts[g]!;
    if (entries > maxDispatches) {
      throw new PlanError(
        'EP_CAPACITY',
        `the plan has more than ${maxDispatches} key-value dispatches, reached at shard ${g} of ${n}: use fewer shards per document`,
        { limit: maxDispatches, shard: g, shards: n },
      );
    }
    offsets[g + 1] = entries;
  }
  return {
    replicas,
    offsets,
    dstRank: new Int32Array(entries),
    dstOffset: new Int32Array(entries),
    dstShard: new Int32Array(entries),
    replica: new Int32Array(entries),
    recvShards: runs.recvShards,
    recvTokens: runs.recvTokens,
  };
}

/** About 10 GB of plan. One document of n shards has n * (n + 1) / 2 dispatches, so a short input could ask for any amount of memory. */
const maxDispatches = 2 ** 27;
