import { checkInteger, checkObject, partOf } from '../check.js';
import { unwrittenColumn } from '../column.js';
import { invalidArgument, PlanError } from '../error.js';
import { type ExpertMap, mapExperts, moeVersion } from './experts.js';
import { checkMoePlan } from './form.js';
import { layOut, type ReplicaOptions, type ReplicaPolicy, selectReplicas } from './layout.js';
import { blockRows, checkCounts, checkForm, fillRows, type MoeForm, type Placement, placeRows } from './placement.js';
import { type RankMask, rankMask } from './ranks.js';
import { checkRouting, choicesOf, rankTopk, type TokenRouting } from './routing.js';

export interface MoeOptions extends ReplicaOptions {
  /** Ranks found dead in the call, after choices were made. Nothing goes to them and none of their rows is kept. None, by default. */
  readonly lostRanks?: RankMask;
}

/**
 * One dispatch of tokens to experts and the combine that brings results back, complete before anything moves. Choice i belongs to token
 * `floor(i / topK)`, tokens source-rank-major as in the routing. It is row `row[i]` of the receive tensor of rank `map.rank[replica[i]]`, or
 * does not travel (-1). Typed arrays belong to the plan: do not write to them (`validateMoe` and `moeDigest` find out).
 */
export interface MoePlan {
  readonly version: typeof moeVersion;
  readonly map: ExpertMap;
  readonly routing: TokenRouting;
  readonly form: MoeForm;
  readonly policy: ReplicaPolicy;
  readonly ranksPerNode: number;
  /** 1 = there before the call. */
  readonly activeRanks: Uint8Array;
  /** 1 = found dead in the call. */
  readonly lostRanks: Uint8Array;
  /** Replica chosen for each choice; -1 = none, no active rank holds the expert, or its source is not active. */
  readonly replica: Int32Array;
  /** Place of the choice among those of its source to its replica; -1 with `replica`. */
  readonly slot: Int32Array;
  /** Row in the receive tensor; -1 with `replica`, and where source or destination was lost. */
  readonly row: Int32Array;
  /** Element `s * worldSize + r`: tokens of rank s with a choice on rank r. */
  readonly tokensPerRank: Int32Array;
  /** Element `s * nodes + n`, likewise. */
  readonly tokensPerNode: Int32Array;
  readonly placement: Placement;
  /** Choices of active sources whose expert no active rank holds. */
  readonly unserved: number;
}

/**
 * Plans a dispatch. Time is linear in choices, plus ranks * replicas for the table of counts.
 *
 * A rank in `lostRanks` differs from one that is not active: replicas were chosen while it counted as there. In low-latency form the runs
 * of later sources move up into its place, since rows are packed when all counts are known; in high-throughput form, where rows are written in
 * place, its runs stay as zero rows that no count includes.
 */
