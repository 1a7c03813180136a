/** The contenders of one case take turns, so that what the machine does in a minute befalls all of them. */
import { type Contender, Unsupported } from './contender.js';
import { KIB } from './goals.js';
import { mostCallsInPlace } from './pattern.js';
import { BYTES_OF, type Target } from './protocol.js';
import { slowest, type Turns } from './series.js';

export interface Player<Name extends string> {
  readonly name: Name;
  readonly contender: Contender;
  readonly target: Target;
}

export interface Budget {
  /** Most turns of each contender. */
  readonly turns: number;
  /** What a turn of one contender may take: many calls of a short one, one of a long one. */
  readonly turnMs: number;
  /** What a case may take: fewer turns of one that takes long, but at least `FEWEST_TURNS`. */
  readonly caseMs: number;
}

const FEWEST_TURNS = 3;
/** Calls in a row last as long as this, so that the clock's own time is not in the figure. */
const ROW_NS = 20_000;
/** No call that seems longer is timed in rows. */
const SINGLE_NS = 500_000;
const FIRST_ROW = 8;
const TRIES = 12;
const HEAT_ROW = 100;
const HEAT_TURNS = 2;
/** V8 takes some 20 000 calls to compile what they run, and where ranks outnumber cores two turns are a tenth of that. */
const HEAT_CALLS = 30_000;
const MOST_HEAT_TURNS = 75;
const MOST_CALLS = 500;
const MOST_BATCHES = 2000;
/** Calls of so few bytes are warmed up however long the first ones seem: where ranks outnumber cores, V8 makes them as long as calls of many megabytes. */
const SMALL_BYTES = 256 * KIB;
/** Longer calls, if they are not small, are estimated once, and need nothing to warm up. */
const LONG_NS = 30e6;

/** How often a contender calls in one turn. */
export interface Pace {
  readonly calls: number;
  readonly warm: number;
  readonly batches: number;
  /** Milliseconds that a turn takes, all told. */
  readonly turnMs: number;
}

/** What is known of a contender's calls: nanoseconds of one, and milliseconds of a batch of `calls` in all (barrier, poisoning, comparing). */
export interface Estimate {
  readonly callNs: number;
  /** The same of the usual batch, where `callNs` is of the fastest. */
  readonly usualNs: number;
  readonly calls: number;
  readonly batchMs: number;
}

/** So many calls make a row that is long enough to be timed. */
export function rowOf(callNs: number, mostCalls: number): number {
  return Math.min(mostCalls, Math.max(1, Math.round(ROW_NS / callNs)));
}

/** Whether calls are timed in rows: they are short, or they seem long only by themselves. */
export function paysInRows(rowNs: number, singleNs: number, mostCalls: number): boolean {
  return rowOf(rowNs, mostCalls) > 1 || rowNs < singleNs / 2;
}

export function paceOf({ callNs, calls, batchMs }: Omit<Estimate, 'usualNs'>, turnMs: number): Pace {
  const batches = Math.min(MOST_BATCHES, Math.max(1, Math.floor(turnMs / batchMs)));
  const warm = callNs > LONG_NS ? 0 : Math.ceil(batches / 10);
  return { calls, warm, batches, turnMs: (warm + batches) * batchMs };
}

type Timing = (calls: number, warm: number, batches: number) => Promise<Estimate>;

const timingOf =
  ({ contender, target }: Player<string>): Timing =>
  async (calls, warm, batches) => {
    const begin = performance.now();
    const times = await contender.numbers({ verb: 'run', ...target, calls, warm, batches });
    const batchMs = (performance.now() - begin) / (warm + batches);
    const sorted = [...slowest(times, calls)].sort((a, b) => a - b);
    // The fastest: a stall of the machine must not make calls seem too long for rows.
    return { callNs: sorted[0]! * 1000, usualNs: sorted[sorted.length >> 1]! * 1000, calls, batchMs };
  };

