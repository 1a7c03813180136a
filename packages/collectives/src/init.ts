/** Opening the first group. */
import {
  checkInteger,
  checkTimeout,
  defaultTimeoutMs,
  EpError,
  invalid,
  type Store,
  type StoreWaitOptions,
} from '@ep/core';
import { type ElasticInit, engineFactory, isTransport } from './backends.js';
import { meet } from './meeting.js';
import { checkMembers } from './members.js';
import type { InitOptions } from './options.js';
import { openGroup, type ProcessGroup } from './process-group.js';
import { FlightRecorder } from './recorder/recorder.js';

const WHERE = 'initProcessGroup';

const MOST_RANKS = 128;

/** Throws unless what the options say of ranks that come later makes sense, and can be. */
function elasticOf(options: InitOptions, rank: number, worldSize: number): ElasticInit {
  const { activeRanks, isExtension: joins = false, maxGroupSize, onTimeout = 'poison' } = options;
  if (onTimeout !== 'poison' && onTimeout !== 'evict') {
    throw invalid('onTimeout', { where: WHERE, expected: "'poison' or 'evict'", found: onTimeout });
  }
  const capacity =
    maxGroupSize === undefined
      ? Math.max(worldSize, joins ? rank + 1 : 0)
      : checkInteger(maxGroupSize, 'maxGroupSize', WHERE, worldSize, Math.max(worldSize, MOST_RANKS));
  const all = Array.from({ length: worldSize }, (_, member) => member);
  if (activeRanks !== undefined) checkMembers(activeRanks, WHERE, worldSize);
  const active = [...(activeRanks ?? all)].sort((a, b) => a - b);
  if (!joins && !active.includes(rank)) {
    throw invalid('activeRanks', {
      where: WHERE,
      expected: `rank ${rank} among them, or isExtension`,
      found: activeRanks,
    });
  }
  return { capacity, active, joins, evicts: onTimeout === 'evict' };
}

function checkFixed(options: InitOptions): void {
  for (const name of ['activeRanks', 'isExtension', 'maxGroupSize', 'onTimeout'] as const) {
    if (options[name] === undefined) continue;
    throw new EpError('EP_UNSUPPORTED', `${WHERE}: ${name}: the ranks of a transport are fixed; use the backend shm`, {
      context: { option: name },
    });
  }
}

/**
 * How many groups of the name this rank has opened. A group opened under the name of one that was destroyed must not find what that one left in the store;
 * a rank that joins one must find it.
 */
async function lifeOf(
  store: Store,
  key: string,
  rank: number,
  joins: boolean,
  limits: StoreWaitOptions,
): Promise<number> {
  if (!joins) {
    const life = await store.add(`${key}/${rank}`, 1);
    await store.set(`${key}/life`, new TextEncoder().encode(String(life)));
    return life;
  }
  const life = Number(new TextDecoder().decode(await store.get(`${key}/life`, limits)));
  const own = await store.add(`${key}/${rank}`, 0);
  if (own < life) await store.add(`${key}/${rank}`, life - own);
  return life;
}

/**
 * Collective. Opens the group of all ranks; `env://` unless told where they meet, see `InitOptions`. With a `store` it does not wait for the others: each
 * is awaited by what needs it. Throws `EP_INVALID_ARGUMENT`, or `EP_RENDEZVOUS` naming ranks that did not come to `initMethod` or exist twice.
 */
export async function initProcessGroup(options: InitOptions = {}): Promise<ProcessGroup> {
  const factory = engineFactory(options.backend ?? 'shm');
  const timeoutMs =
    options.timeoutMs === undefined ? defaultTimeoutMs(options.env) : checkTimeout(options.timeoutMs, WHERE);
  const { name = 'world', ranksOnHost, signal } = options;
  if (typeof name !== 'string' || name === '') {
    throw invalid('name', { where: WHERE, expected: 'a string that is not empty', found: name });
  }
  if (ranksOnHost !== undefined) checkInteger(ranksOnHost, 'ranksOnHost', WHERE, 1);
  signal?.throwIfAborted();
  if (isTransport(options.backend)) checkFixed(options);
  const { store, rank, worldSize, attempt, leave, abandon } = await meet(options, timeoutMs);
  try {
    const elastic = elasticOf(options, rank, worldSize);
    const life = await lifeOf(store, `ep/groups/${attempt}/${name}`, rank, elastic.joins, {
      ...(Number.isFinite(timeoutMs) && { timeoutMs }),
      ...(signal && { signal }),
    });
    const id = `${name}${attempt === 0 ? '' : `@${attempt}`}${life === 1 ? '' : `#${life}`}`;
    const recorder = new FlightRecorder({ world: id, rank, size: worldSize });
    const world = {
      factory,
      store,
      recorder,
      evicts: elastic.evicts,
      ...(ranksOnHost !== undefined && { ranksOnHost }),
    };
    const ranks = Array.from({ length: worldSize }, (_, member) => member);
    return await openGroup(world, { name, id, rank, ranks, timeoutMs, signal, elastic, release: leave });
  } catch (error) {
    await abandon();
    throw error;
  }
}
