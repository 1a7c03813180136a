import { checkRows } from './check.js';
import { emptyReverse, type ReverseEntries, type Routing, reverseOffsets } from './directions.js';
import type { DispatchPlan } from './dispatch-plan.js';
import { PlanError } from './error.js';
import type { DocumentIndex, DocumentShards, ShardRows } from './shards.js';

/**
 * What each server holds: runs of rows, back to back, each a document from its start to the end of shard `last`. Server t has the runs
 * `offsets[t] .. offsets[t+1]`; query shard g reads run `ofQuery[g]`.
 */
export interface PrefixRuns {
  readonly offsets: Int32Array;
  readonly last: Int32Array;
  readonly row: Int32Array;
  readonly slot: Int32Array;
  readonly ofQuery: Int32Array;
  /** First KV row of each query group, by entry of `revQ`. */
  readonly groupStart: Int32Array;
  readonly recvShards: Int32Array;
  readonly recvTokens: Int32Array;
}

/** A run for each query shard, in query order. */
export function runsOfQueries(shards: DocumentShards, index: DocumentIndex, revQ: DispatchPlan): PrefixRuns {
  const ofQuery = new Int32Array(shards.lengths.length);
  const last = new Int32Array(revQ.dstRank.length);
  for (let q = 0; q < last.length; q++) {
    const query = shards.shardOffsets[revQ.dstRank[q]!]! + revQ.dstShard[q]!;
    last[q] = query;
    ofQuery[query] = q;
  }
  const placed = placeRuns(shards, index, revQ.entryOffsets, last);
  return { ...placed, ofQuery, groupStart: placed.row };
}

/** A run for each document of a server, as long as its last query there needs, in the order of the first queries. */
export function runsOfDocuments(shards: DocumentShards, index: DocumentIndex, revQ: DispatchPlan): PrefixRuns {
  const { worldSize, shardOffsets, document, position } = shards;
  const offsets = new Int32Array(worldSize + 1);
  const last = new Int32Array(revQ.dstRank.length);
  const ofQuery = new Int32Array(shards.lengths.length);
  const seenBy = new Int32Array(shards.documents).fill(-1);
  const runOfDocument = new Int32Array(shards.documents);
  let runs = 0;
  for (let t = 0; t < worldSize; t++) {
    for (let q = revQ.entryOffsets[t]!; q < revQ.entryOffsets[t + 1]!; q++) {
      const query = shardOffsets[revQ.dstRank[q]!]! + revQ.dstShard[q]!;
      const d = document[query]!;
      if (seenBy[d] !== t) {
        seenBy[d] = t;
        runOfDocument[d] = runs;
        last[runs++] = query;
      }
      const run = runOfDocument[d]!;
      ofQuery[query] = run;
      if (position[query]! > position[last[run]!]!) last[run] = query;
    }
    offsets[t + 1] = runs;
  }
  const placed = placeRuns(shards, index, offsets, last.slice(0, runs));
  const groupStart = new Int32Array(revQ.dstRank.length);
  for (let q = 0; q < groupStart.length; q++) {
    groupStart[q] = placed.row[ofQuery[shardOffsets[revQ.dstRank[q]!]! + revQ.dstShard[q]!]!]!;
  }
  return { ...placed, ofQuery, groupStart };
}

function placeRuns(
  shards: DocumentShards,
  index: DocumentIndex,
  offsets: Int32Array,
  last: Int32Array,
): Omit<PrefixRuns, 'ofQuery' | 'groupStart'> {
  const { worldSize, lengths, position } = shards;
  const row = new Int32Array(last.length);
  const slot = new Int32Array(last.length);
  const recvShards = new Int32Array(worldSize);
  const recvTokens = new Int32Array(worldSize);
  for (let t = 0; t < worldSize; t++) {
    let rows = 0;
    let slots = 0;
    for (let run = offsets[t]!; run < offsets[t + 1]!; run++) {
      const g = last[run]!;
      row[run] = rows;
      slot[run] = slots;
      rows += index.context[g]! + lengths[g]!;
      slots += position[g]! + 1;
    }
    recvTokens[t] = checkRows(rows, `the key-value receive tensor of rank ${t}`, { rank: t });
    recvShards[t] = slots;
  }
  return { offsets, last, row, slot, recvShards, recvTokens };
}

/** A dispatch per query that needs the shard: replica c of KV shard p serves the query at position p + c of the document. */
export function routeToQueries(
  shards: DocumentShards,
  index: DocumentIndex,
  serverRank: Int32Array,
  runs: PrefixRuns,
): Routing {
  const n = shards.lengths.length;
  const counts = new Int32Array(n);
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
        const run = runs.ofQuery[query]!;
        dstRank[e + j] = serverRank[query]!;
        dstOffset[e + j] = runs.row[run]! + context;
        dstShard[e + j] = runs.slot[run]! + i - first;
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
  const listedIn = new Int32Array(worldSize).fill(-1);
  const runOnServer = new Int32Array(worldSize);
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
        runOnServer[t] = runs.ofQuery[g]!;
        after[t] = head;
        before[t] = -1;
        if (head >= 0) before[head] = t;
        head = t;
      }
      let e = offsets[g]!;
      for (let server = head, c = 0; server >= 0; server = after[server]!, c++, e++) {
        const run = runOnServer[server]!;
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
      const last = runs.last[run]!;
      const first = index.offsets[document[last]!]!;
      const end = first + position[last]!;
      for (let i = first; i <= end; i++, back++) {
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
