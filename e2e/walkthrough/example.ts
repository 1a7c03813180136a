/**
 * The example: three ranks, one shard of four tokens each, rows of 128 bytes. Every query shard goes to one server, every key-value shard to
 * one or two; -1 means no second one. The same step is in the goldens `q_seed_walkthrough_q_w3` and `q3d_seed_walkthrough_kv_w3`.
 */
import type { PartSpec } from '@ep/cuda-kernels';
import { fromPaddedQuery, fromPaddedReplicas, type KvPlans, planQuery, planReplicas, type QueryPlans } from '@ep/plan';

export const worldSize = 3;
/** [rank][shard] */
export const shardLengths = [[4], [4], [4]] as const;
export const queryServers = [[2], [0], [1]] as const;
/** [rank][shard][replica] */
export const keyValueServers = [[[2, 0]], [[0, -1]], [[1, 2]]] as const;

/** 32 numbers of 4 bytes. */
export const rowElements = 32;
/** Two rows: small enough that every shard travels in two chunks. */
export const chunkBytes = 256;
export const leases = 2;

/** Every number of a row is the token's id, as in the goldens. */
export const tokenId = (rank: number, token: number): number => 1000 * rank + token + 1;

export type Plans = QueryPlans & KvPlans;

export function makePlans(): Plans {
  const query = fromPaddedQuery(shardLengths, queryServers);
  const keyValue = fromPaddedReplicas(shardLengths, keyValueServers);
  return { ...planQuery(query.shards, query.dstRank), ...planReplicas(keyValue.shards, keyValue.table) };
}

export type DispatchName = 'forward' | 'output' | 'gradients' | 'summed';

/** The four dispatches of the step: what a dispatcher is bound to. */
export function dispatchesOf(plans: Plans): Readonly<Record<DispatchName, readonly PartSpec[]>> {
  const rows = { dtype: 'f32', rowShape: [rowElements] } as const;
  return {
    forward: [
      { name: 'q', plan: plans.fwdQ, ...rows },
      { name: 'kv', plan: plans.fwdKv, ...rows },
    ],
    output: [{ name: 'o', plan: plans.revQ, ...rows }],
    gradients: [{ name: 'dKv', plan: plans.revKv, ...rows }],
    summed: [{ name: 'dKv', plan: plans.revKvCompact, reduce: plans.reduction, ...rows }],
  };
}