export function planMoe(routing: TokenRouting, map: ExpertMap, form: MoeForm, options: MoeOptions = {}): MoePlan {
  checkRouting(routing);
  checkObject(map, 'map');
  const experts = mapExperts(map);
  const { worldSize } = experts;
  if (routing.worldSize !== worldSize || routing.experts !== experts.experts) {
    throw invalidArgument(
      `the routing is for ${routing.worldSize} ranks and ${routing.experts} experts, the map for ${worldSize} and ${experts.experts}`,
      { routing: [routing.worldSize, routing.experts], map: [worldSize, experts.experts] },
    );
  }
  const checkedForm = checkForm(form);
  if (checkedForm.mode === 'low-latency') checkMaxTokens(routing, checkedForm.maxTokens);
  const selection = selectReplicas(experts, options);
  const lostRanks = rankMask(options.lostRanks, 'lostRanks', worldSize, 0);
  checkCounts(experts);
  const replicas = experts.expert.length;
  const nodes = Math.ceil(worldSize / selection.ranksPerNode);
  const replica = unwrittenColumn(routing.topkIdx.length);
  const slot = unwrittenColumn(routing.topkIdx.length);
  const row = unwrittenColumn(routing.topkIdx.length);
  const counts = new Int32Array(worldSize * replicas);
  const tokensPerRank = new Int32Array(worldSize * worldSize);
  const tokensPerNode = new Int32Array(worldSize * nodes);
  const part = (column: Int32Array, s: number) =>
    column.subarray(routing.tokenOffsets[s]! * routing.topK, routing.tokenOffsets[s + 1]! * routing.topK);
  let unserved = 0;
  for (let s = 0; s < worldSize; s++) {
    const into = { replica: part(replica, s), slot: part(slot, s) };
    const layout = layOut(selection, s, routing.topK, rankTopk(routing, s), into);
    counts.set(layout.tokensPerReplica, s * replicas);
    tokensPerRank.set(layout.tokensPerRank, s * worldSize);
    tokensPerNode.set(layout.tokensPerNode, s * nodes);
    if (selection.activeRanks[s] === 1) unserved += layout.unserved;
  }
  const placement = placeSurvivors(experts, counts, checkedForm, lostRanks);
  for (let s = 0; s < worldSize; s++) {
    const rows = part(row, s);
    if (lostRanks[s] === 1) rows.fill(-1);
    else fillRows(placement, s, { replica: part(replica, s), slot: part(slot, s) }, rows);
  }
  if (lostRanks.includes(1)) {
    for (let i = 0; i < row.length; i++) if (row[i]! >= 0 && lostRanks[experts.rank[replica[i]!]!] === 1) row[i] = -1;
  }
  return Object.freeze({
    version: moeVersion,
    map: experts,
    routing: Object.freeze({
      worldSize,
      experts: routing.experts,
      topK: routing.topK,
      tokenOffsets: routing.tokenOffsets.slice(),
      topkIdx: routing.topkIdx.slice(),
    }),
    form: checkedForm,
    policy: selection.policy,
    ranksPerNode: selection.ranksPerNode,
    activeRanks: selection.activeRanks,
    lostRanks,
    replica,
    slot,
    row,
    tokensPerRank,
    tokensPerNode,
    placement,
    unserved,
  });
}

/** The same choices when `lostRanks` turn out to be dead in the call: what all survivors must agree on. */
export function withLostRanks(plan: MoePlan, lostRanks: RankMask): MoePlan {
  checkMoePlan(plan);
  const { policy, ranksPerNode, activeRanks } = plan;
  return planMoe(plan.routing, plan.map, plan.form, { policy, ranksPerNode, activeRanks, lostRanks });
}

function placeSurvivors(map: ExpertMap, counts: Int32Array, form: MoeForm, lostRanks: Uint8Array): Placement {
  if (!lostRanks.includes(1)) return placeRows(map, counts, form);
  const replicas = map.expert.length;
  const dead = (s: number, p: number) => lostRanks[s] === 1 || lostRanks[map.rank[p]!] === 1;
  const kept = counts.map((n, i) => (dead(Math.floor(i / replicas), i % replicas) ? 0 : n));
  if (form.mode === 'low-latency') return placeRows(map, kept, form);
  const placement = placeRows(map, counts, form);
  const { worldSize } = map;
  return Object.freeze({
    ...placement,
    count: placement.count.map((n, i) => (dead(i % worldSize, Math.floor(i / worldSize)) ? 0 : n)),
  });
}

function checkMaxTokens(routing: TokenRouting, maxTokens: number): void {
  for (let r = 0; r < routing.worldSize; r++) {
    const tokens = routing.tokenOffsets[r + 1]! - routing.tokenOffsets[r]!;
    if (tokens > maxTokens) {
      throw new PlanError('EP_CAPACITY', `rank ${r} has ${tokens} tokens, maxTokens is ${maxTokens}`, {
        rank: r,
        needed: tokens,
        limit: maxTokens,
      });
    }
  }
}

/** What one rank sends; views, no copies. All are parallel to its choices. */
export interface MoeSend {
  readonly rank: number;
  readonly tokens: number;
  readonly topkIdx: Int32Array;
  readonly replica: Int32Array;
  readonly slot: Int32Array;
  readonly row: Int32Array;
  readonly tokensPerRank: Int32Array;
  readonly tokensPerNode: Int32Array;
}

export function rankSends(plan: MoePlan, rank: number): MoeSend {
  checkMoePlan(plan);
  const { routing, tokensPerRank, tokensPerNode } = plan;
  checkInteger(rank, 'rank', 0, routing.worldSize - 1);
  const [from, to] = choicesOf(routing, rank, 'plan.routing.');
  const nodes = tokensPerNode.length / routing.worldSize;
  return {
    rank,
    tokens: (to - from) / routing.topK,
    topkIdx: routing.topkIdx.subarray(from, to),
    replica: plan.replica.subarray(from, to),
    slot: plan.slot.subarray(from, to),
    row: plan.row.subarray(from, to),
    tokensPerRank: tokensPerRank.subarray(rank * routing.worldSize, (rank + 1) * routing.worldSize),
    tokensPerNode: tokensPerNode.subarray(rank * nodes, (rank + 1) * nodes),
  };
}

