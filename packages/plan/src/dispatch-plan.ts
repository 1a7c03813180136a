import { checkInteger, partOf } from './check.js';
import { checkDispatchPlan } from './form.js';

/** Version of the plan format: raised when the meaning of any field changes. Ranks and files of another version are refused. */
export const planVersion = 1;

/**
 * What a plan moves. `fwd-*` home -> server, `rev-*` server -> home. `rev-kv` writes the replica-major buffer (replicas, tokens) of the
 * home rank, `rev-kv-compact` a buffer with rows only for replicas that exist.
 */
export type PlanKind = 'fwd-q' | 'rev-q' | 'fwd-kv' | 'rev-kv' | 'rev-kv-compact';

/**
 * Who exchanges how much with whom, sparse: the peers of rank r, ascending, are `peer[offsets[r] .. offsets[r+1])`. A pair is listed
 * when at least one dispatch joins it, be it of length 0.
 */
export interface PairTable {
  /** worldSize + 1 elements. */
  readonly offsets: Int32Array;
  readonly peer: Int32Array;
  /** Rows of all dispatches of the pair. */
  readonly tokens: Int32Array;
  /** Dispatches of the pair, those of length 0 included. */
  readonly dispatches: Int32Array;
}

/**
 * One direction of a dispatch, complete before anything moves. Dispatches (entries) are sender-major: rank r sends the entries
 * `entryOffsets[r] .. entryOffsets[r+1]`. In a `fwd-*` plan that order is the global index, lexicographic (home rank, shard, dispatch);
 * in a `rev-*` plan it is the order of the rows in the server's tensor. Offsets and lengths are token rows. The typed arrays belong to
 * the plan: do not write to them (JavaScript cannot freeze them; `validate` and `digest` find out).
 */
export interface DispatchPlan {
  readonly version: typeof planVersion;
  readonly kind: PlanKind;
  readonly worldSize: number;
  /** Replica ids are below this; 1 for queries. The rows of a `rev-kv` buffer are `replicas * tokens of the home rank`. */
  readonly replicas: number;
  /** worldSize + 1 elements. */
  readonly entryOffsets: Int32Array;
  readonly dstRank: Int32Array;
  /** First row in the sender's tensor. */
  readonly srcOffset: Int32Array;
  /** First row in the receiver's tensor. */
  readonly dstOffset: Int32Array;
  readonly length: Int32Array;
  /** Sender-local shard: the shard id on the home rank (`fwd-*`), the slot on the server (`rev-*`). */
  readonly srcShard: Int32Array;
  /** Receiver-local shard. A slot is the position among all shards that a server holds, in row order: entry e of a `fwd-*` plan is entry `entryOffsets[dstRank[e]] + dstShard[e]` of its `rev-*` plan. */
  readonly dstShard: Int32Array;
  readonly replica: Int32Array;
  /** Rows of each sender's tensor. */
  readonly sendTokens: Int32Array;
  /** Rows of each receiver's tensor. */
  readonly recvTokens: Int32Array;
  /** By sender: how much r sends to each peer. */
  readonly sent: PairTable;
  /** By receiver: how much r gets from each peer. */
  readonly received: PairTable;
}

/** The part of a plan that one rank needs to send and to know when it has received everything; views, no copies. */
export interface RankDispatch {
  readonly rank: number;
  readonly sendTokens: number;
  readonly recvTokens: number;
  readonly dstRank: Int32Array;
  readonly srcOffset: Int32Array;
  readonly dstOffset: Int32Array;
  readonly length: Int32Array;
  readonly srcShard: Int32Array;
  readonly dstShard: Int32Array;
  readonly replica: Int32Array;
  readonly sent: { readonly peer: Int32Array; readonly tokens: Int32Array; readonly dispatches: Int32Array };
  readonly received: { readonly peer: Int32Array; readonly tokens: Int32Array; readonly dispatches: Int32Array };
}

/** The entries and pairs of one rank. */
export function rankDispatch(plan: DispatchPlan, rank: number): RankDispatch {
  checkDispatchPlan(plan);
  checkInteger(rank, 'rank', 0, plan.worldSize - 1);
  const [from, to] = partOf(plan.entryOffsets, 'plan.entryOffsets', rank, plan.dstRank.length);
  return {
    rank,
    sendTokens: plan.sendTokens[rank]!,
    recvTokens: plan.recvTokens[rank]!,
    dstRank: plan.dstRank.subarray(from, to),
    srcOffset: plan.srcOffset.subarray(from, to),
    dstOffset: plan.dstOffset.subarray(from, to),
    length: plan.length.subarray(from, to),
    srcShard: plan.srcShard.subarray(from, to),
    dstShard: plan.dstShard.subarray(from, to),
    replica: plan.replica.subarray(from, to),
    sent: rankPairs(plan.sent, 'plan.sent', rank),
    received: rankPairs(plan.received, 'plan.received', rank),
  };
}

function rankPairs(pairs: PairTable, name: string, rank: number) {
  const [from, to] = partOf(pairs.offsets, `${name}.offsets`, rank, pairs.peer.length);
  return {
    peer: pairs.peer.subarray(from, to),
    tokens: pairs.tokens.subarray(from, to),
    dispatches: pairs.dispatches.subarray(from, to),
  };
}
