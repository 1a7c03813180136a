import { checkFields, checkInteger, maxRows } from '../check.js';
import { maxOverAverage } from '../cost.js';
import { textTable } from '../text-table.js';
import { checkMap, maxExperts } from './experts.js';
import { checkMoePlan } from './form.js';
import type { MoePlan } from './plan.js';
import { expertLoad, gini } from './routing.js';

/** One rank's part. Choices are (token, expert) pairs that travel; tokens are counted once for each rank that they reach. */
export interface MoeRankExplanation {
  readonly rank: number;
  readonly localExperts: number;
  readonly tokens: number;
  /** Choices of this rank's tokens, and those of them that stay here. */
  readonly sends: number;
  readonly keeps: number;
  /** Choices of all ranks that its experts serve, and the rows of its receive tensor. */
  readonly serves: number;
  readonly recvRows: number;
  /** Other ranks with a choice of this rank's tokens, and with tokens for this rank's experts. */
  readonly sendsTo: number;
  readonly receivesFrom: number;
  readonly state: 'active' | 'inactive' | 'lost';
}

/** The most chosen experts, with what each of their replicas serves. */
export interface MoeExpertExplanation {
  readonly expert: number;
  readonly chosen: number;
  readonly replicas: readonly { readonly rank: number; readonly serves: number }[];
}

export interface MoeExplanation {
  readonly mode: MoePlan['form']['mode'];
  readonly worldSize: number;
  readonly experts: number;
  readonly replicas: number;
  readonly topK: number;
  readonly tokens: number;
  /** All choices are empty (-1), unserved, lost, or served. */
  readonly emptyChoices: number;
  readonly unservedChoices: number;
  readonly lostChoices: number;
  readonly servedChoices: number;
  /** Of the router's choices: 0 = every expert chosen alike. */
  readonly expertGini: number;
  /** Most chosen expert over average. */
  readonly expertImbalance: number;
  /** Choices served by the busiest active rank over the average of the active ones. */
  readonly rankImbalance: number;
  /** Ranks, and nodes, that a token with any choice reaches on average; and what it would be for choices all alike. */
  readonly ranksPerToken: number;
  readonly nodesPerToken: number;
  readonly expectedRanksPerToken: number;
  readonly ranks: readonly MoeRankExplanation[];
  /** All experts, most chosen first. */
  readonly byLoad: readonly MoeExpertExplanation[];
}

/** Loads, imbalance and reach of a plan as plain data. For bytes see `moeTraffic`. */
export function explainMoe(plan: MoePlan): MoeExplanation {
  checkMoePlan(plan);
  checkMap(plan.map, 'plan.map');
  const { map, routing, placement } = plan;
  const { worldSize } = map;
  const load = expertLoad(routing);
  const choices = routing.topkIdx.length;
  const chosen = load.reduce((sum, n) => sum + n, 0);
  const servedChoices = plan.row.reduce((sum, row) => sum + (row >= 0 ? 1 : 0), 0);
  const reached = plan.replica.reduce((sum, p) => sum + (p >= 0 ? 1 : 0), 0);
  const serves = (p: number) => {
    let rows = 0;
    for (let s = 0; s < worldSize; s++) rows += placement.count[p * worldSize + s]!;
    return rows;
  };
  const byLoad = Array.from(load, (n, expert) => ({
    expert,
    chosen: n,
    replicas: Array.from(map.replicas.subarray(map.expertOffsets[expert]!, map.expertOffsets[expert + 1]!), (p) => ({
      rank: map.rank[p]!,
      serves: serves(p),
    })),
  })).sort((a, b) => b.chosen - a.chosen || a.expert - b.expert);
  const ranks = explainRanks(plan);
  const alive = ranks.filter(({ state }) => state === 'active');
  const withChoice = tokensWithChoice(plan);
  const perToken = (counts: Int32Array) => (withChoice === 0 ? 0 : counts.reduce((sum, n) => sum + n, 0) / withChoice);
  return {
    mode: plan.form.mode,
    worldSize,
    experts: map.experts,
    replicas: map.expert.length,
    topK: routing.topK,
    tokens: routing.tokenOffsets[worldSize]!,
    emptyChoices: choices - chosen,
    unservedChoices: chosen - reached,
    lostChoices: reached - servedChoices,
    servedChoices,
    expertGini: gini(load),
    expertImbalance: maxOverAverage(load),
    rankImbalance: maxOverAverage(alive.map((r) => r.serves)),
    ranksPerToken: perToken(plan.tokensPerRank),
    nodesPerToken: perToken(plan.tokensPerNode),
    expectedRanksPerToken: expectedGroups(map.experts, worldSize, routing.topK),
    ranks,
    byLoad,
  };
}

/**
 * Groups that `topK` different ones of `experts` lie in on average, when every choice is as likely as any other and the experts are in
 * `groups` groups of `experts / groups`: `groups * (1 - C(experts - size, topK) / C(experts, topK))`, the size rounded where it is no integer.
 * Nobody chooses more than all experts.
 */
