import { unwrittenColumn } from './column.js';
import { type Entries, emptyEntries, type GradientRows, reverseOffsets } from './directions.js';
import { PlanError } from './error.js';
import type { RoutedKv } from './query.js';
import type { PrefixRuns } from './runs.js';
import type { DocumentIndex, DocumentShards, ShardRows } from './shards.js';

/**
 * Key-value dispatches of attention, both directions. Every entry column is written once, in one pass per direction: forward entries
 * document by document, reverse entries server by server.
 */
export function routeRuns(
  shards: DocumentShards,
  rows: ShardRows,
  index: DocumentIndex,
  serverRank: Int32Array,
  runs: PrefixRuns,
  eachQuery: boolean,
): RoutedKv {
  const counts = eachQuery ? countQueries(shards, index) : countServers(shards, index, serverRank);
  const { offsets, replicas } = entryOffsets(counts);
  const count = offsets[counts.length]!;
  const records = shardRecords(shards, rows, index, offsets);
  const forward: Forward = {
    entries: emptyEntries(count),
    gradient: { denseRow: unwrittenColumn(count), compactRow: unwrittenColumn(count) },
  };
  const reverse = emptyEntries(count);
  if (eachQuery) routeToQueries(shards, index, serverRank, runs, records, forward);
  else routeToServers(shards, index, serverRank, runs, records, forward, reverse.replica);
  const compactOffset = unwrittenColumn(count);
  reverseOfRuns(shards.worldSize, runs, records, reverse, compactOffset, eachQuery);
  const { recvShards, recvTokens } = runs;
  return {
    routing: { replicas, offsets, entries: forward.entries, recvShards, recvTokens },
    gradient: forward.gradient,
    reverse,
    compactOffset,
  };
}

interface Forward {
  readonly entries: Entries;
  readonly gradient: GradientRows;
}

/**
 * What the passes need to know of a shard, by its place in `DocumentIndex.shards`. HAZARD for speed: documents find their shards, and
 * servers their documents, at random; one record of 8 words, half a cache line, is one miss where eight arrays would be eight.
 *
 *   0 home rank   1 shard on the home   2 first row there   3 length   4 rows of the home tensor
 *   5 first row of its replicas in the home's compact buffer   6 tokens before it in the document   7 first forward entry
 */
function shardRecords(shards: DocumentShards, rows: ShardRows, index: DocumentIndex, offsets: Int32Array): Int32Array {
  const { worldSize, shardOffsets, lengths, document, position } = shards;
  const { start } = rows;
  const records = new Int32Array(8 * lengths.length);
  for (let r = 0; r < worldSize; r++) {
    const tokens = rows.tokens[r]!;
    const firstShard = shardOffsets[r]!;
    let compact = 0;
    for (let g = firstShard; g < shardOffsets[r + 1]!; g++) {
      const at = 8 * (index.offsets[document[g]!]! + position[g]!);
      records[at] = r;
      records[at + 1] = g - firstShard;
      records[at + 2] = start[g]!;
      records[at + 3] = lengths[g]!;
      records[at + 4] = tokens;
      records[at + 5] = compact;
      records[at + 6] = index.context[g]!;
      records[at + 7] = offsets[g]!;
      compact += (offsets[g + 1]! - offsets[g]!) * lengths[g]!;
    }
  }
  return records;
}

/** A dispatch for each query from the shard to the end of its document. */
function countQueries(shards: DocumentShards, index: DocumentIndex): Int32Array {
  const counts = new Int32Array(shards.lengths.length);
  for (let d = 0; d < shards.documents; d++) {
    const end = index.offsets[d + 1]!;
    for (let i = index.offsets[d]!; i < end; i++) counts[index.shards[i]!] = end - i;
  }
  return counts;
}

/** A dispatch for each distinct server from the shard to the end of its document. */
function countServers(shards: DocumentShards, index: DocumentIndex, serverRank: Int32Array): Int32Array {
  const counts = new Int32Array(shards.lengths.length);
  const countedIn = new Int32Array(shards.worldSize).fill(-1);
  for (let d = 0; d < shards.documents; d++) {
    let distinct = 0;
    for (let i = index.offsets[d + 1]! - 1; i >= index.offsets[d]!; i--) {
      const g = index.shards[i]!;
      const t = serverRank[g]!;
      distinct += countedIn[t] === d ? 0 : 1;
      countedIn[t] = d;
      counts[g] = distinct;
    }
  }
  return counts;
}

/** Replica c of the KV shard at position p serves the query at position p + c of the document. */
function routeToQueries(
  shards: DocumentShards,
  index: DocumentIndex,
  serverRank: Int32Array,
  runs: PrefixRuns,
  records: Int32Array,
  forward: Forward,
): void {
  const { dstRank, srcOffset, dstOffset, length, srcShard, dstShard, replica } = forward.entries;
  const { denseRow, compactRow } = forward.gradient;
  const parts = index.shards;
  for (let d = 0; d < shards.documents; d++) {
    const first = index.offsets[d]!;
    const end = index.offsets[d + 1]!;
    for (let i = first; i < end; i++) {
      const at = 8 * i;
      const shard = records[at + 1]!;
      const start = records[at + 2]!;
      const tokens = records[at + 3]!;
      const homeTokens = records[at + 4]!;
      const compact = records[at + 5]!;
      const context = records[at + 6]!;
      for (let j = i, e = records[at + 7]!; j < end; j++, e++) {
        const query = parts[j]!;
        const c = j - i;
        dstRank[e] = serverRank[query]!;
        srcOffset[e] = start;
        dstOffset[e] = runs.row[query]! + context;
        length[e] = tokens;
        srcShard[e] = shard;
        dstShard[e] = runs.slot[query]! + i - first;
        replica[e] = c;
        denseRow[e] = c * homeTokens + start;
        compactRow[e] = compact + c * tokens;
      }
    }
  }
}

