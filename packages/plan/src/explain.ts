import type { AttentionPlan, KvSharing } from './attention.js';
import { checkFields } from './check.js';
import { attendedPairs, maxOverAverage } from './cost.js';
import { checkAttentionPlan } from './form.js';
import { textTable } from './text-table.js';

/** One rank's part in a plan. Tokens are rows; pairs are attended query-key pairs, the unit of attention work. */
export interface RankExplanation {
  readonly rank: number;
  readonly homeShards: number;
  readonly homeTokens: number;
  /** Query groups and rows that it serves, and the KV rows it holds for them, its own included. */
  readonly groups: number;
  readonly queryTokens: number;
  readonly kvTokens: number;
  /** Work if every shard were computed where it lives, and as planned. */
  readonly pairsBefore: number;
  readonly pairsAfter: number;
  readonly sendsTo: number;
  readonly receivesFrom: number;
}

/** Rows that one rank sends another in the forward pass; `from` = `to` is a local copy. */
export interface TrafficExplanation {
  readonly from: number;
  readonly to: number;
  readonly queryTokens: number;
  readonly kvTokens: number;
}

export interface Explanation {
  readonly worldSize: number;
  readonly sharing: KvSharing;
  readonly documents: number;
  readonly shards: number;
  readonly tokens: number;
  readonly longestDocument: number;
  readonly ranks: readonly RankExplanation[];
  /** Every pair that exchanges anything, by sender, then receiver. */
  readonly traffic: readonly TrafficExplanation[];
  readonly imbalanceBefore: number;
  readonly imbalanceAfter: number;
  /** Rows that cross between ranks in the forward pass. */
  readonly movedQueryTokens: number;
  readonly movedKvTokens: number;
  /** KV rows that would have to cross if each went to each server once: what `each-server` sharing moves. */
  readonly neededKvTokens: number;
}

/** Who sends how much to whom, and the load of each rank before and after, as plain data. */
export function explain(plan: AttentionPlan): Explanation {
  checkAttentionPlan(plan);
  const { shards, serverRank, fwdQ, fwdKv, layout } = plan;
  const { worldSize } = shards;
  const before = new Float64Array(worldSize);
  const after = new Float64Array(worldSize);
  let longestDocument = 0;
  const pairsOf = new Float64Array(shards.lengths.length);
  layout.shard.forEach((g, k) => {
    const end = layout.kvLength[k]!;
    pairsOf[g] = attendedPairs(end - shards.lengths[g]!, end);
    after[serverRank[g]!]! += pairsOf[g]!;
    longestDocument = Math.max(longestDocument, end);
  });
  for (let r = 0; r < worldSize; r++) {
    for (let g = shards.shardOffsets[r]!; g < shards.shardOffsets[r + 1]!; g++) before[r]! += pairsOf[g]!;
  }
  const traffic: TrafficExplanation[] = [];
  const ranks: RankExplanation[] = [];
  const receivesFrom = new Int32Array(worldSize);
  const queries = new Float64Array(worldSize);
  const kvs = new Float64Array(worldSize);
  let movedQueryTokens = 0;
  let movedKvTokens = 0;
  const sendsTo = new Int32Array(worldSize);
  for (let from = 0; from < worldSize; from++) {
    for (let p = fwdQ.sent.offsets[from]!; p < fwdQ.sent.offsets[from + 1]!; p++)
      queries[fwdQ.sent.peer[p]!] = fwdQ.sent.tokens[p]!;
    // Whoever gets queries of a shard gets its keys and values too: the peers of Q are among the peers of KV.
    for (let p = fwdKv.sent.offsets[from]!; p < fwdKv.sent.offsets[from + 1]!; p++) {
      const to = fwdKv.sent.peer[p]!;
      kvs[to] = fwdKv.sent.tokens[p]!;
      traffic.push({ from, to, queryTokens: queries[to]!, kvTokens: kvs[to]! });
      if (to !== from) {
        sendsTo[from]!++;
        receivesFrom[to]!++;
        movedQueryTokens += queries[to]!;
        movedKvTokens += kvs[to]!;
      }
      queries[to] = 0;
      kvs[to] = 0;
    }
  }
  for (let rank = 0; rank < worldSize; rank++) {
    ranks.push({
      rank,
      homeShards: shards.shardOffsets[rank + 1]! - shards.shardOffsets[rank]!,
      homeTokens: fwdQ.sendTokens[rank]!,
      groups: layout.groupOffsets[rank + 1]! - layout.groupOffsets[rank]!,
      queryTokens: fwdQ.recvTokens[rank]!,
      kvTokens: fwdKv.recvTokens[rank]!,
      pairsBefore: before[rank]!,
      pairsAfter: after[rank]!,
      sendsTo: sendsTo[rank]!,
      receivesFrom: receivesFrom[rank]!,
    });
  }
  return {
    worldSize,
    sharing: plan.sharing,
    documents: shards.documents,
    shards: shards.lengths.length,
    tokens: sum(fwdQ.sendTokens),
    longestDocument,
    ranks,
    traffic,
    imbalanceBefore: maxOverAverage(before),
    imbalanceAfter: maxOverAverage(after),
    movedQueryTokens,
    movedKvTokens,
    neededKvTokens: neededKvTokens(plan),
  };
}

