/**
 * The memory of all portable engines on one transport.
 *
 * Allocation on a transport is collective over its whole world, but a group is opened by its members only. So the first engine that is opened on a transport
 * allocates, on all ranks, one memory with `maxGroups` sections, and each group takes a section, whose number its rank 0 finds in the store. A section is
 * free again when all members have closed their engines in order. Sections of groups that lost a member are never used again: nothing says when the
 * last put of a dead rank has landed.
 */
import { createHash, randomBytes } from 'node:crypto';
import { checkInteger, EpError, invalid, type Store, type SymmetricMemory, type Transport } from '@ep/core';
import type { Portable } from './channel.js';

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
}

export interface Section {
  readonly index: number;
  /** Says which use of the section this is. */
  readonly token: string;
  readonly byteOffset: number;
  readonly firstSlot: number;
}

const NOTHING = new Uint8Array(0);
const bytes = (text: string): Uint8Array => new Uint8Array(Buffer.from(text));
const text = (value: Uint8Array): string => Buffer.from(value).toString();

export class Arena {
  readonly memory: SymmetricMemory;
  readonly sectionBytes: number;
  readonly sections: number;
  readonly #worldSize: number;
  readonly #store: Store;
  readonly #openings = new Map<string, number>();
  /** Engines of this rank that use it. */
  users = 0;

  constructor(memory: SymmetricMemory, store: Store, worldSize: number, sections: number, sectionBytes: number) {
    this.memory = memory;
    this.#store = store;
    this.#worldSize = worldSize;
    this.sections = sections;
    this.sectionBytes = sectionBytes;
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
  async take(label: string): Promise<Section> {
    const token = randomBytes(8).toString('hex');
    const mine = `taken ${token} ${label}`;
    for (let index = 0; index < this.sections; index++) {
      const key = sectionKey(index);
      let held = text(await this.#store.compareSet(key, NOTHING, bytes(mine)));
      if (held.startsWith('free ')) held = text(await this.#store.compareSet(key, bytes(held), bytes(mine)));
      if (held === mine) return this.section(index, token);
    }
    throw new EpError(
      'EP_CAPACITY',
      `group ${label}: all ${this.sections} groups that fit this transport are open, or lost a member; close some, or raise maxGroups of the first group on this transport`,
      { context: { maxGroups: this.sections } },
    );
  }

  section(index: number, token: string): Section {
    return { index, token, byteOffset: index * this.sectionBytes, firstSlot: index * this.#worldSize };
  }

  /** Called by every member when all it has put has landed. True for the last one: the section is free again. */
  async giveBack(section: Section, size: number): Promise<boolean> {
    const counter = `${sectionKey(section.index)}/closed/${section.token}`;
    if ((await this.#store.add(counter, 1)) < size) return false;
    await this.#store.delete(counter);
    // Another text each time: whoever compares with an older one must not win.
    await this.#store.set(sectionKey(section.index), bytes(`free ${section.token}`));
    return true;
  }
}

const sectionKey = (index: number): string => `collectives/sections/${index}`;

async function openArena({
  transport,
  store,
  stagingBytes,
  maxGroups,
  timeoutMs,
  signal,
}: ArenaOptions): Promise<Arena> {
  const { worldSize, capabilities } = transport;
  const wanted = checkInteger(maxGroups ?? DEFAULT_MAX_GROUPS, 'maxGroups', 'portable engine', 1);
  // One word per source and group.
  const sections = Math.min(wanted, Math.floor(capabilities.maxSignalSlots / worldSize));
  if (sections === 0 || (maxGroups !== undefined && sections < maxGroups)) {
    throw new EpError(
      'EP_CAPACITY',
      `portable engine: ${wanted} groups of ${worldSize} ranks need ${wanted * worldSize} signal slots, ${transport.name} has ${capabilities.maxSignalSlots}; maxGroups may be at most ${sections}`,
      { context: { maxGroups: wanted, fits: sections } },
    );
  }
  const asked = stagingBytes ?? Math.max(SMALLEST_DEFAULT_BYTES, DEFAULT_BYTES_PER_RANK * worldSize);
  checkInteger(asked, 'stagingBytes', 'portable engine', 1);
  const sectionBytes = Math.ceil(asked / PAGE_BYTES) * PAGE_BYTES;
  const memory = await transport.allocate({
    byteLength: sections * sectionBytes,
    signalSlots: sections * worldSize,
    timeoutMs,
    ...(signal && { signal }),
  });
  return new Arena(memory, store, worldSize, sections, sectionBytes);
}

interface Opened {
  readonly arena: Promise<Arena>;
  readonly stagingBytes: number | undefined;
  readonly maxGroups: number | undefined;
}

const arenas = new WeakMap<Transport<Portable>, Opened>();

/** After its store was closed, with which all groups ended, the transport gets another arena, and the memory of the old one is given back if it is idle. */
async function reopenArena(options: ArenaOptions, old: Arena): Promise<Arena> {
  if (old.users === 0) await old.memory.close();
  return openArena(options);
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
    const arena = old === undefined ? openArena(options) : reopenArena(options, old);
    arenas.set(transport, { arena, stagingBytes, maxGroups });
    // The next one may try again.
    arena.catch(() => arenas.delete(transport));
    return arena;
  }
  for (const knob of ['stagingBytes', 'maxGroups'] as const) {
    if (options[knob] === undefined || options[knob] === opened[knob]) continue;
    throw invalid(knob, {
      where: 'portable engine',
      expected: `${opened[knob] ?? 'the default'}, as the first group on this transport has it`,
      found: options[knob],
    });
  }
  return old;
}