/** Warms up, too: V8 compiles beside the calls, and thousands of them are over before its optimised code is there. */
async function estimate(player: Player<string>, turnMs: number): Promise<Estimate> {
  const { contender, target } = player;
  const mostCalls = target.op === 'all-reduce' ? mostCallsInPlace(contender.ranks) : MOST_CALLS;
  const time = timingOf(player);
  const small = target.elements * BYTES_OF[target.dtype] <= SMALL_BYTES;
  // The first call touches memory for the first time and connects what is not connected yet.
  let found = await time(1, 1, 1);
  if (!small && found.callNs > LONG_NS) return found;
  // The first few seem long, too.
  found = await time(1, 0, TRIES);
  if (!small && found.callNs > SINGLE_NS) return found;
  const heat = Math.min(mostCalls, HEAT_ROW, Math.max(1, Math.floor((turnMs * 1e6) / found.callNs / 4)));
  const begin = performance.now();
  for (let calls = 0, turns = 0; turns < HEAT_TURNS || (calls < HEAT_CALLS && turns < MOST_HEAT_TURNS); ) {
    await time(heat, 0, 10);
    calls += 10 * heat;
    turns = (performance.now() - begin) / turnMs;
  }
  // One call by itself seems long: the ranks do not leave the barrier at the same moment, least of all where they outnumber the cores.
  const single = await time(1, 0, TRIES);
  found = single;
  for (let row = Math.min(FIRST_ROW, mostCalls); row > found.calls; row = rowOf(found.callNs, mostCalls)) {
    found = await time(row, 0, TRIES);
  }
  return paysInRows(found.usualNs, single.usualNs, mostCalls) ? found : single;
}

export interface Race<Name extends string> {
  /** Microseconds of a call. */
  readonly times: ReadonlyMap<Name, { readonly turns: Turns; readonly calls: number }>;
  /** Who has no such operation, in whose words. */
  readonly unsupported: readonly string[];
}

const BARRIER_ROUNDS = 32;

/** Times and checks all of them. Throws when a result is wrong. */
export async function race<Name extends string>(players: readonly Player<Name>[], budget: Budget): Promise<Race<Name>> {
  const unsupported: string[] = [];
  const able: {
    readonly player: Player<Name>;
    readonly pace: Pace;
    readonly turns: (readonly number[])[];
  }[] = [];
  const estimates: (readonly [Player<Name>, Estimate])[] = [];
  for (const player of players) {
    try {
      estimates.push([player, await estimate(player, budget.turnMs)]);
    } catch (error) {
      if (!(error instanceof Unsupported)) throw error;
      unsupported.push(error.message);
    }
  }
  // Rows of the same length for all: what the first call of a row takes, because ranks do not leave the barrier together, falls on as many calls.
  const calls = Math.max(...estimates.map(([, found]) => found.calls));
  for (const [player, found] of estimates) {
    const alike = found.calls === calls ? found : await timingOf(player)(calls, 1, TRIES);
    able.push({ player, pace: paceOf(alike, budget.turnMs), turns: [] });
  }
  const together = able.reduce((sum, { pace }) => sum + pace.turnMs, 0);
  const turns = Math.min(budget.turns, Math.max(FEWEST_TURNS, Math.floor(budget.caseMs / together)));
  for (let turn = 0; turn < turns; turn++) {
    // There and back: nobody comes always after the same one.
    for (const { player, pace, turns: kept } of turn % 2 === 0 ? able : able.toReversed()) {
      const { calls, warm, batches } = pace;
      const times = await player.contender.numbers({ verb: 'run', ...player.target, calls, warm, batches });
      kept.push(slowest(times, calls));
    }
  }
  for (const { player } of able) {
    const { op, elements } = player.target;
    await player.contender.check({ ...player.target, elements: op === 'barrier' ? BARRIER_ROUNDS : elements });
  }
  return {
    times: new Map(able.map(({ player, pace, turns: kept }) => [player.name, { turns: kept, calls: pace.calls }])),
    unsupported,
  };
}
