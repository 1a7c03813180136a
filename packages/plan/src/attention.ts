import { checkInt32Array, checkObject, checkRange } from './check.js';
import { checkSharing } from './form.js';
import { routeRuns } from './kv.js';
import { type AttentionLayout, attentionLayout } from './layout.js';
import { type KvPlans, kvPlans, planQuery, type QueryPlans } from './query.js';
import { runsOfDocuments, runsOfQueries } from './runs.js';
import { type DocumentShards, documentIndex, shardRows } from './shards.js';

/** `each-query`: a server gets a document prefix once per query shard. `each-server`: once, shared by its query shards of the document. */
export type KvSharing = 'each-query' | 'each-server';

/** Everything that one step of core attention needs, all ranks, both directions. */
export interface AttentionPlan extends QueryPlans, KvPlans {
  readonly sharing: KvSharing;
  readonly layout: AttentionLayout;
  /** What was planned: copies of the inputs, so that a plan explains and serialises itself. */
  readonly shards: DocumentShards;
  readonly serverRank: Int32Array;
}

export interface AttentionOptions {
  /** Default `each-query`, the layout of plain varlen attention. */
  readonly sharing?: KvSharing;
}

/**
 * Plans causal attention of whole documents: `serverRank[g]` is the server that computes the queries of global shard g. The server gets
 * the keys and values of the document from its start to the end of that shard, in document order, wherever they live.
 * Time is linear in dispatches + ranks. Throws EP_INVALID_ARGUMENT, or EP_CAPACITY when a tensor would have 2^31 rows or more.
 */
export function planAttention(
  shards: DocumentShards,
  serverRank: Int32Array,
  options: AttentionOptions = {},
): AttentionPlan {
  checkObject(options, 'options');
  const sharing = options.sharing ?? 'each-query';
  checkSharing(sharing, 'sharing');
  const rows = shardRows(shards);
  const index = documentIndex(shards);
  checkInt32Array(serverRank, 'serverRank', shards.lengths.length);
  checkRange(serverRank, 'serverRank', 0, shards.worldSize - 1);
  const { fwdQ, revQ } = planQuery(shards, serverRank);
  const eachQuery = sharing === 'each-query';
  const runs = eachQuery ? runsOfQueries(shards, index, serverRank) : runsOfDocuments(shards, index, serverRank);
  const routed = routeRuns(shards, rows, index, serverRank, runs, eachQuery);
  const layout = attentionLayout(shards, index, serverRank, revQ, runs, eachQuery);
  return Object.freeze({
    sharing,
    fwdQ,
    revQ,
    ...kvPlans(shards, rows, routed),
    layout,
    shards: Object.freeze({
      worldSize: shards.worldSize,
      shardOffsets: shards.shardOffsets.slice(),
      lengths: shards.lengths.slice(),
      documents: shards.documents,
      document: shards.document.slice(),
      position: shards.position.slice(),
    }),
    serverRank: serverRank.slice(),
  });
}