/** Ranks and pairs listed in the text; the data has all of them. */
const listedRanks = 64;
const listedPairs = 32;

/** The same for people. */
export function explanationText(explanation: Explanation): string {
  checkFields(explanation, 'explanation', {
    ranks: 'an array of objects',
    traffic: 'an array of objects',
    imbalanceBefore: 'a number',
    imbalanceAfter: 'a number',
  });
  const e = explanation;
  const average = sum(e.ranks.map((r) => r.pairsAfter)) / e.worldSize || 1;
  const lines = [
    `${e.documents} documents, ${e.tokens} tokens in ${e.shards} shards on ${e.worldSize} ranks, longest document ${e.longestDocument} tokens`,
    `attention work, largest rank over average: ${e.imbalanceBefore.toFixed(3)} at home, ${e.imbalanceAfter.toFixed(3)} as planned`,
    `rows that change rank: ${e.movedQueryTokens} query, ${e.movedKvTokens} key-value (${e.neededKvTokens} distinct), keys and values sent ${e.sharing === 'each-query' ? 'once per query shard' : 'once per server'}`,
    '',
    ...textTable(
      [
        'rank',
        'home tokens',
        'query tokens',
        'kv tokens',
        'pairs at home',
        'pairs planned',
        'load',
        'sends to',
        'gets from',
      ],
      e.ranks
        .slice(0, listedRanks)
        .map((r) => [
          r.rank,
          r.homeTokens,
          r.queryTokens,
          r.kvTokens,
          r.pairsBefore,
          r.pairsAfter,
          (r.pairsAfter / average).toFixed(3),
          r.sendsTo,
          r.receivesFrom,
        ]),
    ),
  ];
  if (e.ranks.length > listedRanks) lines.push(`and ${e.ranks.length - listedRanks} more ranks`);
  const remote = e.traffic
    .filter((t) => t.from !== t.to)
    .sort((a, b) => b.queryTokens + b.kvTokens - a.queryTokens - a.kvTokens || a.from - b.from || a.to - b.to);
  lines.push(
    '',
    ...textTable(
      ['from', 'to', 'query tokens', 'kv tokens'],
      remote.slice(0, listedPairs).map((t) => [t.from, t.to, t.queryTokens, t.kvTokens]),
    ),
  );
  if (remote.length > listedPairs) lines.push(`and ${remote.length - listedPairs} more pairs`);
  return `${lines.join('\n')}\n`;
}

function neededKvTokens(plan: AttentionPlan): number {
  const { fwdKv } = plan;
  const lastShard = new Int32Array(fwdKv.worldSize);
  let needed = 0;
  for (let r = 0; r < fwdKv.worldSize; r++) {
    lastShard.fill(-1);
    for (let e = fwdKv.entryOffsets[r]!; e < fwdKv.entryOffsets[r + 1]!; e++) {
      const t = fwdKv.dstRank[e]!;
      if (t === r || lastShard[t] === fwdKv.srcShard[e]) continue;
      lastShard[t] = fwdKv.srcShard[e]!;
      needed += fwdKv.length[e]!;
    }
  }
  return needed;
}

function sum(values: ArrayLike<number>): number {
  let total = 0;
  for (let i = 0; i < values.length; i++) total += values[i]!;
  return total;
}