export function expectedGroups(experts: number, groups: number, topK: number): number {
  checkInteger(experts, 'experts', 1, maxExperts);
  checkInteger(groups, 'groups', 1, maxRows);
  checkInteger(topK, 'topK', 0, maxRows);
  const size = Math.round(experts / groups);
  let missed = 1;
  for (let k = 0; k < Math.min(topK, experts); k++) missed *= (experts - size - k) / (experts - k);
  return groups * (1 - missed);
}

function explainRanks({ map, routing, placement, form, activeRanks, lostRanks }: MoePlan): MoeRankExplanation[] {
  const { worldSize } = map;
  const sent = new Float64Array(worldSize * worldSize);
  for (let p = 0; p < map.expert.length; p++) {
    for (let s = 0; s < worldSize; s++) sent[s * worldSize + map.rank[p]!]! += placement.count[p * worldSize + s]!;
  }
  return Array.from({ length: worldSize }, (_, rank) => {
    const part = { sends: 0, serves: 0, sendsTo: 0, receivesFrom: 0 };
    for (let peer = 0; peer < worldSize; peer++) {
      const [out, into] = [sent[rank * worldSize + peer]!, sent[peer * worldSize + rank]!];
      part.sends += out;
      part.serves += into;
      if (peer !== rank && out > 0) part.sendsTo++;
      if (peer !== rank && into > 0) part.receivesFrom++;
    }
    return {
      rank,
      localExperts: map.rankOffsets[rank + 1]! - map.rankOffsets[rank]!,
      tokens: routing.tokenOffsets[rank + 1]! - routing.tokenOffsets[rank]!,
      keeps: sent[rank * worldSize + rank]!,
      recvRows: form.mode === 'low-latency' || lostRanks[rank] === 0 ? placement.recvRows[rank]! : 0,
      state: lostRanks[rank] === 1 ? 'lost' : activeRanks[rank] === 0 ? 'inactive' : 'active',
      ...part,
    };
  });
}

function tokensWithChoice({ replica, routing: { topK } }: MoePlan): number {
  let tokens = 0;
  for (let first = 0; first < replica.length; first += topK) {
    if (replica.subarray(first, first + topK).some((p) => p >= 0)) tokens++;
  }
  return tokens;
}

/** Ranks and experts listed in the text; the data has all of them. */
const listedRanks = 64;
const listedExperts = 8;

const explanationFields = {
  mode: 'a text',
  expertGini: 'a number',
  expertImbalance: 'a number',
  rankImbalance: 'a number',
  ranksPerToken: 'a number',
  nodesPerToken: 'a number',
  expectedRanksPerToken: 'a number',
  ranks: 'an array of objects',
  byLoad: 'an array of objects',
} as const;

/** The same for people. */
export function moeExplanationText(explanation: MoeExplanation): string {
  checkFields(explanation, 'explanation', explanationFields);
  const e = explanation;
  e.ranks.slice(0, listedRanks).forEach((rank, i) => {
    checkFields(rank, `explanation.ranks[${i}]`, { rank: 'a number', state: 'a text' });
  });
  e.byLoad.slice(0, listedExperts).forEach((expert, i) => {
    checkFields(expert, `explanation.byLoad[${i}]`, { expert: 'a number', replicas: 'an array of objects' });
  });
  const lines = [
    `${e.tokens} tokens on ${e.worldSize} ranks, top-${e.topK} of ${e.experts} experts in ${e.replicas} replicas, ${e.mode} form`,
    `choices: ${e.servedChoices} served, ${e.emptyChoices} empty, ${e.unservedChoices} without an active replica, ${e.lostChoices} lost with their ranks`,
    `experts: Gini ${e.expertGini.toFixed(3)}, most chosen over average ${e.expertImbalance.toFixed(3)}; ranks: busiest over average ${e.rankImbalance.toFixed(3)}`,
    `a token reaches ${e.ranksPerToken.toFixed(2)} ranks on ${e.nodesPerToken.toFixed(2)} nodes (${e.expectedRanksPerToken.toFixed(2)} ranks if all experts were chosen alike)`,
    '',
    ...textTable(
      ['rank', 'experts', 'tokens', 'sends', 'keeps', 'serves', 'rows', 'sends to', 'gets from', 'state'],
      e.ranks
        .slice(0, listedRanks)
        .map((r) => [
          r.rank,
          r.localExperts,
          r.tokens,
          r.sends,
          r.keeps,
          r.serves,
          r.recvRows,
          r.sendsTo,
          r.receivesFrom,
          r.state,
        ]),
    ),
  ];
  if (e.ranks.length > listedRanks) lines.push(`and ${e.ranks.length - listedRanks} more ranks`);
  lines.push(
    '',
    ...textTable(
      ['expert', 'chosen', 'served by (rank: choices)'],
      e.byLoad
        .slice(0, listedExperts)
        .map((x) => [x.expert, x.chosen, x.replicas.map((r) => `${r.rank}: ${r.serves}`).join(', ')]),
    ),
  );
  if (e.byLoad.length > listedExperts) lines.push(`and ${e.byLoad.length - listedExperts} more experts`);
  return `${lines.join('\n')}\n`;
}
