import { checkInt32Array, checkInteger, checkObject, checkOffsets, checkRange, checkRows, maxRows } from './check.js';
import {
  directions,
  type GradientReduction,
  gradientReduction,
  type ReverseEntries,
  type Routing,
  reverseOffsets,
  scatterReverse,
} from './directions.js';
import type { DispatchPlan } from './dispatch-plan.js';
import { invalidArgument } from './error.js';
import { type ShardRows, type ShardTable, shardRows } from './shards.js';

/** Query shards go to one server each. */
export interface QueryPlans {
  readonly fwdQ: DispatchPlan;
  readonly revQ: DispatchPlan;
}

/** The dispatches of global shard g are `offsets[g] .. offsets[g+1]`, replica ids ascending, each below `replicas`. */
export interface DispatchTable {
  readonly replicas: number;
  readonly offsets: Int32Array;
  readonly dstRank: Int32Array;
  readonly replica: Int32Array;
}

export interface KvPlans {
  readonly fwdKv: DispatchPlan;
  /** Gradients home, into a replica-major buffer (replicas, tokens) per rank. Rows of replicas that do not exist are never written. */
  readonly revKv: DispatchPlan;
  /** The same gradients, into a buffer that has rows only for replicas that exist. */
  readonly revKvCompact: DispatchPlan;
  readonly reduction: GradientReduction;
}

/**
 * Plans query shards: `dstRank[g]` is the server of global shard g, -1 when the shard stays unsent (it keeps its rows in the home
 * tensor). Each server's rows fill up in global-index order: `dstOffset` of a dispatch is the sum of the lengths of all earlier dispatches
 * to the same server. Time is linear in shards + ranks.
 */
export function planQuery(shards: ShardTable, dstRank: Int32Array): QueryPlans {
  const rows = shardRows(shards);
  const n = shards.lengths.length;
  checkInt32Array(dstRank, 'dstRank', n);
  checkRange(dstRank, 'dstRank', -1, shards.worldSize - 1);
  const offsets = new Int32Array(n + 1);
  const sentTo = new Int32Array(n);
  let sent = 0;
  for (let g = 0; g < n; g++) {
    if (dstRank[g]! >= 0) sentTo[sent++] = dstRank[g]!;
    offsets[g + 1] = sent;
  }
  const table = { replicas: 1, offsets, dstRank: sentTo.slice(0, sent), replica: new Int32Array(sent) };
  const routing = fillInGlobalOrder(shards, table);
  const made = directions(shards, rows, routing, scatterReverse(shards, rows, routing), 'q');
  return Object.freeze({ fwdQ: made.forward, revQ: made.reverse });
}

/**
 * Plans key-value shards to explicit servers, any number of replicas, filled in global-index order (home rank, shard, dispatch). For
 * attention use `planAttention`, which orders each server's rows as the documents need them.
 */
export function planReplicas(shards: ShardTable, table: DispatchTable): KvPlans {
  const rows = shardRows(shards);
  checkDispatchTable(shards, table);
  const routing = fillInGlobalOrder(shards, {
    replicas: table.replicas,
    offsets: table.offsets.slice(),
    dstRank: table.dstRank.slice(),
    replica: table.replica.slice(),
  });
  const reverse = scatterReverse(shards, rows, routing);
  const { compactRow } = gradientReduction(shards, rows, routing);
  const compactOffset = new Int32Array(routing.dstRank.length);
  const revOffsets = reverseOffsets(routing.recvShards);
  for (let e = 0; e < compactOffset.length; e++) {
    compactOffset[revOffsets[routing.dstRank[e]!]! + routing.dstShard[e]!] = compactRow[e]!;
  }
  return kvPlans(shards, rows, routing, reverse, compactOffset);
}

export function kvPlans(
  shards: ShardTable,
  rows: ShardRows,
  routing: Routing,
  reverseEntries: ReverseEntries,
  compactOffset: Int32Array,
): KvPlans {
  const { forward, reverse } = directions(shards, rows, routing, reverseEntries, 'kv');
  const reduction = gradientReduction(shards, rows, routing);
  return Object.freeze({
    fwdKv: forward,
    revKv: reverse,
    revKvCompact: Object.freeze({
      ...reverse,
      kind: 'rev-kv-compact' as const,
      dstOffset: compactOffset,
      recvTokens: compactTokens(forward),
    }),
    reduction,
  });
}

/** Rows of each home's compact buffer: one run per dispatch; at most the rows of the replica-major one, so they fit. */
function compactTokens(forward: DispatchPlan): Int32Array {
  return Int32Array.from(forward.sendTokens, (_, r) => {
    let rows = 0;
    for (let p = forward.sent.offsets[r]!; p < forward.sent.offsets[r + 1]!; p++) rows += forward.sent.tokens[p]!;
    return rows;
  });
}

function fillInGlobalOrder(shards: ShardTable, table: DispatchTable): Routing {
  const { worldSize } = shards;
  const { offsets, dstRank } = table;
  const entries = dstRank.length;
  const dstOffset = new Int32Array(entries);
  const dstShard = new Int32Array(entries);
  // Float64 while filling: a sum beyond int32 stays exact and is refused below instead of wrapping.
  const fill = new Float64Array(worldSize);
  const recvShards = new Int32Array(worldSize);
  for (let g = 0; g < shards.lengths.length; g++) {
    const length = shards.lengths[g]!;
    for (let e = offsets[g]!; e < offsets[g + 1]!; e++) {
      const t = dstRank[e]!;
      dstOffset[e] = fill[t]!;
      fill[t]! += length;
      dstShard[e] = recvShards[t]!++;
    }
  }
  const recvTokens = new Int32Array(worldSize);
  for (let t = 0; t < worldSize; t++) {
    recvTokens[t] = checkRows(fill[t]!, `the receive tensor of rank ${t}`, { rank: t });
  }
  return { ...table, dstOffset, dstShard, recvShards, recvTokens };
}

function checkDispatchTable(shards: ShardTable, table: DispatchTable): void {
  checkObject(table, 'table');
  const replicas = checkInteger(table.replicas, 'replicas', 1, maxRows);
  const offsets = checkInt32Array(table.offsets, 'offsets', shards.lengths.length + 1);
  const dstRank = checkInt32Array(table.dstRank, 'dstRank');
  const replica = checkInt32Array(table.replica, 'replica', dstRank.length);
  checkOffsets(offsets, 'offsets', dstRank.length);
  checkRange(dstRank, 'dstRank', 0, shards.worldSize - 1);
  checkRange(replica, 'replica', 0, replicas - 1);
  for (let g = 0; g < shards.lengths.length; g++) {
    for (let e = offsets[g]! + 1; e < offsets[g + 1]!; e++) {
      if (replica[e]! <= replica[e - 1]!) {
        throw invalidArgument(
          `replica[${e}] must be above ${replica[e - 1]}, the replica before it of shard ${g}, found ${replica[e]}`,
          {
            name: 'replica',
            index: e,
            shard: g,
            expected: `above ${replica[e - 1]}`,
            found: replica[e],
          },
        );
      }
    }
  }
}
