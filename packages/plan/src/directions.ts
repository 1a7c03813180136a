import { checkRows } from './check.js';
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

/** Entries of a reverse plan, by server and slot. */
export interface ReverseEntries {
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
  readonly dstRank: Int32Array;
  readonly dstOffset: Int32Array;
  readonly dstShard: Int32Array;
  readonly replica: Int32Array;
  /** Shards and rows that each destination receives. */
  readonly recvShards: Int32Array;
  readonly recvTokens: Int32Array;
}

export function emptyReverse(entries: number): ReverseEntries {
  return {
    dstRank: new Int32Array(entries),
    srcOffset: new Int32Array(entries),
    dstOffset: new Int32Array(entries),
    length: new Int32Array(entries),
    srcShard: new Int32Array(entries),
    dstShard: new Int32Array(entries),
    replica: new Int32Array(entries),
  };
}

/** First reverse entry of each server; worldSize + 1 elements. */
export function reverseOffsets(recvShards: Int32Array): Int32Array {
  const offsets = new Int32Array(recvShards.length + 1);
  for (let t = 0; t < recvShards.length; t++) offsets[t + 1] = offsets[t]! + recvShards[t]!;
  return offsets;
}

/** The reverse of any routing: every entry goes to its slot on its server. */
export function scatterReverse(shards: ShardTable, rows: ShardRows, routing: Routing): ReverseEntries {
  const { shardOffsets, lengths } = shards;
  const { offsets, dstRank, dstOffset, dstShard, replica } = routing;
  const revOffsets = reverseOffsets(routing.recvShards);
  const rev = emptyReverse(dstRank.length);
  for (let r = 0; r < shards.worldSize; r++) {
    const tokens = rows.tokens[r]!;
    for (let g = shardOffsets[r]!; g < shardOffsets[r + 1]!; g++) {
      const start = rows.start[g]!;
      const length = lengths[g]!;
      const shard = g - shardOffsets[r]!;
      for (let e = offsets[g]!; e < offsets[g + 1]!; e++) {
        const slot = dstShard[e]!;
        const back = revOffsets[dstRank[e]!]! + slot;
        const c = replica[e]!;
        rev.dstRank[back] = r;
        rev.srcOffset[back] = dstOffset[e]!;
        rev.dstOffset[back] = c * tokens + start;
        rev.length[back] = length;
        rev.srcShard[back] = slot;
        rev.dstShard[back] = shard;
        rev.replica[back] = c;
      }
    }
  }
  return rev;
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
  reverseEntries: ReverseEntries,
  kind: 'q' | 'kv',
): { readonly forward: DispatchPlan; readonly reverse: DispatchPlan } {
  const { worldSize, shardOffsets, lengths } = shards;
  const { replicas, offsets, dstRank, dstOffset, dstShard, replica, recvShards, recvTokens } = routing;
  const homeRows = replicaMajorRows(rows, replicas);
  const entryOffsets = new Int32Array(worldSize + 1);
  for (let r = 0; r <= worldSize; r++) entryOffsets[r] = offsets[shardOffsets[r]!]!;
  const srcOffset = new Int32Array(dstRank.length);
  const length = new Int32Array(dstRank.length);
  const srcShard = new Int32Array(dstRank.length);
  for (let r = 0; r < worldSize; r++) {
    for (let g = shardOffsets[r]!; g < shardOffsets[r + 1]!; g++) {
      const start = rows.start[g]!;
      const tokens = lengths[g]!;
      for (let e = offsets[g]!; e < offsets[g + 1]!; e++) {
        srcOffset[e] = start;
        length[e] = tokens;
        srcShard[e] = g - shardOffsets[r]!;
      }
    }
  }
  const { sent, received } = pairTables(worldSize, entryOffsets, dstRank, length);
  const common = { version: planVersion, worldSize, replicas } as const;
  const forward: DispatchPlan = Object.freeze({
    ...common,
    kind: `fwd-${kind}` as const,
    entryOffsets,
    dstRank,
    srcOffset,
    dstOffset,
    length,
    srcShard,
    dstShard,
    replica,
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

/** What to sum where. The compact buffer has one run per dispatch that exists, in global-index order. */
export function gradientReduction(shards: ShardTable, rows: ShardRows, routing: Routing): GradientReduction {
  const { worldSize, shardOffsets, lengths } = shards;
  const { offsets, replica } = routing;
  const denseRow = new Int32Array(replica.length);
  const compactRow = new Int32Array(replica.length);
  for (let r = 0; r < worldSize; r++) {
    const tokens = rows.tokens[r]!;
    let fill = 0;
    for (let g = shardOffsets[r]!; g < shardOffsets[r + 1]!; g++) {
      for (let e = offsets[g]!; e < offsets[g + 1]!; e++) {
        denseRow[e] = replica[e]! * tokens + rows.start[g]!;
        compactRow[e] = fill;
        fill += lengths[g]!;
      }
    }
  }
  return Object.freeze({
    worldSize,
    shardOffsets: shardOffsets.slice(),
    lengths: lengths.slice(),
    homeRow: rows.start,
    slotOffsets: offsets,
    replica,
    denseRow,
    compactRow,
  });
}
