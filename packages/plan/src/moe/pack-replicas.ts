/** Ranks with room for some experts, and the experts that must find a place there. The places suffice for one replica of each. */
export interface Pool {
  readonly ranks: Int32Array;
  /** Parallel to `ranks`. */
  readonly places: Int32Array;
  readonly experts: Int32Array;
}

/** Exchanges looked for at most; each lowers the most loaded rank. */
const mostExchanges = 1000;

/** Experts of each rank of the pool, ascending. No rank holds one twice; every expert is somewhere. */
export function packReplicas(pool: Pool, load: Float64Array): Int32Array[] {
  const copies = replicate(pool, load);
  for (;;) {
    const packing = pack(pool, load, copies);
    if (packing.stuck === undefined) {
      exchange(packing);
      return packing.hosted.map((held) => Int32Array.from(held).sort());
    }
    // No rank with room, nor any that could make some, lacks this expert: ranks of very different size can do that. One replica less fits.
    copies.set(packing.stuck, copies.get(packing.stuck)! - 1);
  }
}

/** Replicas of each expert: one, then the next free place always to the expert with most load per replica, at most one a rank. */
function replicate({ places, experts }: Pool, load: Float64Array): Map<number, number> {
  const copies = new Map<number, number>(Array.from(experts, (e) => [e, 1]));
  const hosts = places.filter((n) => n > 0).length;
  let free = places.reduce((sum, n) => sum + Math.min(n, experts.length), 0) - experts.length;
  for (; free > 0; free--) {
    let heaviest = -1;
    let most = 0;
    for (const e of experts) {
      const each = load[e]! / copies.get(e)!;
      if (each > most && copies.get(e)! < hosts) {
        most = each;
        heaviest = e;
      }
    }
    if (heaviest < 0) break;
    copies.set(heaviest, copies.get(heaviest)! + 1);
  }
  return copies;
}

interface Packing {
  readonly hosted: Set<number>[];
  readonly rankLoad: Float64Array;
  readonly places: Int32Array;
  /** Load of one replica. */
  readonly each: (expert: number) => number;
  /** An expert for one of whose replicas no rank was found. */
  readonly stuck?: number;
}

/** Heaviest first, each to the least loaded rank that has room and does not hold the expert yet. */
function pack({ places, experts }: Pool, load: Float64Array, copies: ReadonlyMap<number, number>): Packing {
  const each = (e: number) => load[e]! / copies.get(e)!;
  const packing = {
    hosted: Array.from(places, () => new Set<number>()),
    rankLoad: new Float64Array(places.length),
    places,
    each,
  };
  const replicas = Array.from(experts)
    .flatMap((e) => new Array<number>(copies.get(e)!).fill(e))
    .sort((a, b) => each(b) - each(a) || a - b);
  for (const e of replicas) {
    const to = leastLoaded(packing, (i) => hasRoom(packing, i) && !packing.hosted[i]!.has(e));
    if (to >= 0) move(packing, e, -1, to);
    else if (!makeRoom(packing, e)) return { ...packing, stuck: e };
  }
  return packing;
}

/** Every rank with room holds the expert already: another rank hands one of its own to such a rank and takes it. */
function makeRoom(packing: Packing, expert: number): boolean {
  const { hosted } = packing;
  for (let room = 0; room < hosted.length; room++) {
    if (!hasRoom(packing, room)) continue;
    for (let from = 0; from < hosted.length; from++) {
      if (hosted[from]!.has(expert)) continue;
      for (const other of hosted[from]!) {
        if (hosted[room]!.has(other)) continue;
        move(packing, other, from, room);
        move(packing, expert, -1, from);
        return true;
      }
    }
  }
  return false;
}

/** Replicas of the most loaded rank change places with lighter ones elsewhere, or with none, while that lowers the higher of both. */
function exchange(packing: Packing): void {
  const { hosted, rankLoad, each } = packing;
  for (let round = 0; round < mostExchanges; round++) {
    const from = rankLoad.indexOf(rankLoad.reduce((most, x) => Math.max(most, x), 0));
    let best: { readonly to: number; readonly mine: number; readonly theirs: number | undefined } | undefined;
    let lowest = rankLoad[from]!;
    for (let to = 0; to < hosted.length; to++) {
      if (to === from) continue;
      const offers: (number | undefined)[] = [...hosted[to]!];
      if (hasRoom(packing, to)) offers.push(undefined);
      for (const mine of hosted[from]!) {
        if (hosted[to]!.has(mine)) continue;
        for (const theirs of offers) {
          if (theirs !== undefined && hosted[from]!.has(theirs)) continue;
          const gain = each(mine) - (theirs === undefined ? 0 : each(theirs));
          const higher = Math.max(rankLoad[from]! - gain, rankLoad[to]! + gain);
          // Beyond rounding, or two ranks could exchange the same pair for ever.
          if (higher < lowest * (1 - 1e-12)) {
            lowest = higher;
            best = { to, mine, theirs };
          }
        }
      }
    }
    if (best === undefined) return;
    move(packing, best.mine, from, best.to);
    if (best.theirs !== undefined) move(packing, best.theirs, best.to, from);
  }
}

function move({ hosted, rankLoad, each }: Packing, expert: number, from: number, to: number): void {
  if (from >= 0) {
    hosted[from]!.delete(expert);
    rankLoad[from]! -= each(expert);
  }
  hosted[to]!.add(expert);
  rankLoad[to]! += each(expert);
}

function hasRoom({ hosted, places }: Packing, i: number): boolean {
  return hosted[i]!.size < places[i]!;
}

function leastLoaded({ rankLoad }: Packing, allowed: (i: number) => boolean): number {
  let least = -1;
  for (let i = 0; i < rankLoad.length; i++) {
    if (allowed(i) && (least < 0 || rankLoad[i]! < rankLoad[least]!)) least = i;
  }
  return least;
}
