import { planQuery, type QueryPlans } from '@ep/plan';

/** Sends each of a rank's documents to the rank that follows it: a library's own policy on top of @ep/plan. */
export function planRing(tokensPerRank: readonly (readonly number[])[]): QueryPlans {
  const worldSize = tokensPerRank.length;
  const shardOffsets = Int32Array.of(0, ...tokensPerRank.map((lengths) => lengths.length));
  for (let rank = 0; rank < worldSize; rank++) shardOffsets[rank + 1]! += shardOffsets[rank]!;
  const dstRank = tokensPerRank.flatMap((lengths, rank) => lengths.map(() => (rank + 1) % worldSize));
  const shards = { worldSize, shardOffsets, lengths: Int32Array.from(tokensPerRank.flat()) };
  return planQuery(shards, Int32Array.from(dstRank));
}
