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

export interface Directions {
  readonly forward: DispatchPlan;
  readonly reverse: DispatchPlan;
  readonly lengths: Int32Array;
  readonly homeRow: Int32Array;
}

/** Completes a routing to its forward plan and the reverse that brings each row back to its home. */
export function directions(shards: ShardTable, rows: ShardRows, routing: Routing, kind: 'q' | 'kv'): Directions {
  const { worldSize } = shards;
  const shardOffsets = shards.shardOffsets;
  const { replicas, offsets, dstRank, dstOffset, dstShard, replica, recvShards, recvTokens } = routing;
  const entries = dstRank.length;
  const entryOffsets = new Int32Array(worldSize + 1);
  for (let r = 0; r <= worldSize; r++) entryOffsets[r] = offsets[shardOffsets[r]!]!;
  const revOffsets = new Int32Array(worldSize + 1);
  for (let t = 0; t < worldSize; t++) revOffsets[t + 1] = revOffsets[t]! + recvShards[t]!;

  const srcOffset = new Int32Array(entries);
  const length = new Int32Array(entries);
  const srcShard = new Int32Array(entries);
  const rev = {
    dstRank: new Int32Array(entries),
    srcOffset: new Int32Array(entries),
    dstOffset: new Int32Array(entries),
    length: new Int32Array(entries),
    srcShard: new Int32Array(entries),
    dstShard: new Int32Array(entries),
    replica: new Int32Array(entries),
  };
  const revRows = new Int32Array(worldSize);
  for (let r = 0; r < worldSize; r++) {
    const tokens = rows.tokens[r]!;
    revRows[r] = checkRows(
      replicas * tokens,
      `the replica-major buffer of rank ${r} (${replicas} replicas of ${tokens} tokens)`,
      { rank: r },
    );
    for (let g = shardOffsets[r]!; g < shardOffsets[r + 1]!; g++) {
      const start = rows.start[g]!;
      const tokensOfShard = shards.lengths[g]!;
      const shard = g - shardOffsets[r]!;
      for (let e = offsets[g]!; e < offsets[g + 1]!; e++) {
        srcOffset[e] = start;
        length[e] = tokensOfShard;
        srcShard[e] = shard;
        const slot = dstShard[e]!;
        const back = revOffsets[dstRank[e]!]! + slot;
        rev.dstRank[back] = r;
        rev.srcOffset[back] = dstOffset[e]!;
        rev.dstOffset[back] = replica[e]! * tokens + start;
        rev.length[back] = tokensOfShard;
        rev.srcShard[back] = slot;
        rev.dstShard[back] = shard;
        rev.replica[back] = replica[e]!;
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
    entryOffsets: revOffsets,
    ...rev,
    sendTokens: recvTokens,
    recvTokens: revRows,
    sent: received,
    received: sent,
  });
  return { forward, reverse, lengths: shards.lengths.slice(), homeRow: rows.start };
}

/** The compact form of a gradient plan (rows in global-index order, one run per dispatch that exists) and the list of what to sum. */
export function gradientForms(
  shards: ShardTable,
  made: Directions,
  routing: Routing,
): { readonly compact: DispatchPlan; readonly reduction: GradientReduction } {
  const { worldSize } = shards;
  const { forward, reverse } = made;
  const entries = forward.dstRank.length;
  const denseRow = new Int32Array(entries);
  const compactRow = new Int32Array(entries);
  const compactOffset = new Int32Array(entries);
  const recvTokens = new Int32Array(worldSize);
  for (let r = 0; r < worldSize; r++) {
    let fill = 0;
    for (let e = forward.entryOffsets[r]!; e < forward.entryOffsets[r + 1]!; e++) {
      const back = reverse.entryOffsets[forward.dstRank[e]!]! + forward.dstShard[e]!;
      denseRow[e] = reverse.dstOffset[back]!;
      compactRow[e] = fill;
      compactOffset[back] = fill;
      fill += forward.length[e]!;
    }
    recvTokens[r] = fill;
  }
  return {
    compact: Object.freeze({ ...reverse, kind: 'rev-kv-compact' as const, dstOffset: compactOffset, recvTokens }),
    reduction: Object.freeze({
      worldSize,
      shardOffsets: shards.shardOffsets.slice(),
      lengths: made.lengths,
      homeRow: made.homeRow,
      slotOffsets: routing.offsets,
      replica: forward.replica,
      denseRow,
      compactRow,
    }),
  };
}
