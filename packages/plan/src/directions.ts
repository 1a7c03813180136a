import { checkRows } from './check.js';
import { unwrittenColumn } from './column.js';
import { type DispatchPlan, planVersion } from './dispatch-plan.js';
import { pairTables } from './pairs.js';
import type { ShardRows, ShardTable } from './shards.js';

/**
 * Which rows of a home's gradient buffer hold the replicas of each shard, in the order in which they are to be summed (replica
 * ascending). For global shard g the slots are `slotOffsets[g] .. slotOffsets[g+1]`; each is a run of `lengths[g]` rows that starts at
 * `denseRow` in the `rev-kv` buffer and at `compactRow` in the `rev-kv-compact` buffer; their sum goes to row `homeRow[g]` of the home
 * tensor. A shard without slots has a zero gradient: nothing was sent, so nothing came back.
 */
export interface GradientReduction {
  readonly worldSize: number;
  readonly shardOffsets: Int32Array;
  readonly lengths: Int32Array;
  readonly homeRow: Int32Array;
  readonly slotOffsets: Int32Array;
  readonly replica: Int32Array;
  readonly denseRow: Int32Array;
  readonly compactRow: Int32Array;
}

/** The columns of a plan's entries, in the order of the plan. */
export interface Entries {
  readonly dstRank: Int32Array;
  readonly srcOffset: Int32Array;
  readonly dstOffset: Int32Array;
  readonly length: Int32Array;
  readonly srcShard: Int32Array;
  readonly dstShard: Int32Array;
  readonly replica: Int32Array;
}

/** A forward routing whose destination slots and rows are decided: entries by global index, `offsets[g]` the first entry of shard g. */
export interface Routing {
  readonly replicas: number;
  readonly offsets: Int32Array;
  readonly entries: Entries;
  /** Shards and rows that each destination receives. */
  readonly recvShards: Int32Array;
  readonly recvTokens: Int32Array;
}

/** Where the gradients of forward entries come back, by global index (see `GradientReduction`). */
export interface GradientRows {
  readonly denseRow: Int32Array;
  readonly compactRow: Int32Array;
}

/** Unwritten: see `unwrittenColumn`. */
export function emptyEntries(count: number): Entries {
  return {
    dstRank: unwrittenColumn(count),
    srcOffset: unwrittenColumn(count),
    dstOffset: unwrittenColumn(count),
    length: unwrittenColumn(count),
    srcShard: unwrittenColumn(count),
    dstShard: unwrittenColumn(count),
    replica: unwrittenColumn(count),
  };
}

/** First reverse entry of each server; worldSize + 1 elements. */
export function reverseOffsets(recvShards: Int32Array): Int32Array {
  const offsets = new Int32Array(recvShards.length + 1);
  for (let t = 0; t < recvShards.length; t++) offsets[t + 1] = offsets[t]! + recvShards[t]!;
  return offsets;
}

/** The reverse of any routing: every entry goes to its slot on its server. */
export function scatterReverse(shards: ShardTable, rows: ShardRows, routing: Routing): Entries {
  const { offsets } = routing;
  const { dstRank, srcOffset, dstOffset, length, srcShard, dstShard, replica } = routing.entries;
  const first = reverseOffsets(routing.recvShards);
  const back = emptyEntries(dstRank.length);
  for (let r = 0; r < shards.worldSize; r++) {
    const tokens = rows.tokens[r]!;
    const end = offsets[shards.shardOffsets[r + 1]!]!;
    for (let e = offsets[shards.shardOffsets[r]!]!; e < end; e++) {
      const slot = dstShard[e]!;
      const b = first[dstRank[e]!]! + slot;
      const c = replica[e]!;
      back.dstRank[b] = r;
      back.srcOffset[b] = dstOffset[e]!;
      back.dstOffset[b] = c * tokens + srcOffset[e]!;
      back.length[b] = length[e]!;
      back.srcShard[b] = slot;
      back.dstShard[b] = srcShard[e]!;
      back.replica[b] = c;
    }
  }
  return back;
}

/** Rows of each home's replica-major buffer. */
function replicaMajorRows(rows: ShardRows, replicas: number): Int32Array {
  return rows.tokens.map((tokens, r) =>
    checkRows(replicas * tokens, `the replica-major buffer of rank ${r} (${replicas} replicas of ${tokens} tokens)`, {
      rank: r,
    }),
  );
}

/** Completes a routing and its reverse entries to the two plans. */
export function directions(
  shards: ShardTable,
  rows: ShardRows,
  routing: Routing,
  reverseEntries: Entries,
  kind: 'q' | 'kv',
): { readonly forward: DispatchPlan; readonly reverse: DispatchPlan } {
  const { worldSize, shardOffsets } = shards;
  const { replicas, offsets, entries, recvShards, recvTokens } = routing;
  const homeRows = replicaMajorRows(rows, replicas);
  const entryOffsets = shardOffsets.map((g) => offsets[g]!);
  const { sent, received } = pairTables(worldSize, entryOffsets, entries.dstRank, entries.length);
  const common = { version: planVersion, worldSize, replicas } as const;
  const forward: DispatchPlan = Object.freeze({
    ...common,
    kind: `fwd-${kind}` as const,
    entryOffsets,
    ...entries,
    sendTokens: rows.tokens,
    recvTokens,
    sent,
    received,
  });
  const reverse: DispatchPlan = Object.freeze({
    ...common,
    kind: `rev-${kind}` as const,
    entryOffsets: reverseOffsets(recvShards),
    ...reverseEntries,
    sendTokens: recvTokens,
    recvTokens: homeRows,
    sent: received,
    received: sent,
  });
  return { forward, reverse };
}

/** The compact buffer has one run per dispatch that exists, in global-index order. */
export function gradientRows(shards: ShardTable, rows: ShardRows, routing: Routing): GradientRows {
  const { offsets } = routing;
  const { srcOffset, length, replica } = routing.entries;
  const denseRow = unwrittenColumn(replica.length);
  const compactRow = unwrittenColumn(replica.length);
  for (let r = 0; r < shards.worldSize; r++) {
    const tokens = rows.tokens[r]!;
    const end = offsets[shards.shardOffsets[r + 1]!]!;
    let fill = 0;
    for (let e = offsets[shards.shardOffsets[r]!]!; e < end; e++) {
      denseRow[e] = replica[e]! * tokens + srcOffset[e]!;
      compactRow[e] = fill;
      fill += length[e]!;
    }
  }
  return { denseRow, compactRow };
}

/** What to sum where. */
export function gradientReduction(
  shards: ShardTable,
  rows: ShardRows,
  routing: Routing,
  gradient: GradientRows,
): GradientReduction {
  return Object.freeze({
    worldSize: shards.worldSize,
    shardOffsets: shards.shardOffsets.slice(),
    lengths: shards.lengths.slice(),
    homeRow: rows.start,
    slotOffsets: routing.offsets,
    replica: routing.entries.replica,
    denseRow: gradient.denseRow,
    compactRow: gradient.compactRow,
  });
}