/**
 * Replica ids number the distinct servers of a shard by first use in document order: walking a document from its end, the server of the
 * shard in hand moves to the top of a stack of the servers seen so far, and the stack, from its top, is what the shard is sent to. Moving
 * one up costs at most as many steps as the dispatches that follow. Also writes the reverse entries' replica ids, which depend on the
 * rest of the document and so cannot be found server by server.
 */
function routeToServers(
  shards: DocumentShards,
  index: DocumentIndex,
  serverRank: Int32Array,
  runs: PrefixRuns,
  records: Int32Array,
  forward: Forward,
  reverseReplica: Int32Array,
): void {
  const { worldSize, documents } = shards;
  const { dstRank, srcOffset, dstOffset, length, srcShard, dstShard, replica } = forward.entries;
  const { denseRow, compactRow } = forward.gradient;
  const firstReverse = reverseOffsets(runs.recvShards);
  const stack = new Int32Array(worldSize);
  const stackRow = new Int32Array(worldSize);
  const stackSlot = new Int32Array(worldSize);
  const stackedIn = new Int32Array(worldSize).fill(-1);
  for (let d = 0; d < documents; d++) {
    const first = index.offsets[d]!;
    let servers = 0;
    for (let i = index.offsets[d + 1]! - 1; i >= first; i--) {
      const g = index.shards[i]!;
      const t = serverRank[g]!;
      if (stackedIn[t] === d) {
        let k = servers - 1;
        while (stack[k] !== t) k--;
        servers--;
        for (; k < servers; k++) {
          stack[k] = stack[k + 1]!;
          stackRow[k] = stackRow[k + 1]!;
          stackSlot[k] = stackSlot[k + 1]!;
        }
      }
      const run = runs.leader[g]!;
      stackedIn[t] = d;
      stack[servers] = t;
      stackRow[servers] = runs.row[run]!;
      stackSlot[servers] = runs.slot[run]!;
      servers++;
      const at = 8 * i;
      const shard = records[at + 1]!;
      const start = records[at + 2]!;
      const tokens = records[at + 3]!;
      const homeTokens = records[at + 4]!;
      const compact = records[at + 5]!;
      const context = records[at + 6]!;
      const e0 = records[at + 7]!;
      for (let c = 0; c < servers; c++) {
        const e = e0 + c;
        const k = servers - 1 - c;
        const server = stack[k]!;
        const slot = stackSlot[k]! + i - first;
        dstRank[e] = server;
        srcOffset[e] = start;
        dstOffset[e] = stackRow[k]! + context;
        length[e] = tokens;
        srcShard[e] = shard;
        dstShard[e] = slot;
        replica[e] = c;
        denseRow[e] = c * homeTokens + start;
        compactRow[e] = compact + c * tokens;
        reverseReplica[firstReverse[server]! + slot] = c;
      }
    }
  }
}

/** Writes the reverse entries of runs. `replica` is read where a document goes to each server once, written where it goes to each query. */
function reverseOfRuns(
  worldSize: number,
  runs: PrefixRuns,
  records: Int32Array,
  reverse: Entries,
  compactOffset: Int32Array,
  eachQuery: boolean,
): void {
  const { dstRank, srcOffset, dstOffset, length, srcShard, dstShard, replica } = reverse;
  const { offsets, firstPart, lastPart } = runs;
  let back = 0;
  for (let t = 0; t < worldSize; t++) {
    touchRecords(records, firstPart, offsets[t]!, offsets[t + 1]!);
    let row = 0;
    let slot = 0;
    for (let run = offsets[t]!; run < offsets[t + 1]!; run++) {
      const end = lastPart[run]!;
      for (let i = firstPart[run]!; i <= end; i++, back++) {
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
}

/**
 * Reads the first record of every run of a server. HAZARD for speed: the runs start at random, each a cache miss; in this short loop the
 * processor has a dozen misses under way at once, in the long one above one or two. Returns the largest rank read, so that no compiler
 * drops the loop.
 */
function touchRecords(records: Int32Array, firstPart: Int32Array, from: number, to: number): number {
  let largest = 0;
  for (let run = from; run < to; run++) largest = Math.max(largest, records[8 * firstPart[run]!]!);
  return largest;
}

/** First entry of each shard, and one more than the largest replica id. */
function entryOffsets(counts: Int32Array): { readonly offsets: Int32Array; readonly replicas: number } {
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
  return { offsets, replicas };
}

/** About 10 GB of plan. One document of n shards has n * (n + 1) / 2 dispatches, so a short input could ask for any amount of memory. */
const maxDispatches = 2 ** 27;
