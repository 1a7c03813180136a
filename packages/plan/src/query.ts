import { checkInt32Array, checkInteger, checkObject, checkOffsets, checkRange, checkRows, maxRows } from './check.js';
import { unwrittenColumn } from './column.js';
import {
  directions,
  type Entries,
  type GradientReduction,
  type GradientRows,
  gradientReduction,
  gradientRows,
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
  const routing = fillInGlobalOrder(shards, rows, table);
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
  const routing = fillInGlobalOrder(shards, rows, {
    replicas: table.replicas,
    offsets: table.offsets.slice(),
    dstRank: table.dstRank.slice(),
    replica: table.replica.slice(),
  });
  const gradient = gradientRows(shards, rows, routing);
  const { dstRank, dstShard } = routing.entries;
  const compactOffset = new Int32Array(dstRank.length);
  const first = reverseOffsets(routing.recvShards);
  for (let e = 0; e < compactOffset.length; e++) {
    compactOffset[first[dstRank[e]!]! + dstShard[e]!] = gradient.compactRow[e]!;
  }
  return kvPlans(shards, rows, { routing, gradient, reverse: scatterReverse(shards, rows, routing), compactOffset });
}

/** Everything about key-value dispatches but who exchanges how much with whom. */
export interface RoutedKv {
  readonly routing: Routing;
  readonly gradient: GradientRows;
  readonly reverse: Entries;
  /** `dstOffset` of the reverse entries in the compact buffer. */
  readonly compactOffset: Int32Array;
}

export function kvPlans(shards: ShardTable, rows: ShardRows, routed: RoutedKv): KvPlans {
  const { forward, reverse } = directions(shards, rows, routed.routing, routed.reverse, 'kv');
  return Object.freeze({
    fwdKv: forward,
    revKv: reverse,
    revKvCompact: Object.freeze({
      ...reverse,
      kind: 'rev-kv-compact' as const,
      dstOffset: routed.compactOffset,
      recvTokens: compactTokens(forward, routed.gradient),
    }),
    reduction: gradientReduction(shards, rows, routed.routing, routed.gradient),
  });
}

/** Rows of each home's compact buffer: where its last run ends; at most the rows of the replica-major one, so they fit. */
function compactTokens({ entryOffsets, length }: DispatchPlan, { compactRow }: GradientRows): Int32Array {
  return Int32Array.from({ length: entryOffsets.length - 1 }, (_, r) => {
    const last = entryOffsets[r + 1]! - 1;
    return last < entryOffsets[r]! ? 0 : compactRow[last]! + length[last]!;
  });
}

function fillInGlobalOrder(shards: ShardTable, rows: ShardRows, table: DispatchTable): Routing {
  const { worldSize, shardOffsets, lengths } = shards;
  const { replicas, offsets, dstRank, replica } = table;
  const { start } = rows;
  const count = dstRank.length;
  const srcOffset = unwrittenColumn(count);
  const dstOffset = unwrittenColumn(count);
  const length = unwrittenColumn(count);
  const srcShard = unwrittenColumn(count);
  const dstShard = unwrittenColumn(count);
  // Float64 while filling: a sum beyond int32 stays exact and is refused below instead of wrapping.
  const fill = new Float64Array(worldSize);
  const recvShards = new Int32Array(worldSize);
  for (let r = 0; r < worldSize; r++) {
    const firstShard = shardOffsets[r]!;
    for (let g = firstShard; g < shardOffsets[r + 1]!; g++) {
      const tokens = lengths[g]!;
      const row = start[g]!;
      for (let e = offsets[g]!; e < offsets[g + 1]!; e++) {
        const t = dstRank[e]!;
        srcOffset[e] = row;
        dstOffset[e] = fill[t]!;
        length[e] = tokens;
        srcShard[e] = g - firstShard;
        dstShard[e] = recvShards[t]!;
        fill[t]! += tokens;
        recvShards[t]!++;
      }
    }
  }
  const recvTokens = new Int32Array(worldSize);
  for (let t = 0; t < worldSize; t++) {
    recvTokens[t] = checkRows(fill[t]!, `the receive tensor of rank ${t}`, { rank: t });
  }
  const entries = { dstRank, srcOffset, dstOffset, length, srcShard, dstShard, replica };
  return { replicas, offsets, entries, recvShards, recvTokens };
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
