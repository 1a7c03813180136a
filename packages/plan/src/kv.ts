import { checkRows } from './check.js';
import type { Routing } from './directions.js';
import type { DispatchPlan } from './dispatch-plan.js';
import { PlanError } from './error.js';
import type { DocumentIndex, DocumentShards } from './shards.js';

/** A KV routing and, per query group (entry of `revQ`), the first row of its keys and values on the server. */
export interface KvRouting {
  readonly routing: Routing;
  readonly groupStart: Int32Array;
}

/**
 * One copy of the document prefix per query shard: on each server the groups lie in query order, each in document order. Replica c of
 * KV shard p serves the query at position p + c of the document.
 */
export function replicatedRouting(shards: DocumentShards, index: DocumentIndex, revQ: DispatchPlan): KvRouting {
  const { worldSize, shardOffsets, lengths, document, position } = shards;
  const n = lengths.length;
  const counts = (g: number) => index.offsets[document[g]! + 1]! - index.offsets[document[g]!]! - position[g]!;
  const { offsets, replicas } = entryOffsetsOf(n, counts);
  const entries = offsets[n]!;
  const dstRank = new Int32Array(entries);
  const dstOffset = new Int32Array(entries);
  const dstShard = new Int32Array(entries);
  const replica = new Int32Array(entries);
  const recvShards = new Int32Array(worldSize);
  const recvTokens = new Int32Array(worldSize);
  const groupStart = new Int32Array(revQ.dstRank.length);
  for (let t = 0; t < worldSize; t++) {
    let row = 0;
    let slot = 0;
    for (let q = revQ.entryOffsets[t]!; q < revQ.entryOffsets[t + 1]!; q++) {
      const query = shardOffsets[revQ.dstRank[q]!]! + revQ.dstShard[q]!;
      const first = index.offsets[document[query]!]!;
      const last = position[query]!;
      groupStart[q] = row;
      for (let p = 0; p <= last; p++) {
        const g = index.shards[first + p]!;
        const e = offsets[g]! + last - p;
        dstRank[e] = t;
        dstOffset[e] = row;
        dstShard[e] = slot++;
        replica[e] = last - p;
        row += lengths[g]!;
      }
    }
    recvTokens[t] = checkRows(row, `the key-value receive tensor of rank ${t}`, { rank: t });
    recvShards[t] = slot;
  }
  return { routing: { replicas, offsets, dstRank, dstOffset, dstShard, replica, recvShards, recvTokens }, groupStart };
}

/**
 * One copy of a document prefix per server, as long as the server's last query of the document needs. The server's documents lie in the
 * order of their first query; within a document in document order, so that every query group is one run of rows and groups of a
 * document begin at the same row. Replica ids of a KV shard number its distinct servers by first use in document order.
 */
