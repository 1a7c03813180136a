/** The contenders of one case take turns, so that what the machine does in a minute befalls all of them. */
import { type Contender, Unsupported } from './contender.js';
import { mostCallsInPlace } from './pattern.js';
import type { Target } from './protocol.js';
import { medianOf, slowest, type Turns } from './series.js';

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
const MOST_BATCHES = 2000;
/** Longer calls are estimated once, and need no turn to warm up. */
const LONG_NS = 30e6;

/** How often a contender calls in one turn. */
export interface Pace {
  readonly calls: number;
  readonly warm: number;
  readonly batches: number;
  /** Milliseconds that a turn takes, all told. */
  readonly turnMs: number;
}

/** From one call's nanoseconds, and from what a batch of one takes in all (barrier, poisoning, comparing). */
export function paceOf(callNs: number, batchMs: number, mostCalls: number, turnMs: number): Pace {
  const calls = Math.min(mostCalls, Math.max(1, Math.round(ROW_NS / callNs)));
  const each = Math.max(batchMs, (calls * callNs) / 1e6);
  const batches = Math.min(MOST_BATCHES, Math.max(1, Math.floor(turnMs / each)));
  const warm = Math.ceil(batches / 10);
  return { calls, warm, batches, turnMs: (warm + batches) * each };
}

async function estimate(
  { contender, target }: Player<string>,
  turnMs: number,
): Promise<Pace & { readonly long: boolean }> {
  const time = async (warm: number, batches: number) => {
    const begin = performance.now();
    const times = await contender.numbers({ verb: 'run', ...target, calls: 1, warm, batches });
    return { callNs: medianOf(slowest(times, 1)) * 1000, batchMs: (performance.now() - begin) / (warm + batches) };
  };
  let { callNs, batchMs } = await time(1, 1);
  const long = callNs > LONG_NS;
  // The first call touches memory for the first time and connects what is not connected yet.
  if (!long) ({ callNs, batchMs } = await time(0, 3));
  return { ...paceOf(callNs, batchMs, mostCallsInPlace(contender.ranks), turnMs), long };
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
    readonly long: boolean;
    readonly turns: number[][];
  }[] = [];
  for (const player of players) {
    try {
      const { long, ...pace } = await estimate(player, budget.turnMs);
      able.push({ player, pace, long, turns: [] });
    } catch (error) {
      if (!(error instanceof Unsupported)) throw error;
      unsupported.push(error.message);
    }
  }
  const together = able.reduce((sum, { pace }) => sum + pace.turnMs, 0);
  const turns = Math.min(budget.turns, Math.max(FEWEST_TURNS, Math.floor(budget.caseMs / together)));
  for (let turn = -1; turn < turns; turn++) {
    for (const { player, pace, long, turns: kept } of able) {
      if (turn < 0 && long) continue;
      const { calls, warm, batches } = pace;
      const times = await player.contender.numbers({ verb: 'run', ...player.target, calls, warm, batches });
      if (turn >= 0) kept.push([...slowest(times, calls)]);
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
