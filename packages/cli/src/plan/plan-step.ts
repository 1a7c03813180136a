/** One attention step planned twice: every shard computed where it lives, and balanced. */
import {
  type AttentionPlan,
  balance,
  type Explanation,
  explain,
  type KvSharing,
  packDocuments,
  planAttention,
  shardsOfDocuments,
} from '@ep/plan';

export interface StepOptions {
  /** Tokens of each document, in order. */
  readonly lengths: Int32Array;
  /** Tokens that each rank holds, one per rank. */
  readonly budgets: Int32Array;
  readonly balance: boolean;
  readonly tolerance: number;
  readonly block: number;
  readonly sharing: KvSharing;
  /** Bytes of a row of Q, and of a row of K and one of V together. */
  readonly rowBytesQ: number;
  readonly rowBytesKv: number;
}

export interface PlannedStep {
  readonly atHome: AttentionPlan;
  /** The balanced plan, or `atHome` where balancing was switched off. */
  readonly planned: AttentionPlan;
  readonly explanation: Explanation;
}

/** Budgets that share the tokens out evenly; the first ranks have the remainder. */
export function evenBudgets(tokens: number, ranks: number): Int32Array {
  return Int32Array.from({ length: ranks }, (_, rank) => Math.floor(tokens / ranks) + (rank < tokens % ranks ? 1 : 0));
}

/** Throws `EP_CAPACITY` when the documents do not fit the budgets, and what `balance` and `planAttention` throw. */
export function planStep(options: StepOptions): PlannedStep {
  const { rowBytesQ: qRowBytes, rowBytesKv: kvRowBytes, tolerance, block, sharing } = options;
  const { shards } = shardsOfDocuments(packDocuments(options.lengths, options.budgets));
  const homes = new Int32Array(shards.lengths.length);
  for (let r = 0; r < shards.worldSize; r++) homes.fill(r, shards.shardOffsets[r]!, shards.shardOffsets[r + 1]!);
  const atHome = planAttention(shards, homes, { sharing });
  if (!options.balance) return { atHome, planned: atHome, explanation: explain(atHome) };
  const balanced = balance(shards, { qRowBytes, kvRowBytes, tolerance, block, sharing });
  const planned = planAttention(balanced.shards, balanced.serverRank, { sharing });
  return { atHome, planned, explanation: explain(planned) };
}

/** Bytes of the forward pass that cross between ranks, and what would have to: each row once to each server that needs it. */
export function movedBytes(
  explanation: Explanation,
  rowBytesQ: number,
  rowBytesKv: number,
): { readonly query: number; readonly keyValue: number; readonly neededKeyValue: number } {
  return {
    query: explanation.movedQueryTokens * rowBytesQ,
    keyValue: explanation.movedKvTokens * rowBytesKv,
    neededKeyValue: explanation.neededKvTokens * rowBytesKv,
  };
}
