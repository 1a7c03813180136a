import { checkInteger, checkNumbers, checkObject, checkRows } from '../check.js';
import { maxOverAverage } from '../cost.js';
import { invalidArgument, PlanError } from '../error.js';
import { checkMap, type ExpertMap, mapExperts, maxExperts, maxWorldSize, spreadExperts } from './experts.js';
import { type Pool, packReplicas } from './pack-replicas.js';
import { integersOfRanks } from './ranks.js';

export interface BalanceExpertsOptions {
  readonly worldSize: number;
  /** Experts that a rank has room for, of every rank or of each. By default just enough for one replica of each expert. */
  readonly places?: number | ArrayLike<number>;
  /**
   * Experts in equal groups, in order, each of which stays on one node (rank r is on node floor(r / ranksPerNode)): with group-limited
   * top-k a token then reaches at most `topGroups` nodes. Give both, or neither.
   */
  readonly groups?: number;
  readonly ranksPerNode?: number;
}

export interface BalancedExperts {
  readonly map: ExpertMap;
  /** Replicas of each expert. */
  readonly copies: Int32Array;
  /** Load of each rank: `load[e] / copies[e]`, summed over its experts. */
  readonly rankLoad: Float64Array;
  /** Largest rank over the average, with `spreadExperts` and with the new map. */
  readonly imbalanceBefore: number;
  readonly imbalanceAfter: number;
}

/**
 * Replicates and places experts by load, as EPLB does: the expert with the most load per replica gets the next free place, until none is left;
 * then replicas go to the least loaded rank with room, heaviest first. On top of that, replicas of one expert lie on different ranks, ranks may
 * differ in room, and exchanges between ranks go on while they lower the most loaded one. An expert without load gets no second replica.
 * Deterministic. Throws EP_CAPACITY where the experts, or the groups of a node, do not fit.
 */
export function balanceExperts(load: ArrayLike<number>, options: BalanceExpertsOptions): BalancedExperts {
  checkObject(options, 'options');
  const worldSize = checkInteger(options.worldSize, 'worldSize', 1, maxWorldSize);
  checkObject(load, 'load');
  const experts = checkInteger(load.length, 'load.length', 1, maxExperts);
  const loads = checkLoads(load, experts);
  const places = integersOfRanks(options.places ?? Math.ceil(experts / worldSize), 'places', worldSize, maxExperts);
  const mostReplicas = places.reduce((sum, n) => sum + Math.min(n, experts), 0);
  checkRows(mostReplicas, 'the list of replicas, with places for all of them,', { worldSize, experts });
  const hosted: Int32Array[] = new Array<Int32Array>(worldSize);
  for (const pool of poolsOf(options, experts, places, loads)) {
    packReplicas(pool, loads).forEach((mine, i) => {
      hosted[pool.ranks[i]!] = mine;
    });
  }
  const rankOffsets = new Int32Array(worldSize + 1);
  hosted.forEach((mine, r) => {
    rankOffsets[r + 1] = rankOffsets[r]! + mine.length;
  });
  const expert = new Int32Array(rankOffsets[worldSize]!);
  hosted.forEach((mine, r) => {
    expert.set(mine, rankOffsets[r]!);
  });
  const map = mapExperts({ worldSize, experts, rankOffsets, expert });
  const rankLoad = loadOfRanks(map, loads);
  return Object.freeze({
    map,
    copies: Int32Array.from({ length: experts }, (_, e) => map.expertOffsets[e + 1]! - map.expertOffsets[e]!),
    rankLoad,
    imbalanceBefore: maxOverAverage(loadOfRanks(spreadExperts(experts, worldSize), loads)),
    imbalanceAfter: maxOverAverage(rankLoad),
  });
}