/** What one rank receives, as a dispatch hands it out. */
export interface MoeReceive {
  readonly rank: number;
  readonly localExperts: number;
  /** Rows of the receive tensor, padding and spare rows included. */
  readonly recvRows: number;
  /** First row of each local expert's block, rows that its runs span (those of lost ranks included, padding not), and rows that tokens wrote. */
  readonly blockStart: Int32Array;
  readonly blockRows: Int32Array;
  readonly recvCount: Int32Array;
  /** Element `e * worldSize + s`: `begin << 32 | count` of the rows from source s in the block of local expert e. */
  readonly layoutRange: BigInt64Array;
  /** For each row of the tensor: where it came from: rank, token on that rank, and which of its choices it is. -1 where no token wrote. */
  readonly sourceRank: Int32Array;
  readonly sourceToken: Int32Array;
  readonly sourceChoice: Int32Array;
}

/** Time is linear in the choices of all ranks plus the rows of this one. */
export function rankReceives(plan: MoePlan, rank: number): MoeReceive {
  checkMoePlan(plan);
  const { map, routing, placement } = plan;
  const { worldSize } = map;
  checkInteger(rank, 'rank', 0, worldSize - 1);
  const [from, to] = partOf(map.rankOffsets, 'plan.map.rankOffsets', rank, map.expert.length);
  const recvRows = recvRowsOf(plan, rank, from, to);
  const sourceRank = new Int32Array(recvRows).fill(-1);
  const sourceToken = new Int32Array(recvRows).fill(-1);
  const sourceChoice = new Int32Array(recvRows).fill(-1);
  for (let s = 0; s < worldSize; s++) {
    const [first, end] = choicesOf(routing, s, 'plan.routing.');
    for (let i = first; i < end; i++) {
      const row = plan.row[i]!;
      if (row < 0) continue;
      const at = map.rank[plan.replica[i]!];
      if (at !== undefined && at !== rank) continue;
      if (at === undefined || row >= recvRows) throw nowhere(plan, i);
      sourceRank[row] = s;
      sourceToken[row] = Math.floor((i - first) / routing.topK);
      sourceChoice[row] = (i - first) % routing.topK;
    }
  }
  const layoutRange = new BigInt64Array((to - from) * worldSize);
  const recvCount = new Int32Array(to - from);
  for (let i = 0; i < layoutRange.length; i++) {
    const at = from * worldSize + i;
    layoutRange[i] = (BigInt(placement.begin[at]!) << 32n) | BigInt(placement.count[at]!);
    recvCount[Math.floor(i / worldSize)]! += placement.count[at]!;
  }
  return {
    rank,
    localExperts: to - from,
    recvRows,
    blockStart: placement.blockStart.subarray(from, to),
    blockRows: placement.rows.subarray(from, to),
    recvCount,
    layoutRange,
    sourceRank,
    sourceToken,
    sourceChoice,
  };
}

/** HAZARD: what a plan says here is allocated, and a wrong number would be a wrong length, or gigabytes; its blocks are what it must come to. */
function recvRowsOf({ map, form, placement }: MoePlan, rank: number, from: number, to: number): number {
  let expected = 0;
  for (let p = from; p < to; p++) expected += blockRows(form, map.worldSize, placement.rows[p]!);
  const found = placement.recvRows[rank]!;
  if (found === expected) return found;
  throw invalidArgument(
    `plan.placement.recvRows[${rank}] must be ${expected}, the rows of its blocks, found ${found}`,
    {
      name: 'plan.placement.recvRows',
      index: rank,
      expected,
      found,
    },
  );
}

/** A choice that would be read, or written, outside of every receive tensor. */
export function nowhere({ replica, row }: MoePlan, choice: number): PlanError {
  return invalidArgument(
    `plan.row[${choice}] must lie in the receive tensor of a rank, both it and the sender taking part, found row ${row[choice]} of replica ${replica[choice]}`,
    { name: 'plan.row', index: choice, replica: replica[choice], found: row[choice] },
  );
}
