/**
 * The memory of all portable engines on one transport.
 *
 * Allocation on a transport is collective over its whole world, but a group is opened by its members only. So the first engine that is opened on a transport
 * allocates, on all ranks, one memory with `maxGroups` sections, and each group takes a section, whose number its rank 0 finds in the store (sections.ts).
 */
import { createHash } from 'node:crypto';
import { setTimeout } from 'node:timers/promises';
import {
  checkInteger,
  EpError,
  invalid,
  prefixStore,
  type RoundMaker,
  type Store,
  type Succession,
  type SymmetricMemory,
  type Transport,
  type WaitOptions,
} from '@ep/core';
import type { Portable } from './channel.js';
import type { Links } from './links.js';
import { WHERE } from './options.js';
import { type ArenaShape, Parts, shapeOfOthers } from './parts.js';
import { type Section, type SectionName, Sections } from './sections.js';

const DEFAULT_MAX_GROUPS = 16;
const SMALLEST_DEFAULT_BYTES = 2 ** 22;
/** Per rank of the world: leaves payload slots of 3 KiB. */
const DEFAULT_BYTES_PER_RANK = 2 ** 16;
const PAGE_BYTES = 4096;
/** Each death in a view that has one takes it for good. */
const MOST_SPARE_PLACES = 4;

export interface ArenaOptions {
  readonly transport: Transport<Portable>;
  readonly store: Store;
  readonly stagingBytes: number | undefined;
  readonly maxGroups: number | undefined;
  readonly timeoutMs: number;
  readonly signal: AbortSignal | undefined;
  /** The first group is one that the others have. */
  readonly joins: boolean;
}

const bytes = (text: string): Uint8Array => new Uint8Array(Buffer.from(text));

interface ArenaInit extends ArenaShape {
  readonly memory: SymmetricMemory;
  readonly store: Store;
  readonly worldSize: number;
  /** The others had it before this process was there. */
  readonly inherited: boolean;
  /** Over transports that let others in anew. */
  readonly parts: Parts | undefined;
  readonly rounds: RoundsMemory | undefined;
  readonly transport: Transport<Portable>;
  /** The ways by which `memory` was made. */
  readonly generation: string | undefined;
}

/** For the rounds of all groups, and for what carries their large calls: a place for each section, and more. */
interface RoundsMemory {
  readonly maker: RoundMaker;
  readonly memory: SymmetricMemory;
  /** Where the transport has carriers. */
  readonly carriers: SymmetricMemory | undefined;
  /** Places behind those of sections, for views of groups after their first. */
  readonly sparePlaces: number;
}

export class Arena {
  readonly memory: SymmetricMemory;
  readonly sectionBytes: number;
  readonly sections: Sections;
  readonly inherited: boolean;
  readonly parts: Parts | undefined;
  readonly rounds: RoundsMemory | undefined;
  /** Who has which spare place of `rounds`, where there are any; the first of them is behind all sections. */
  readonly spare: Sections | undefined;
  readonly #worldSize: number;
  readonly #store: Store;
  readonly #openings = new Map<string, number>();
  readonly #shape: ArenaShape;
  readonly #links = new Set<Links>();
  readonly #stopListening: (() => void) | undefined;
  #paused = false;
  /** Engines of this rank that use it. */
  users = 0;