/** Load of each rank when the load of an expert is shared evenly by its replicas. */
export function loadOfRanks(map: ExpertMap, load: ArrayLike<number>): Float64Array {
  checkMap(map);
  checkLoads(load, map.experts);
  const ranks = new Float64Array(map.worldSize);
  for (let p = 0; p < map.expert.length; p++) {
    const e = map.expert[p]!;
    ranks[map.rank[p]!]! += load[e]! / (map.expertOffsets[e + 1]! - map.expertOffsets[e]!);
  }
  return ranks;
}

/** What is balanced by itself: all ranks, or the ranks of each node with the groups that it gets. */
function poolsOf(
  { groups, ranksPerNode, worldSize }: BalanceExpertsOptions,
  experts: number,
  places: Int32Array,
  load: Float64Array,
): Pool[] {
  if ((groups === undefined) !== (ranksPerNode === undefined)) {
    throw invalidArgument('groups and ranksPerNode belong together: give both, or neither', { groups, ranksPerNode });
  }
  const all = { ranks: indices(worldSize), places, experts: indices(experts) };
  if (groups === undefined || ranksPerNode === undefined) {
    const room = places.reduce((sum, n) => sum + n, 0);
    if (room < experts) {
      throw new PlanError('EP_CAPACITY', `${experts} experts need as many places, all ranks together have ${room}`, {
        needed: experts,
        available: room,
      });
    }
    return [all];
  }
  checkInteger(groups, 'groups', 1, experts);
  checkInteger(ranksPerNode, 'ranksPerNode', 1, worldSize);
  if (experts % groups !== 0) {
    throw invalidArgument(`groups must divide experts = ${experts}, found ${groups}`, {
      name: 'groups',
      found: groups,
    });
  }
  const size = experts / groups;
  const nodes = Array.from({ length: Math.ceil(worldSize / ranksPerNode) }, (_, n) => {
    const ranks = all.ranks.filter((r) => Math.floor(r / ranksPerNode) === n);
    return { ranks, places: Int32Array.from(ranks, (r) => places[r]!), groups: [] as number[], load: 0 };
  });
  const groupLoad = new Float64Array(groups);
  for (let e = 0; e < experts; e++) groupLoad[Math.floor(e / size)]! += load[e]!;
  const room = nodes.map((node) => Math.floor(node.places.reduce((sum, n) => sum + n, 0) / size));
  const roomForAll = room.reduce((sum, n) => sum + n, 0);
  if (roomForAll < groups) {
    throw new PlanError(
      'EP_CAPACITY',
      `${groups} groups of ${size} experts do not fit: the ${nodes.length} nodes have room for ${roomForAll} whole groups; raise places`,
      { groups, size, available: roomForAll },
    );
  }
  // Every node takes as many groups as any other where room allows, so that none has to replicate its experts without end.
  const quota = Math.ceil(groups / nodes.length);
  for (const g of indices(groups).sort((a, b) => groupLoad[b]! - groupLoad[a]! || a - b)) {
    const withRoom = nodes.filter((node, n) => node.groups.length < room[n]!);
    const within = withRoom.filter((node) => node.groups.length < quota);
    const node = (within.length > 0 ? within : withRoom).reduce((least, other) =>
      other.load < least.load ? other : least,
    );
    node.groups.push(g);
    node.load += groupLoad[g]!;
  }
  return nodes.map((node) => ({
    ranks: node.ranks,
    places: node.places,
    experts: Int32Array.from(
      node.groups.sort((a, b) => a - b).flatMap((g) => Array.from({ length: size }, (_, i) => g * size + i)),
    ),
  }));
}

function indices(length: number): Int32Array {
  return Int32Array.from({ length }, (_, i) => i);
}

function checkLoads(load: ArrayLike<number>, experts: number): Float64Array {
  const loads = Float64Array.from(checkNumbers(load, 'load', experts));
  loads.forEach((found, expert) => {
    if (found >= 0 && found < Number.POSITIVE_INFINITY) return;
    throw invalidArgument(`load[${expert}] must be a finite number of at least 0, found ${found}`, {
      name: 'load',
      expert,
      found,
    });
  });
  return loads;
}
