/** Where the ranks of a world meet, and how they part. */
import {
  checkInteger,
  EpError,
  invalid,
  type LaunchEnv,
  MOST_WORLD_SIZE,
  type OpenRendezvousOptions,
  openRendezvous,
  parseRendezvousUrl,
  type Rank,
  rendezvous,
  type Store,
  TcpStore,
} from '@ep/core';
import { type GroupTransport, isEmptyPlace, isTransport } from './backends.js';
import type { InitOptions } from './options.js';

const WHERE = 'initProcessGroup';
/** That a group in shared memory may have, and grow to: as in native/core/collective/layout.hpp. One over a transport has at most its places. */
export const MOST_RANKS = 128;
/** How long ranks wait for each other when they leave a store that one of them holds. */
const PARTING_MS = 5000;
/** Never set: who waits for it learns when the store is gone. */
const NEVER = 'ep/never';

export interface Place {
  readonly store: Store;
  readonly rank: Rank;
  readonly worldSize: number;
  /** How often the launcher has started the ranks again: its store keeps what earlier attempts wrote. */
  readonly attempt: number;
  /** Parts from the ranks that still take part. */
  readonly leave: (active: readonly Rank[]) => Promise<void>;
  /** Leaves ranks behind with which there is no group. */
  readonly abandon: () => Promise<void>;
}

const nothing = async (): Promise<void> => {};

/** HAZARD: before anything is made for each rank, or a size that is nonsense ends the process for want of memory. */
const checkSize = (worldSize: unknown, transport: GroupTransport | undefined): number =>
  checkInteger(worldSize, 'worldSize', WHERE, 1, transport === undefined ? MOST_RANKS : MOST_WORLD_SIZE);

function givenPlace(store: Store, options: InitOptions, transport: GroupTransport | undefined): Place {
  if (options.initMethod !== undefined) {
    throw invalid('initMethod', { where: WHERE, expected: 'absent where there is a store', found: options.initMethod });
  }
  for (const method of ['get', 'set', 'add', 'compareSet', 'check'] as const) {
    if (typeof (store as Partial<Store> | null)?.[method] === 'function') continue;
    throw invalid('store', { where: WHERE, expected: `a store, with a function ${method}()`, found: store });
  }
  const worldSize = checkSize(options.worldSize ?? transport?.worldSize, transport);
  const largest =
    options.isExtension === true ? Math.max(worldSize, options.maxGroupSize ?? MOST_RANKS) - 1 : worldSize - 1;
  const rank = checkInteger(options.rank ?? transport?.rank, 'rank', WHERE, 0, largest);
  return { store, rank, worldSize, attempt: 0, leave: nothing, abandon: nothing };
}

/** A transport knows who this is: what the caller or a launcher says must be the same, but that a group that may grow begins with fewer ranks. */
function checkTransport(transport: GroupTransport, { rank, worldSize }: Place, grows: boolean): void {
  const isPart = grows && worldSize < transport.worldSize;
  for (const [what, found, expected] of [
    ['rank', rank, transport.rank],
    ['worldSize', worldSize, isPart ? worldSize : transport.worldSize],
  ] as const) {
    if (found === expected) continue;
    throw invalid(what, { where: WHERE, expected: `${expected}, as the transport ${transport.name} has it`, found });
  }
}

/** True for a store that ends with rank 0, which holds its server. */
const isHeldByRank0 = ({ store, storeOfLauncher }: LaunchEnv): boolean =>
  store.kind === 'tcp' && storeOfLauncher === undefined;

const meetings = new Map<string, number>();

/**
 * How often this rank has met the others in a store that outlives groups: a file, or the one that a launcher holds. What ranks left there at a meeting would
 * be in the way of the next, which therefore has a key of its own.
 */
function metBefore(place: LaunchEnv): number {
  if (isHeldByRank0(place)) return 0;
  const { store, rank, restarts } = place;
  const key = JSON.stringify([store, rank, restarts]);
  const before = meetings.get(key) ?? 0;
  meetings.set(key, before + 1);
  return before;
}