  constructor(init: ArenaInit) {
    const { memory, store, worldSize, sections, sectionBytes, inherited, parts, rounds, transport, generation } = init;
    this.memory = memory;
    this.#store = store;
    this.#worldSize = worldSize;
    this.sections = new Sections({ transport, store, count: sections });
    this.sectionBytes = sectionBytes;
    this.inherited = inherited;
    this.parts = parts;
    this.rounds = rounds;
    const count = rounds?.sparePlaces ?? 0;
    if (count > 0) this.spare = new Sections({ transport, store: prefixStore(store, 'collectives/spare'), count });
    this.#shape = { sections, sectionBytes };
    const generations = transport.succession?.generations;
    this.#stopListening = generations?.onChange({
      pause: (limits) => this.#pause(limits),
      resume: () => void this.#resume(),
    });
    // They were made anew while it was allocated.
    if (generations?.current() !== generation && !this.#paused) this.parts?.resume();
  }

  /** Says where this rank's part is. */
  async publish(): Promise<void> {
    await this.parts?.publish(this.#shape);
  }

  /** The ways to all ranks are being made anew. */
  get paused(): boolean {
    return this.#paused;
  }

  /** They pause while that is so, from now on. Returns what ends that. */
  follow(links: Links): () => void {
    this.#links.add(links);
    return () => this.#links.delete(links);
  }

  /** Nobody uses it any more. */
  async close(): Promise<void> {
    this.#stopListening?.();
    await this.rounds?.memory.close();
    await this.rounds?.carriers?.close();
    await this.memory.close();
  }

  async #pause(limits: WaitOptions): Promise<void> {
    this.#paused = true;
    this.parts?.pause();
    await Promise.all([...this.#links].map((links) => links.pause(limits)));
  }

  async #resume(): Promise<void> {
    this.#paused = false;
    if (this.closed) return;
    try {
      this.parts?.resume();
      await this.publish();
      // They may be made anew once more by now.
      if (!this.#paused) for (const links of this.#links) links.resume();
    } catch (error) {
      for (const links of this.#links) links.fail(error);
    }
  }

  /** The sections are agreed on in this store: without it, nobody can take one. */
  get closed(): boolean {
    return this.#store.closed;
  }

  /** Keys of a group are used once: the same members under the same name again are another group, and all of them have opened it equally often. */
  keyOf(name: string, ranks: readonly number[]): string {
    const members = createHash('sha256').update(ranks.join()).digest('hex').slice(0, 16);
    const group = `${name}/${members}`;
    const opening = (this.#openings.get(group) ?? 0) + 1;
    this.#openings.set(group, opening);
    return `collectives/groups/${group}/${opening}`;
  }

  /** Where it is in the memory of `rounds`. */
  sparePlace({ index, token }: SectionName): SectionName {
    return { index: this.#shape.sections + index, token };
  }

  section({ index, token }: SectionName, members: number): Section {
    return { index, token, members, byteOffset: index * this.sectionBytes, firstSlot: index * this.#worldSize };
  }
}

/** Throws `EP_CAPACITY` where the transport has too few signal slots. */
function shapeFor({ transport, stagingBytes, maxGroups }: ArenaOptions): ArenaShape {
  const { worldSize, capabilities } = transport;
  const wanted = checkInteger(maxGroups ?? DEFAULT_MAX_GROUPS, 'maxGroups', WHERE, 1);
  // One word per source and group.
  const sections = Math.min(wanted, Math.floor(capabilities.maxSignalSlots / worldSize));
  if (sections === 0 || (maxGroups !== undefined && sections < maxGroups)) {
    throw new EpError(
      'EP_CAPACITY',
      `${WHERE}: ${wanted} groups of ${worldSize} ranks need ${wanted * worldSize} signal slots, ${transport.name} has ${capabilities.maxSignalSlots}; maxGroups may be at most ${sections}`,
      { context: { maxGroups: wanted, fits: sections } },
    );
  }
  const asked = stagingBytes ?? Math.max(SMALLEST_DEFAULT_BYTES, DEFAULT_BYTES_PER_RANK * worldSize);
  checkInteger(asked, 'stagingBytes', WHERE, 1);
  return { sections, sectionBytes: Math.ceil(asked / PAGE_BYTES) * PAGE_BYTES };
}

const LOOK_MS = 10;

/** Set where the ranks that are here allocate: who they are. */
function openingKey({ worldSize, succession }: Transport<Portable>): string {
  const lives = Array.from({ length: worldSize }, (_, rank) => succession?.lifeOf(rank)).join();
  return `collectives/opening/${createHash('sha256').update(lives).digest('hex').slice(0, 16)}`;
}

/** What the others have, for a process that came later and joins their group; undefined where they are about to allocate it, with this process. */
async function shapeToJoin(options: ArenaOptions, succession: Succession): Promise<ArenaShape | undefined> {
  const { transport, store, timeoutMs, signal } = options;
  const { worldSize, name } = transport;
  const until = performance.now() + timeoutMs;
  for (;;) {
    const shape = await shapeOfOthers(store, succession, worldSize);
    if (shape !== undefined || (await store.check([openingKey(transport)]))) return shape;
    if (performance.now() >= until) {
      throw new EpError(
        'EP_UNSUPPORTED',
        `${WHERE}: within ${timeoutMs} ms the others had no memory for groups over ${name} in this store: a process that comes later opens its first group in the store in which they opened theirs`,
      );
    }
    await setTimeout(LOOK_MS, undefined, signal && { signal });
  }
}

/** What a process that came later takes over, if the others have it. */
async function shapeToInherit(options: ArenaOptions): Promise<ArenaShape | undefined> {
  const { transport, store, stagingBytes, maxGroups, joins } = options;
  const { succession, worldSize } = transport;
  if (succession?.isNew !== true) return undefined;
  const shape = joins ? await shapeToJoin(options, succession) : await shapeOfOthers(store, succession, worldSize);
  const asked = shapeFor(options);
  for (const [knob, given, key] of [
    ['stagingBytes', stagingBytes, 'sectionBytes'],
    ['maxGroups', maxGroups, 'sections'],
  ] as const) {
    if (shape === undefined || given === undefined || asked[key] === shape[key]) continue;
    throw invalid(knob, { where: WHERE, expected: `${shape[key]}, as the others have it`, found: given });
  }
  return shape;
}

/** Not over transports that let others in anew: these would have other parts of it. */
async function roundsMemory(
  { transport, timeoutMs, signal }: ArenaOptions,
  sections: number,
): Promise<RoundsMemory | undefined> {
  const { rounds: maker, succession, capabilities } = transport;
  if (maker === undefined || succession !== undefined) return undefined;
  const fits = (places: number): boolean =>
    [maker.size(places), maker.carriers?.size(places)].every(
      (size) => (size?.signalSlots ?? 0) <= capabilities.maxSignalSlots,
    );
  if (!fits(sections)) return undefined;
  const wanted = Math.min(sections, MOST_SPARE_PLACES);
  const sparePlaces = fits(sections + wanted) ? wanted : 0;
  const [size, large] = [maker.size(sections + sparePlaces), maker.carriers?.size(sections + sparePlaces)];
  const limits = { timeoutMs, ...(signal && { signal }) };
  const memory = await transport.allocate({ ...size, ...limits });
  try {
    return { maker, memory, carriers: large && (await transport.allocate({ ...large, ...limits })), sparePlaces };
  } catch (error) {
    await memory.close();
    throw error;
  }
}

/** `isFirst`: of this process on this transport. */
async function openArena(options: ArenaOptions, isFirst: boolean): Promise<Arena> {
  const { transport, store, timeoutMs, signal } = options;
  const { worldSize, succession, rank } = transport;
  const inherits = isFirst ? await shapeToInherit(options) : undefined;
  const shape = inherits ?? shapeFor(options);
  const size = { byteLength: shape.sections * shape.sectionBytes, signalSlots: shape.sections * worldSize };
  const generation = succession?.generations?.current();
  if (succession !== undefined && inherits === undefined) await store.set(openingKey(transport), bytes('opening'));
  const memory =
    inherits === undefined
      ? await transport.allocate({ ...size, timeoutMs, ...(signal && { signal }) })
      : await succession!.inherit(size);
  let parts: Parts | undefined;
  if (succession !== undefined) {
    const mapped = Array.from({ length: worldSize }, (_, peer) =>
      inherits === undefined || peer === rank ? succession.lifeOf(peer) : '',
    );
    parts = new Parts({ succession, store, memory, rank, mapped, generation });
  }
  const rounds = await roundsMemory(options, shape.sections).catch(async (error: unknown) => {
    // The next one may try again, and takes both anew.
    await memory.close();
    throw error;
  });
  const inherited = inherits !== undefined;
  // HAZARD: before it is published: it hears of changes of the ways from here on.
  const arena = new Arena({ memory, store, worldSize, ...shape, inherited, parts, rounds, transport, generation });
  try {
    await arena.publish();
  } catch (error) {
    await arena.close();
    throw error;
  }
  if (arena.inherited) await arena.sections.inherit();
  return arena;
}

interface Opened {
  readonly arena: Promise<Arena>;
  readonly stagingBytes: number | undefined;
  readonly maxGroups: number | undefined;
}

const arenas = new WeakMap<Transport<Portable>, Opened>();

/** After its store was closed, with which all groups ended, the transport gets another arena, and the memory of the old one is given back if it is idle. */
async function reopenArena(options: ArenaOptions, old: Arena): Promise<Arena> {
  if (old.users === 0) await old.close();
  return openArena(options, false);
}

/** The arena of the transport; the first call on it, and the first after its store was closed, is collective over its world. */
export async function arenaOf(options: ArenaOptions): Promise<Arena> {
  const { transport, stagingBytes, maxGroups } = options;
  const opened = arenas.get(transport);
  const old = await opened?.arena;
  if (opened === undefined || old === undefined || old.closed) {
    // Somebody else may have been faster while the old one was looked at.
    const current = arenas.get(transport);
    if (current !== opened && current !== undefined) return arenaOf(options);
    const arena = old === undefined ? openArena(options, true) : reopenArena(options, old);
    arenas.set(transport, { arena, stagingBytes, maxGroups });
    // The next one may try again.
    arena.catch(() => arenas.delete(transport));
    return arena;
  }
  for (const knob of ['stagingBytes', 'maxGroups'] as const) {
    if (options[knob] === undefined || options[knob] === opened[knob]) continue;
    throw invalid(knob, {
      where: WHERE,
      expected: `${opened[knob] ?? 'the default'}, as the first group on this transport has it`,
      found: options[knob],
    });
  }
  return old;
}
