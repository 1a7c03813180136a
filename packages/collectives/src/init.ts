/** Opening the first group. */
import { setTimeout as delay } from 'node:timers/promises';
import { checkInteger, checkTimeout, defaultTimeoutMs, EpError, formatRanks, invalid, type Store } from '@ep/core';
import { type ElasticInit, engineFactory, type GroupTransport, isEmptyPlace, isTransport } from './backends.js';
import { checkOptions } from './checks.js';
import { MOST_RANKS, meet } from './meeting.js';
import { checkMembers } from './members.js';
import type { InitOptions } from './options.js';
import { openGroup, type ProcessGroup } from './process-group.js';
import { FlightRecorder } from './recorder/recorder.js';

const WHERE = 'initProcessGroup';

/** Throws unless what the options say of ranks that come later makes sense, and can be. */
function elasticInit(options: InitOptions, rank: number, worldSize: number): ElasticInit {
  const { backend } = options;
  const { activeRanks, isExtension: joins = false, maxGroupSize, onTimeout = 'poison' } = options;
  if (onTimeout !== 'poison' && onTimeout !== 'evict') {
    throw invalid('onTimeout', { where: WHERE, expected: "'poison' or 'evict'", found: onTimeout });
  }
  const capacity =
    maxGroupSize === undefined
      ? Math.max(worldSize, joins ? rank + 1 : 0)
      : checkInteger(maxGroupSize, 'maxGroupSize', WHERE, worldSize, Math.max(worldSize, MOST_RANKS));
  const all = Array.from({ length: worldSize }, (_, member) => member);
  const here = isTransport(backend) ? all.filter((member) => !isEmptyPlace(backend, member)) : all;
  if (activeRanks !== undefined) checkMembers(activeRanks, WHERE, worldSize);
  const active = [...(activeRanks ?? here)].sort((a, b) => a - b);
  const missing = active.filter((member) => member !== rank && !here.includes(member));
  if (!joins && missing.length > 0) {
    throw new EpError(
      'EP_NOT_READY',
      `${WHERE}: activeRanks: nobody is in the place of ${formatRanks(missing)} in the transport yet`,
      { context: { ranks: missing } },
    );
  }
  if (!joins && !active.includes(rank)) {
    throw invalid('activeRanks', {
      where: WHERE,
      expected: `rank ${rank} among them, or isExtension`,
      found: activeRanks,
    });
  }
  return { capacity, active, joins, evicts: onTimeout === 'evict' };
}

/** The places of a transport are fixed, and kernels on devices wait for all of its ranks. */
function checkPlaces(options: InitOptions, { worldSize }: GroupTransport): void {
  const { maxGroupSize } = options;
  if (typeof maxGroupSize === 'number' && maxGroupSize > worldSize) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `${WHERE}: maxGroupSize: a group over a transport has at most the transport's ${worldSize} places, because memory and endpoints are made for them; open it with more, of which some are empty at first (its activeRanks)`,
      { context: { option: 'maxGroupSize' } },
    );
  }
}

function checkDevice({ device, ...options }: InitOptions): void {
  if (device === undefined) return;
  for (const option of ['activeRanks', 'isExtension', 'onTimeout', 'maxGroupSize'] as const) {
    // All places of a transport are taken, whatever this says.
    const places = isTransport(options.backend) ? options.backend.worldSize : undefined;
    if (options[option] === undefined || (option === 'maxGroupSize' && options[option] === places)) continue;
    throw new EpError('EP_UNSUPPORTED', `${WHERE}: ${option}: the ranks of a group with a device are fixed`, {
      context: { option },
    });
  }
}

function checkHosts({ hosts, backend }: InitOptions): void {
  if (hosts === undefined || !isTransport(backend)) return;
  if (!Array.isArray(hosts) || hosts.length !== backend.worldSize) {
    throw invalid('hosts', { where: WHERE, expected: `a list of ${backend.worldSize} numbers`, found: hosts });
  }
  for (const [rank, host] of hosts.entries()) checkInteger(host, `hosts[${rank}]`, WHERE, 0);
}

const LOOK_MS = 10;

/** How many groups of the name each of `ranks` has opened: what most say, 0 if none has. */
async function livesOf(store: Store, key: string, ranks: readonly number[]): Promise<number> {
  const said = new Map<number, number>();
  for (const rank of ranks) {
    const life = await store.add(`${key}/${rank}`, 0);
    if (life > 0) said.set(life, (said.get(life) ?? 0) + 1);
  }
  return [...said].sort(([lifeA, a], [lifeB, b]) => b - a || lifeA - lifeB)[0]?.[0] ?? 0;
}

/**
 * Which of the groups of the name this rank opens. One that is opened anew must not find what one that was destroyed left in the store; a rank that joins one must
 * find it. HAZARD: it asks all, because a process that was started again, but not as an extension, has counted itself up, and is in a group of its own.
 */
