import { checkInteger, partOf } from './check.js';
import { unwrittenColumn } from './column.js';
import type { DispatchPlan } from './dispatch-plan.js';
import { checkLayout } from './form.js';
import type { PrefixRuns } from './runs.js';
import { type DocumentIndex, type DocumentShards, documentIndex, shardRows } from './shards.js';

/**
 * What each server computes. Its query groups are `groupOffsets[t] .. groupOffsets[t+1]`, one per query shard, in the order of the rows
 * of its Q tensor. Group k is causal attention of Q rows `cuSeqlensQ` against the KV rows `kvStart[k] .. kvStart[k] + kvLength[k]` of the
 * server's KV tensor, which are the document from its start, in document order. The diagonal is aligned to the END: row i of a group of
 * `q` query rows sees the first `kvLength - q + i + 1` of them.
 *
 * With one KV copy per query the groups lie back to back and `cuSeqlensKv` is what varlen attention expects. With one copy per server
 * groups share rows: `cuSeqlensKv` is null, use `kvStart` and `kvLength` (a kernel that takes begin and length per sequence, or a
 * block table).
 */
export interface AttentionLayout {
  readonly worldSize: number;
  /** worldSize + 1 elements. */
  readonly groupOffsets: Int32Array;
  /** Global shard index of each group's queries. */
  readonly shard: Int32Array;
  readonly kvStart: Int32Array;
  readonly kvLength: Int32Array;
  /** Server t: elements `groupOffsets[t] + t` to `groupOffsets[t+1] + t`, both included; starts with 0. */
  readonly cuSeqlensQ: Int32Array;
  readonly cuSeqlensKv: Int32Array | null;
  readonly maxSeqlenQ: Int32Array;
  readonly maxSeqlenKv: Int32Array;
}

/** The layout of one server; views, no copies. */
export interface ServerLayout {
  readonly groups: number;
  readonly shard: Int32Array;
  readonly kvStart: Int32Array;
  readonly kvLength: Int32Array;
  /** groups + 1 elements. */
  readonly cuSeqlensQ: Int32Array;
  readonly cuSeqlensKv: Int32Array | null;
  readonly maxSeqlenQ: number;
  readonly maxSeqlenKv: number;
}

export function serverLayout(layout: AttentionLayout, rank: number): ServerLayout {
  checkLayout(layout);
  checkInteger(rank, 'rank', 0, layout.worldSize - 1);
  const [from, to] = partOf(layout.groupOffsets, 'layout.groupOffsets', rank, layout.shard.length);
  return {
    groups: to - from,
    shard: layout.shard.subarray(from, to),
    kvStart: layout.kvStart.subarray(from, to),
    kvLength: layout.kvLength.subarray(from, to),
    cuSeqlensQ: layout.cuSeqlensQ.subarray(from + rank, to + rank + 1),
    cuSeqlensKv: layout.cuSeqlensKv === null ? null : layout.cuSeqlensKv.subarray(from + rank, to + rank + 1),
    maxSeqlenQ: layout.maxSeqlenQ[rank]!,
    maxSeqlenKv: layout.maxSeqlenKv[rank]!,
  };
}

/** What one rank holds before it dispatches: what packed rotary embeddings take. */
export interface HomeLayout {
  readonly shards: number;
  /** shards + 1 elements, starts with 0: shard s has rows `cuSeqlens[s] .. cuSeqlens[s+1]`. Queries, keys and values have the same ones. */
  readonly cuSeqlens: Int32Array;
  readonly maxSeqlen: number;
  /** Token of its document that each shard begins with: row i of shard s has position `begin[s] + i`. */
  readonly begin: Int32Array;
}

/**
 * Throws EP_INVALID_ARGUMENT where the shards are not those of whole documents, or `rank` is none; EP_CAPACITY as `planAttention` does. One call is linear in all shards: the
 * tokens before a shard may be on other ranks.
 */
export function homeLayout(shards: DocumentShards, rank: number): HomeLayout {
  const { start, tokens } = shardRows(shards);
  const { context } = documentIndex(shards);
  checkInteger(rank, 'rank', 0, shards.worldSize - 1);
  const [from, to] = [shards.shardOffsets[rank]!, shards.shardOffsets[rank + 1]!];
  const cuSeqlens = new Int32Array(to - from + 1);
  cuSeqlens.set(start.subarray(from, to));
  cuSeqlens[to - from] = tokens[rank]!;
  const maxSeqlen = shards.lengths.subarray(from, to).reduce((most, length) => Math.max(most, length), 0);
  return { shards: to - from, cuSeqlens, maxSeqlen, begin: context.slice(from, to) };
}

export function attentionLayout(
  shards: DocumentShards,
  index: DocumentIndex,
  serverRank: Int32Array,
  revQ: DispatchPlan,
  runs: PrefixRuns,
  backToBack: boolean,
): AttentionLayout {
  const { worldSize } = shards;
  const groups = revQ.dstRank.length;
  const groupOffsets = revQ.entryOffsets;
  const shard = unwrittenColumn(groups);
  const kvStart = unwrittenColumn(groups);
  const kvLength = unwrittenColumn(groups);
  const next = groupOffsets.slice(0, worldSize);
  for (let g = 0; g < groups; g++) {
    const k = next[serverRank[g]!]!++;
    shard[k] = g;
    kvStart[k] = runs.row[runs.leader[g]!]!;
    kvLength[k] = index.context[g]! + shards.lengths[g]!;
  }
  const cuSeqlensQ = new Int32Array(groups + worldSize);
  const cuSeqlensKv = backToBack ? new Int32Array(groups + worldSize) : null;
  const maxSeqlenQ = new Int32Array(worldSize);
  const maxSeqlenKv = new Int32Array(worldSize);
  for (let t = 0; t < worldSize; t++) {
    let q = 0;
    let kv = 0;
    for (let k = groupOffsets[t]!; k < groupOffsets[t + 1]!; k++) {
      q += revQ.length[k]!;
      kv += kvLength[k]!;
      cuSeqlensQ[k + t + 1] = q;
      if (cuSeqlensKv !== null) cuSeqlensKv[k + t + 1] = kv;
      if (revQ.length[k]! > maxSeqlenQ[t]!) maxSeqlenQ[t] = revQ.length[k]!;
      if (kvLength[k]! > maxSeqlenKv[t]!) maxSeqlenKv[t] = kvLength[k]!;
    }
  }
  return Object.freeze({
    worldSize,
    groupOffsets,
    shard,
    kvStart,
    kvLength,
    cuSeqlensQ,
    cuSeqlensKv,
    maxSeqlenQ,
    maxSeqlenKv,
  });
}
