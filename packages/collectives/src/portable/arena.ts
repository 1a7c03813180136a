/**
 * The memory of all portable engines on one transport.
 *
 * Allocation on a transport is collective over its whole world, but a group is opened by its members only. So the first engine that is opened on a transport
 * allocates, on all ranks, one memory with `maxGroups` sections, and each group takes a section, whose number its rank 0 finds in the store. A section is
 * free again when all members have closed their engines in order. Sections of groups that lost a member are used again only if another process has come in its place: else nothing
 * says when the last put of a dead rank has landed.
 */
import { createHash, randomBytes } from 'node:crypto';
import { setTimeout } from 'node:timers/promises';
import {
  checkInteger,
  EpError,
  invalid,
  type RoundMaker,
  type Store,
  type Succession,
  type SymmetricMemory,
  type Transport,
} from '@ep/core';
import type { Portable } from './channel.js';
import { WHERE } from './options.js';
import { type ArenaShape, Parts, shapeOfOthers } from './parts.js';

const DEFAULT_MAX_GROUPS = 16;
const SMALLEST_DEFAULT_BYTES = 2 ** 22;
/** Per rank of the world: leaves payload slots of 3 KiB. */
const DEFAULT_BYTES_PER_RANK = 2 ** 16;
const PAGE_BYTES = 4096;

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

export interface Section {
  readonly index: number;
  /** Says which use of the section this is. */
  readonly token: string;
  /** How many open its group from the beginning. */
  readonly members: number;
  readonly byteOffset: number;
  readonly firstSlot: number;
}

const NOTHING = new Uint8Array(0);
const bytes = (text: string): Uint8Array => new Uint8Array(Buffer.from(text));
const text = (value: Uint8Array): string => Buffer.from(value).toString();

interface ArenaInit extends ArenaShape {
  readonly memory: SymmetricMemory;
  readonly store: Store;
  readonly worldSize: number;
  /** The others had it before this process was there. */
  readonly inherited: boolean;
  /** Over transports that let others in anew. */
  readonly parts: Parts | undefined;
  readonly rounds: RoundsMemory | undefined;
}

/** For the rounds of all groups. */
interface RoundsMemory {
  readonly maker: RoundMaker;
  readonly memory: SymmetricMemory;
}

export class Arena {
  readonly memory: SymmetricMemory;
  readonly sectionBytes: number;
  readonly sections: number;
  readonly inherited: boolean;
  readonly parts: Parts | undefined;
  readonly rounds: RoundsMemory | undefined;
  readonly #worldSize: number;
  readonly #store: Store;
  readonly #openings = new Map<string, number>();
  /** Engines of this rank that use it. */
  users = 0;

