/** Changes of who takes part in a group: asked for by all members, carried out by its engine, at one place among the calls of all. */
import { EpError, formatRanks, invalid, isEpError, type Rank, type Work } from '@ep/core';
import type { Elastic, GroupEngine, LookLimits, MembershipEnd, PeerState } from './engine.js';
import type { CallLimits, Lane, RunInTurn } from './lane.js';

/** Throws `EP_UNSUPPORTED` where the members of the group are fixed. */
export function elasticOf(engine: GroupEngine, op: string): Elastic {
  if (engine.elastic !== undefined) return engine.elastic;
  throw new EpError(
    'EP_UNSUPPORTED',
    `${op}: the ranks of this group over ${engine.name} are fixed, because its memory was made for them; use a group without a device, or the backend shm`,
    {
      context: { backend: engine.name },
    },
  );
}

/** All ranks must ask for the same, in whatever order their callers name it. */
const ascending = (ranks: readonly Rank[]): readonly Rank[] => [...ranks].sort((a, b) => a - b);

const UNCHANGED = { evicted: [], admitted: [], size: 0, repairs: false } as const;

/**
 * HAZARD: a store that does not answer must not hold this rank in front of the call that all others make behind their looks, until these give up: the
 * look ends in good time, and the call goes on with what it has found.
 */
const lookLimits = ({ timeoutMs, signal }: CallLimits): LookLimits => ({ timeoutMs: timeoutMs / 4, signal });

/** What all members agree that the ranks are, after looking for new ones. */
export function survey<T>(
  lane: Lane,
  op: string,
  limits: CallLimits,
  read: (states: readonly PeerState[]) => T,
): Work<T> {
  const elastic = elasticOf(lane.engine, op);
  return lane.turn(op, 1, limits.signal, async (_run, change) => {
    await elastic.refresh(lookLimits(limits));
    return read((await change({ ...UNCHANGED, ...limits })).states);
  });
}

export function evict(lane: Lane, op: string, ranks: readonly Rank[], limits: CallLimits): Work {
  const { engine } = lane;
  elasticOf(engine, op);
  const { active } = engine.view();
  if (active.includes(engine.rank) && active.every((rank) => ranks.includes(rank))) {
    throw invalid('ranks', {
      where: op,
      expected: 'not all that take part: nobody could take any of them in',
      found: `${ranks}`,
    });
  }
  return lane.turn(op, 1, limits.signal, async (_run, change) => {
    try {
      await change({ ...UNCHANGED, evicted: ascending(ranks), repairs: true, ...limits });
    } catch (error) {
      // That was the purpose.
      if (isEpError(error) && error.code === 'EP_EVICTED' && ranks.includes(engine.rank)) return;
      throw error;
    }
  });
}

export function grow(lane: Lane, op: string, size: number, limits: CallLimits): Work {
  elasticOf(lane.engine, op);
  return lane.turn(op, 1, limits.signal, async (_run, change) => {
    await change({ ...UNCHANGED, size, ...limits });
  });
}

/** What members know that one who joins has to know: the groups that were made. It is one call of all of them, again where one is lost in it. */
export async function shareMade(run: RunInTurn, made: number, limits: CallLimits): Promise<number> {
  const most = Int32Array.of(made);
  for (;;) {
    const call = { kind: 'all-reduce', sequence: 0, dtype: 'i32', reduceOp: 'max', root: -1 } as const;
    try {
      await run({ call: { ...call, inputs: [most], outputs: [most], ...limits }, elements: 1 });
      return most[0]!;
    } catch (error) {
      if (!isEpError(error) || error.code !== 'EP_PEER_LOST') throw error;
      most[0] = made;
    }
  }
}

function refuse(op: string, ranks: readonly Rank[], { states }: MembershipEnd): never {
  const missing = ranks.filter((rank) => states[rank] !== 'joining' && states[rank] !== 'active');
  const shown = missing.map((rank) => `${formatRanks([rank])} is ${states[rank]}`).join(', ');
  throw new EpError('EP_NOT_READY', `${op}: ${shown}; a rank is taken in while it waits in joinGroup()`, {
    context: { ranks: missing, states: missing.map((rank) => states[rank]) },
  });
}

/** `made`: groups that this rank has seen being made. Resolves with that of all. */
export function admit(
  lane: Lane,
  op: string,
  ranks: readonly Rank[],
  made: () => number,
  limits: CallLimits,
): Work<number> {
  const elastic = elasticOf(lane.engine, op);
  // As many calls as can be lost with a rank each.
  return lane.turn(op, 2 + elastic.capacity, limits.signal, async (run, change) => {
    await elastic.refresh(lookLimits(limits));
    const end = await change({ ...UNCHANGED, admitted: ascending(ranks), ...limits });
    if (!end.admitted) refuse(op, ranks, end);
    return ranks.length === 0 ? made() : await shareMade(run, made(), limits);
  });
}