export function deduplicatedRouting(
  shards: DocumentShards,
  index: DocumentIndex,
  serverRank: Int32Array,
  revQ: DispatchPlan,
): KvRouting {
  const { worldSize, shardOffsets, lengths, document, position } = shards;
  const n = lengths.length;

  // A run is (server, document): where its prefix starts on the server and how far it reaches.
  const runOfQuery = new Int32Array(n);
  const runRow = new Int32Array(n);
  const runSlot = new Int32Array(n);
  const runLast = new Int32Array(n);
  const recvShards = new Int32Array(worldSize);
  const recvTokens = new Int32Array(worldSize);
  const groupStart = new Int32Array(revQ.dstRank.length);
  const seenBy = new Int32Array(shards.documents).fill(-1);
  const runOfDocument = new Int32Array(shards.documents);
  let runs = 0;
  for (let t = 0; t < worldSize; t++) {
    const firstRun = runs;
    const from = revQ.entryOffsets[t]!;
    const to = revQ.entryOffsets[t + 1]!;
    for (let q = from; q < to; q++) {
      const query = shardOffsets[revQ.dstRank[q]!]! + revQ.dstShard[q]!;
      const d = document[query]!;
      if (seenBy[d] !== t) {
        seenBy[d] = t;
        runOfDocument[d] = runs;
        runLast[runs++] = query;
      }
      const run = runOfDocument[d]!;
      runOfQuery[query] = run;
      if (position[query]! > position[runLast[run]!]!) runLast[run] = query;
    }
    let row = 0;
    let slot = 0;
    for (let run = firstRun; run < runs; run++) {
      const last = runLast[run]!;
      runRow[run] = row;
      runSlot[run] = slot;
      row += index.context[last]! + lengths[last]!;
      slot += position[last]! + 1;
    }
    recvTokens[t] = checkRows(row, `the key-value receive tensor of rank ${t}`, { rank: t });
    recvShards[t] = slot;
    for (let q = from; q < to; q++)
      groupStart[q] = runRow[runOfQuery[shardOffsets[revQ.dstRank[q]!]! + revQ.dstShard[q]!]!]!;
  }

  // Distinct servers of the queries at positions >= p, counted from the end of each document.
  const distinct = new Int32Array(n);
  const countedIn = new Int32Array(worldSize).fill(-1);
  for (let d = 0; d < shards.documents; d++) {
    let count = 0;
    for (let i = index.offsets[d + 1]! - 1; i >= index.offsets[d]!; i--) {
      const g = index.shards[i]!;
      const t = serverRank[g]!;
      if (countedIn[t] !== d) {
        countedIn[t] = d;
        count++;
      }
      distinct[g] = count;
    }
  }
  const { offsets, replicas } = entryOffsetsOf(n, (g) => distinct[g]!);
  const entries = offsets[n]!;
  const dstRank = new Int32Array(entries);
  const dstOffset = new Int32Array(entries);
  const dstShard = new Int32Array(entries);
  const replica = new Int32Array(entries);

  // The servers still to serve, ordered by next use: a linked list over ranks, walked from the document's end, where the server of the
  // shard in hand moves to the front. Emitting it per shard costs one step per dispatch.
  const after = new Int32Array(worldSize).fill(-1);
  const before = new Int32Array(worldSize).fill(-1);
  const listedIn = new Int32Array(worldSize).fill(-1);
  const runOnServer = new Int32Array(worldSize);
  for (let d = 0; d < shards.documents; d++) {
    let head = -1;
    for (let i = index.offsets[d + 1]! - 1; i >= index.offsets[d]!; i--) {
      const g = index.shards[i]!;
      const t = serverRank[g]!;
      if (head !== t) {
        if (listedIn[t] === d) {
          after[before[t]!] = after[t]!;
          if (after[t]! >= 0) before[after[t]!] = before[t]!;
        }
        listedIn[t] = d;
        runOnServer[t] = runOfQuery[g]!;
        after[t] = head;
        before[t] = -1;
        if (head >= 0) before[head] = t;
        head = t;
      }
      const p = position[g]!;
      let c = 0;
      for (let server = head; server >= 0; server = after[server]!) {
        const e = offsets[g]! + c;
        const run = runOnServer[server]!;
        dstRank[e] = server;
        dstOffset[e] = runRow[run]! + index.context[g]!;
        dstShard[e] = runSlot[run]! + p;
        replica[e] = c++;
      }
    }
  }
  return { routing: { replicas, offsets, dstRank, dstOffset, dstShard, replica, recvShards, recvTokens }, groupStart };
}

/** About 10 GB of plan. One document of n shards has n * (n + 1) / 2 dispatches, so a short input could ask for any amount of memory. */
const maxDispatches = 2 ** 27;

function entryOffsetsOf(
  n: number,
  count: (g: number) => number,
): { readonly offsets: Int32Array; readonly replicas: number } {
  const offsets = new Int32Array(n + 1);
  let entries = 0;
  let replicas = 1;
  for (let g = 0; g < n; g++) {
    const c = count(g);
    entries += c;
    if (c > replicas) replicas = c;
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
