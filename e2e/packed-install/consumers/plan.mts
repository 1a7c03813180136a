// Three ranks with one query shard each; every shard goes to the next rank, the last one stays home unsent.
import { PlanError, planQuery, type QueryPlans, rankDispatch } from '@ep/plan';

const shards = { worldSize: 3, shardOffsets: Int32Array.of(0, 1, 2, 3), lengths: Int32Array.of(4, 6, 5) };
const plans: QueryPlans = planQuery(shards, Int32Array.of(1, 2, -1));
const first = rankDispatch(plans.fwdQ, 0);
if (first.dstRank.join() !== '1' || first.length.join() !== '4')
  throw new Error(`rank 0 sends ${first.length} to ${first.dstRank}`);
if (plans.fwdQ.recvTokens.join() !== '0,4,6') throw new Error(`ranks receive ${plans.fwdQ.recvTokens}, expected 0,4,6`);

try {
  planQuery(shards, Int32Array.of(1, 3, 0));
  throw new Error('rank 3 of 3 was accepted');
} catch (error) {
  if (!(error instanceof PlanError) || error.code !== 'EP_INVALID_ARGUMENT') throw error;
}
console.log('used');
