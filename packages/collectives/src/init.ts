/** Meeting the other ranks, and opening the first group. */
import {
  checkInteger,
  checkTimeout,
  defaultTimeoutMs,
  invalid,
  type LaunchEnv,
  type OpenRendezvousOptions,
  openRendezvous,
  parseRendezvousUrl,
  type Rank,
  rendezvous,
  type Store,
  TcpStore,
} from '@ep/core';
import { engineFactory, isTransport } from './backends.js';
import type { InitOptions } from './options.js';
import { openGroup, type ProcessGroup } from './process-group.js';
import { FlightRecorder } from './recorder/recorder.js';

const WHERE = 'initProcessGroup';
/** How long the rank that holds the store's server waits for the others to leave it. */
const LINGER_MS = 5000;

interface Place {
  readonly store: Store;
  readonly rank: Rank;
  readonly worldSize: number;
  /** How often the launcher has started the ranks again: its store keeps what earlier attempts wrote. */
  readonly attempt: number;
  readonly leave: () => Promise<void>;
}

function givenPlace(store: Store, options: InitOptions): Place {
  if (options.initMethod !== undefined) {
    throw invalid('initMethod', { where: WHERE, expected: 'absent where there is a store', found: options.initMethod });
  }
  const transport = isTransport(options.backend) ? options.backend : undefined;
  const worldSize = checkInteger(options.worldSize ?? transport?.worldSize, 'worldSize', WHERE, 1);
  const rank = checkInteger(options.rank ?? transport?.rank, 'rank', WHERE, 0, worldSize - 1);
  return { store, rank, worldSize, attempt: 0, leave: async () => {} };
}

/** A transport knows who this is: what the caller or a launcher says must be the same. */
function checkTransport({ backend }: InitOptions, { rank, worldSize }: Place): void {
  if (!isTransport(backend)) return;
  for (const [what, found, expected] of [
    ['rank', rank, backend.rank],
    ['worldSize', worldSize, backend.worldSize],
  ] as const) {
    if (found === expected) continue;
    throw invalid(what, { where: WHERE, expected: `${expected}, as the transport ${backend.name} has it`, found });
  }
}

const meetings = new Map<string, number>();

/**
 * How often this rank has met the others in a store that outlives groups: a file, or the one that a launcher holds. What ranks left there at a meeting would
 * be in the way of the next, which therefore has a key of its own.
 */
function metBefore({ store, storeOfLauncher, rank, restarts }: LaunchEnv): number {
  if (store.kind === 'tcp' && storeOfLauncher !== true) return 0;
  const key = JSON.stringify([store, rank, restarts]);
  const before = meetings.get(key) ?? 0;
  meetings.set(key, before + 1);
  return before;
}

async function meet(options: InitOptions, timeoutMs: number): Promise<Place> {
  if (options.store !== undefined) return givenPlace(options.store, options);
  const url = options.initMethod ?? 'env://';
  const { rank, worldSize, signal, env } = options;
  const meeting: OpenRendezvousOptions = {
    timeoutMs,
    ...(rank !== undefined && { rank }),
    ...(worldSize !== undefined && { worldSize }),
    ...(signal && { signal }),
    ...(env && { env }),
  };
  const place = parseRendezvousUrl(url, meeting);
  const { restarts: attempt = 0 } = place;
  const before = metBefore(place);
  const opened = await openRendezvous(url, before > 0 ? { ...meeting, handshake: false } : meeting);
  const { store } = opened;
  if (before > 0) {
    const key = `ep/rendezvous/${attempt}/${before}`;
    try {
      await rendezvous(store, { rank: opened.rank, worldSize: opened.worldSize, facts: { agree: {} }, key }, meeting);
    } catch (error) {
      await store.close();
      throw error;
    }
  }
  const leave = async (): Promise<void> => {
    if (store instanceof TcpStore) await store.othersLeft({ timeoutMs: LINGER_MS });
    await store.close();
  };
  return { store, rank: opened.rank, worldSize: opened.worldSize, attempt, leave };
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
  const place = await meet(options, timeoutMs);
  const { store, rank, worldSize, attempt, leave } = place;
  try {
    checkTransport(options, place);
    // A group opened under the name of one that was destroyed must not find what that one left in the store.
    const life = await store.add(`ep/groups/${attempt}/${name}/${rank}`, 1);
    const id = `${name}${attempt === 0 ? '' : `@${attempt}`}${life === 1 ? '' : `#${life}`}`;
    const recorder = new FlightRecorder({ world: id, rank, size: worldSize });
    const world = { factory, store, recorder, ...(ranksOnHost !== undefined && { ranksOnHost }) };
    const ranks = Array.from({ length: worldSize }, (_, member) => member);
    return await openGroup(world, { name, id, rank, ranks, timeoutMs, signal, release: leave });
  } catch (error) {
    await leave();
    throw error;
  }
}