const leftKey = (rank: Rank): string => `ep/left/${rank}`;

/**
 * Closes a store that rank 0 holds. Rank 0 waits until the others need it no longer, and they wait until it is gone: whoever went ahead and met the
 * others anew would find the old server at the address.
 */
async function part(store: TcpStore, rank: Rank, active: readonly Rank[]): Promise<void> {
  const limits = { timeoutMs: PARTING_MS };
  try {
    if (rank === 0) {
      const left = active.filter((one) => one !== 0).map(leftKey);
      await Promise.race([store.wait(left, limits), store.othersLeft(limits)]);
    } else {
      await store.set(leftKey(rank), new Uint8Array(1));
      await store.get(NEVER, limits);
    }
  } catch {
    // The store is gone, or the others took too long: there is nothing more to wait for.
  }
  await store.close();
}

/** `elastic`: not all ranks come, or this one comes later: nobody is awaited. */
async function meetAt(
  url: string,
  meeting: OpenRendezvousOptions,
  elastic: boolean,
  transport: GroupTransport | undefined,
): Promise<Place> {
  const place = parseRendezvousUrl(url, meeting);
  checkSize(place.worldSize, transport);
  if (elastic) {
    if (isHeldByRank0(place)) {
      throw new EpError(
        'EP_UNSUPPORTED',
        `${WHERE}: ${url}: rank 0 holds this store and waits for all ranks; where ranks come and go, pass a store, a file:// or the store of a launcher`,
        { context: { url } },
      );
    }
    const { store, rank, worldSize } = await openRendezvous(url, { ...meeting, handshake: false });
    const close = (): Promise<void> => store.close();
    return { store, rank, worldSize, attempt: place.restarts ?? 0, leave: close, abandon: close };
  }
  const { restarts: attempt = 0 } = place;
  const before = metBefore(place);
  const opened = await openRendezvous(url, before > 0 ? { ...meeting, handshake: false } : meeting);
  const { store, rank, worldSize } = opened;
  const abandon = async (): Promise<void> => {
    if (store instanceof TcpStore) await store.othersLeft({ timeoutMs: PARTING_MS });
    await store.close();
  };
  const leave = (active: readonly Rank[]): Promise<void> =>
    store instanceof TcpStore && isHeldByRank0(place) ? part(store, rank, active) : store.close();
  if (before > 0) {
    try {
      const key = `ep/rendezvous/${attempt}/${before}`;
      await rendezvous(store, { rank, worldSize, facts: { agree: {} }, key }, meeting);
    } catch (error) {
      await store.close();
      throw error;
    }
  }
  return { store, rank, worldSize, attempt, leave, abandon };
}

/** Throws `EP_INVALID_ARGUMENT`, or `EP_RENDEZVOUS` naming ranks that did not come or exist twice. */
export async function meet(options: InitOptions, timeoutMs: number): Promise<Place> {
  const transport = isTransport(options.backend) ? options.backend : undefined;
  const { rank, worldSize, signal, env } = options;
  const hasEmptyPlaces =
    transport !== undefined &&
    Array.from({ length: transport.worldSize }, (_, member) => member).some((one) => isEmptyPlace(transport, one));
  const place =
    options.store === undefined
      ? await meetAt(
          options.initMethod ?? 'env://',
          {
            timeoutMs,
            ...(rank !== undefined && { rank }),
            ...(worldSize !== undefined && { worldSize }),
            ...(signal && { signal }),
            ...(env && { env }),
          },
          options.isExtension === true || options.activeRanks !== undefined || hasEmptyPlaces,
          transport,
        )
      : givenPlace(options.store, options, transport);
  try {
    if (transport !== undefined)
      checkTransport(transport, place, options.maxGroupSize !== undefined || options.isExtension === true);
    return place;
  } catch (error) {
    await place.abandon();
    throw error;
  }
}