async function lifeOf(
  store: Store,
  key: string,
  rank: number,
  { active, joins }: ElasticInit,
  limits: { readonly timeoutMs: number; readonly signal?: AbortSignal | undefined },
): Promise<number> {
  const own = `${key}/${rank}`;
  if (!joins) return await store.add(own, 1);
  const others = active.filter((one) => one !== rank);
  const until = performance.now() + limits.timeoutMs;
  for (;;) {
    const life = await livesOf(store, key, others);
    if (life > 0) {
      // As one that was there from the beginning: whatever they open next, it opens with them.
      await store.add(own, life - (await store.add(own, 0)));
      return life;
    }
    limits.signal?.throwIfAborted();
    if (performance.now() >= until) {
      throw new EpError(
        'EP_TIMEOUT',
        `${WHERE}: ${formatRanks(others)} did not open the group that this rank is to join`,
        {
          context: { awaited: others, timeoutMs: limits.timeoutMs },
        },
      );
    }
    await delay(LOOK_MS);
  }
}

/** What whoever opens a group first says of it. */
interface Opening {
  readonly rank: number;
  readonly worldSize: number;
  readonly capacity: number;
  readonly active: readonly number[];
  readonly evicts: boolean;
}

const onTimeoutOf = ({ evicts }: Pick<Opening, 'evicts'>): string => (evicts ? "'evict'" : "'poison'");

/**
 * Whoever opens the group first says of how many ranks it is and may become, who takes part, and what becomes of those that are late. A rank that joins it takes over what it was not told
 * otherwise. Throws `EP_INVALID_ARGUMENT` where ranks were told different things, of which memory, keys and agreements are made: such ranks would wait for each other in vain, or go on with
 * different members.
 */
async function agreeOnOpening(
  store: Store,
  key: string,
  mine: Opening,
  joins: boolean,
  { options, timeoutMs, signal }: { options: InitOptions; timeoutMs: number; signal?: AbortSignal | undefined },
): Promise<Pick<Opening, 'capacity' | 'evicts'>> {
  // HAZARD: one that joins only reads: it may be here before those who have opened the group have said it.
  const bytes = new Uint8Array(Buffer.from(JSON.stringify(mine)));
  const held = joins
    ? await store.get(key, { timeoutMs, ...(signal && { signal }) })
    : await store.compareSet(key, new Uint8Array(0), bytes);
  const others = JSON.parse(Buffer.from(held).toString()) as Opening;
  const knobs: readonly (readonly [what: string, counts: boolean, here: string, there: string])[] = [
    ['worldSize', !joins, `${mine.worldSize}`, `${others.worldSize}`],
    ['maxGroupSize', !joins || options.maxGroupSize !== undefined, `${mine.capacity}`, `${others.capacity}`],
    ['activeRanks', !joins, formatRanks(mine.active), formatRanks(others.active)],
    ['onTimeout', !joins || options.onTimeout !== undefined, onTimeoutOf(mine), onTimeoutOf(others)],
  ];
  for (const [what, counts, here, there] of knobs) {
    if (!counts || here === there) continue;
    const expected = `${there}, as rank ${others.rank} has it, which opened the group first`;
    throw new EpError('EP_INVALID_ARGUMENT', `${WHERE}: ${what} must be ${expected}; rank ${mine.rank} has ${here}`, {
      context: { where: WHERE, what, expected: there, found: here, ranks: [others.rank, mine.rank] },
    });
  }
  if (mine.rank >= others.capacity) {
    throw invalid('rank', {
      where: WHERE,
      expected: `less than ${others.capacity}, the maxGroupSize of the others`,
      found: mine.rank,
    });
  }
  return { capacity: others.capacity, evicts: others.evicts };
}

/**
 * Collective. Opens the group of all ranks; `env://` unless told where they meet, see `InitOptions`. With a `store` it does not wait for the others: each
 * is awaited by what needs it. Throws `EP_INVALID_ARGUMENT`, or `EP_RENDEZVOUS` naming ranks that did not come to `initMethod` or exist twice.
 */
export async function initProcessGroup(options: InitOptions = {}): Promise<ProcessGroup> {
  checkOptions(options, WHERE);
  checkHosts(options);
  const factory = engineFactory(options.backend ?? 'shm', options.device, options.hosts);
  const timeoutMs =
    options.timeoutMs === undefined ? defaultTimeoutMs(options.env) : checkTimeout(options.timeoutMs, WHERE);
  const { name = 'world', ranksOnHost, signal } = options;
  if (typeof name !== 'string' || name === '') {
    throw invalid('name', { where: WHERE, expected: 'a string that is not empty', found: name });
  }
  if (ranksOnHost !== undefined) checkInteger(ranksOnHost, 'ranksOnHost', WHERE, 1);
  signal?.throwIfAborted();
  if (isTransport(options.backend)) checkPlaces(options, options.backend);
  checkDevice(options);
  const { store, rank, worldSize, attempt, leave, abandon } = await meet(options, timeoutMs);
  try {
    const asked = elasticInit(options, rank, worldSize);
    const key = `ep/groups/${attempt}/${name}`;
    const life = await lifeOf(store, key, rank, asked, { timeoutMs, signal });
    const mine = { rank, worldSize, capacity: asked.capacity, active: asked.active, evicts: asked.evicts };
    let agreed: Pick<Opening, 'capacity' | 'evicts'>;
    try {
      const limits = { options, timeoutMs, signal };
      agreed = await agreeOnOpening(store, `${key}/opening/${life}`, mine, asked.joins, limits);
    } catch (error) {
      // It has opened nothing: when it tries again, it is to find the same group.
      if (!asked.joins) await store.add(`${key}/${rank}`, -1).catch(() => {});
      throw error;
    }
    const elastic = { ...asked, ...agreed };
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