  constructor({ memory, store, worldSize, sections, sectionBytes, inherited, parts, rounds }: ArenaInit) {
    this.memory = memory;
    this.#store = store;
    this.#worldSize = worldSize;
    this.sections = sections;
    this.sectionBytes = sectionBytes;
    this.inherited = inherited;
    this.parts = parts;
    this.rounds = rounds;
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

  /** Finds a free section and takes it. Throws `EP_CAPACITY`. */
  async take(label: string, members: number): Promise<Section> {
    const token = randomBytes(8).toString('hex');
    const mine = `taken ${token} ${label}`;
    for (let index = 0; index < this.sections; index++) {
      const key = sectionKey(index);
      let held = text(await this.#store.compareSet(key, NOTHING, bytes(mine)));
      if (held.startsWith('free ')) held = text(await this.#store.compareSet(key, bytes(held), bytes(mine)));
      if (held === mine) return this.section({ index, token }, members);
    }
    throw new EpError(
      'EP_CAPACITY',
      `group ${label}: all ${this.sections} groups that fit this transport are open, or lost a member; close some, or raise maxGroups of the first group on this transport`,
      { context: { maxGroups: this.sections } },
    );
  }

  section({ index, token }: Pick<Section, 'index' | 'token'>, members: number): Section {
    return { index, token, members, byteOffset: index * this.sectionBytes, firstSlot: index * this.#worldSize };
  }

  /** Of a rank that opens the section's group later than its members: it is counted with them from now on, and so is who comes in its place. */
  async enroll(section: Section, rank: number): Promise<void> {
    const mine = bytes(randomBytes(8).toString('hex'));
    const held = await this.#store.compareSet(enrolledKey(section, rank), NOTHING, mine);
    if (Buffer.compare(held, mine) === 0) await this.#store.add(enrolledKey(section), 1);
  }

  /** Called by everybody who has opened the section's group, of at most `size` ranks, when all it has put has landed. True for the last one: the section is free again. */
  async giveBack(section: Section, rank: number, size: number): Promise<boolean> {
    const counter = counterKey(section);
    // HAZARD: before it counts, so that who comes in its place never takes back what was not counted.
    if (this.parts !== undefined) await this.#store.set(`${counter}/${rank}`, bytes('counted'));
    const closed = await this.#store.add(counter, 1);
    const later = section.members < size ? await this.#store.add(enrolledKey(section), 0) : 0;
    if (closed < section.members + later) return false;
    await this.#store.delete(counter);
    await this.#store.delete(enrolledKey(section));
    for (let member = 0; later > 0 && member < size; member++) await this.#store.delete(enrolledKey(section, member));
    for (let member = 0; this.parts !== undefined && member < size; member++) {
      await this.#store.delete(`${counter}/${member}`);
    }
    // Another text each time: whoever compares with an older one must not win.
    await this.#store.set(sectionKey(section.index), bytes(`free ${section.token}`));
    return true;
  }

  /** Of a process in the place of one that may have given the section back. */
  async takeUp(section: Section, rank: number): Promise<void> {
    const counter = counterKey(section);
    if (await this.#store.delete(`${counter}/${rank}`)) await this.#store.add(counter, -1);
  }
}

const counterKey = ({ index, token }: Section): string => `${sectionKey(index)}/closed/${token}`;
const enrolledKey = (section: Section, rank?: number): string =>
  `${sectionKey(section.index)}/enrolled/${section.token}${rank === undefined ? '' : `/${rank}`}`;
const sectionKey = (index: number): string => `collectives/sections/${index}`;

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
  const size = maker.size(sections);
  if (size.signalSlots > capabilities.maxSignalSlots) return undefined;
  return { maker, memory: await transport.allocate({ ...size, timeoutMs, ...(signal && { signal }) }) };
}

/** `isFirst`: of this process on this transport. */
async function openArena(options: ArenaOptions, isFirst: boolean): Promise<Arena> {
  const { transport, store, timeoutMs, signal } = options;
  const { worldSize, succession, rank } = transport;
  const inherits = isFirst ? await shapeToInherit(options) : undefined;
  const shape = inherits ?? shapeFor(options);
  const size = { byteLength: shape.sections * shape.sectionBytes, signalSlots: shape.sections * worldSize };
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
    parts = new Parts({ succession, store, memory, mapped });
    await parts.publish(rank, shape);
  }
  const rounds = await roundsMemory(options, shape.sections).catch(async (error: unknown) => {
    // The next one may try again, and takes both anew.
    await memory.close();
    throw error;
  });
  return new Arena({ memory, store, worldSize, ...shape, inherited: inherits !== undefined, parts, rounds });
}

interface Opened {
  readonly arena: Promise<Arena>;
  readonly stagingBytes: number | undefined;
  readonly maxGroups: number | undefined;
}

const arenas = new WeakMap<Transport<Portable>, Opened>();

/** After its store was closed, with which all groups ended, the transport gets another arena, and the memory of the old one is given back if it is idle. */
async function reopenArena(options: ArenaOptions, old: Arena): Promise<Arena> {
  if (old.users === 0) {
    await old.rounds?.memory.close();
    await old.memory.close();
  }
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
