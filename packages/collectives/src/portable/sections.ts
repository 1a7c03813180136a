/**
 * Who has which section of the arena, through its store: a section is taken for one group, and free again when nobody uses it and nothing can land in it any more.
 *
 * Of each taken section there is a record: who has opened its group, and which processes these are. Whoever closes the group in order, when all it has put has landed, says so, together
 * with whom it has cut off (`Transport.fence`). The section is free when of those that opened the group each has said so, or is gone, and all that are still there have cut it off: what a
 * dead rank had under way to somebody lands in that rank's memory, whatever others know of its end.
 *
 * Whoever finds that looks last, and nobody else can look later: so every rank looks when it closes a group, at those that it had closed when it opens another one (of a member that
 * died later it has to cut off), and the one that finds no free section at all others.
 *
 * HAZARD: the record is changed and freed by comparison. A process that enters a group while another rank finds the group over has changed the record, or finds it gone.
 */
import { randomBytes } from 'node:crypto';
import { setTimeout } from 'node:timers/promises';
import { EpError, type Store, type Transport } from '@ep/core';
import type { Portable } from './channel.js';
import { readKey } from './meeting.js';

export interface Section {
  readonly index: number;
  /** Says which use of the section this is. */
  readonly token: string;
  /** How many open its group from the beginning. */
  readonly members: number;
  readonly byteOffset: number;
  readonly firstSlot: number;
}

export type SectionName = Pick<Section, 'index' | 'token'>;

interface Taken {
  readonly token: string;
  readonly name: string;
  /** Of the group, unlike that of any other. */
  readonly key: string;
  /** By rank of the group: its rank of the transport. */
  readonly ranks: readonly number[];
  /** Ranks of the group that have opened it. */
  readonly members: readonly number[];
  /** By rank of the group: which process has opened it. */
  readonly lives: readonly string[];
}

/** What a rank has said that closed the group: those whose puts to it are over without that they said so. `all`: nobody knows its memory. */
interface Closing {
  readonly cutOff: readonly number[] | 'all';
}

export interface SectionsInit {
  readonly transport: Pick<Transport<Portable>, 'rank' | 'fence' | 'succession'>;
  readonly store: Store;
  readonly count: number;
}

const LOOK_MS = 10;
/** Others that are opening groups, too, may have to cut somebody off. */
const LONGEST_WAIT_MS = 1000;

const NOTHING = new Uint8Array(0);
const bytes = (text: string): Uint8Array => new Uint8Array(Buffer.from(text));
const toJson = (value: object): Uint8Array => bytes(JSON.stringify(value));
const same = (one: Uint8Array, other: Uint8Array): boolean => Buffer.compare(one, other) === 0;

const recordKey = (index: number): string => `collectives/sections/${index}`;
const closedKey = ({ index, token }: SectionName): string => `${recordKey(index)}/closed/${token}`;
const closingKey = (section: SectionName, rank: number): string => `${closedKey(section)}/${rank}`;

/** Another text each time: whoever compares with an older one must not win. */
const freeRecord = (token: string): Uint8Array => toJson({ free: `${token} ${randomBytes(8).toString('hex')}` });

/** Undefined for a section that is free, and for one that nobody has had yet. */
function parseTaken(held: Uint8Array | undefined): Taken | undefined {
  const record = held === undefined ? undefined : (JSON.parse(Buffer.from(held).toString()) as Partial<Taken>);
  return record?.members === undefined ? undefined : (record as Taken);
}

/** `used`: somebody has it; `awaited`: only what ranks have to do that have closed its group; `other`: it is, or was, free, or another group has it. */
type Settled = 'free' | 'used' | 'awaited' | 'other';

/** A section that this rank has given back, and that others, or it, must still do something for. */
interface Returned {
  readonly section: SectionName;
  readonly rank: number;
}

export class Sections {
  readonly #init: SectionsInit;
  readonly #returned = new Map<string, Returned>();

  constructor(init: SectionsInit) {
    this.#init = init;
  }

  /** Finds a free section and takes it, for the ranks of a group of which `members` open it from the beginning. Throws `EP_CAPACITY`. */
  async take(name: string, ranks: readonly number[], members: readonly number[], key: string): Promise<SectionName> {
    const { store, count } = this.#init;
    const token = randomBytes(8).toString('hex');
    const lives = ranks.map((_, rank) => (members.includes(rank) ? this.#lifeOf(ranks[rank]!) : ''));
    const mine = toJson({ token, name, key, ranks, members, lives } satisfies Taken);
    const until = performance.now() + LONGEST_WAIT_MS;
    for (;;) {
      for (let index = 0; index < count; index++) {
        // Read first: whoever asks again and again must not write each time.
        const held = await readKey(store, recordKey(index));
        if (parseTaken(held) !== undefined) continue;
        if (same(await store.compareSet(recordKey(index), held ?? NOTHING, mine), mine)) return { index, token };
      }
      const found: Settled[] = [];
      for (let index = 0; index < count; index++) found.push(await this.#settle(index));
      if (found.includes('free') || found.includes('other')) continue;
      if (!found.includes('awaited') || performance.now() > until) break;
      await setTimeout(LOOK_MS);
    }
    throw new EpError(
      'EP_CAPACITY',
      `group ${name}: all ${count} groups that fit this transport are open, or lost a member that may still write; close some, or raise maxGroups of the first group on this transport`,
      { context: { maxGroups: count } },
    );
  }

  /** Of a group whose members do not know of it: who took it is lost. */
  async takenFor(key: string): Promise<SectionName | undefined> {
    const { store, count } = this.#init;
    for (let index = 0; index < count; index++) {
      const record = parseTaken(await readKey(store, recordKey(index)));
      if (record?.key === key) return { index, token: record.token };
    }
    return undefined;
  }

  /** Of one that was taken in vain: nobody has heard of it. */
  async putBack({ index, token }: SectionName): Promise<void> {
    const { store } = this.#init;
    const held = await readKey(store, recordKey(index));
    if (held === undefined || parseTaken(held)?.token !== token) return;
    await store.compareSet(recordKey(index), held, freeRecord(token));
  }

  /**
   * Of a rank that opens the section's group later than its members, or in the place of one of them: from now on it is counted. False: all others have closed the group.
   */
  async enter(section: SectionName, rank: number): Promise<boolean> {
    const { store } = this.#init;
    // HAZARD: before the record is changed: whoever frees the section because of it finds another record.
    if (await store.delete(closingKey(section, rank))) await store.add(closedKey(section), -1);
    for (;;) {
      const held = await readKey(store, recordKey(section.index));
      const record = parseTaken(held);
      if (held === undefined || record?.token !== section.token) return false;
      const members = [...new Set([...record.members, rank])].sort((a, b) => a - b);
      const lives = record.lives.with(rank, this.#lifeOf(record.ranks[rank]!));
      const entered = toJson({ ...record, members, lives });
      if (same(await store.compareSet(recordKey(section.index), held, entered), entered)) return true;
    }
  }

  /** Those of some ranks of the section's group that put nothing here any more. */
  async cutOffFrom(section: SectionName, of: readonly number[]): Promise<readonly number[]> {
    if (of.length === 0) return [];
    const record = parseTaken(await readKey(this.#init.store, recordKey(section.index)));
    return record?.token === section.token ? this.#cutOff(record, of) : [];
  }

  /**
   * Called by everybody who has opened the section's group, when all it has put has landed, with those that it has cut off. `incomplete`: it may be the last one though not all have called it.
   * True for the one that has freed the section.
   */
  async giveBack(section: SectionName, rank: number, cutOff: Closing['cutOff'], incomplete: boolean): Promise<boolean> {
    const { store } = this.#init;
    // HAZARD: before it counts, so that who comes in its place never takes back what was not counted.
    await store.set(closingKey(section, rank), toJson({ cutOff } satisfies Closing));
    const closed = await store.add(closedKey(section), 1);
    const held = await readKey(store, recordKey(section.index));
    const record = parseTaken(held);
    if (held === undefined || record?.token !== section.token) {
      // Somebody had freed it by what was set above, before that was counted.
      await store.delete(closedKey(section));
      await store.delete(closingKey(section, rank));
      return false;
    }
    const isLast = closed >= record.members.length;
    if (!isLast && !incomplete) {
      this.#keep(section, rank);
      return false;
    }
    const found = await this.#settle(section.index, { section, rank });
    if (found === 'used' || found === 'awaited') this.#keep(section, rank);
    return found === 'free';
  }

  /** What this rank has given back may have lost a member since. */
  async sweep(): Promise<void> {
    for (const [token, returned] of this.#returned) {
      const found = await this.#settle(returned.section.index, returned);
      if (found === 'free' || found === 'other') this.#returned.delete(token);
    }
  }

  /** Of a process in the place of another one: what that one had taken, it will not give back, and of this one's memory nobody knows from there. */
  async inherit(): Promise<void> {
    const { store, count, transport } = this.#init;
    for (let index = 0; index < count; index++) {
      const record = parseTaken(await readKey(store, recordKey(index)));
      const rank = record?.ranks.indexOf(transport.rank) ?? -1;
      if (record === undefined || !record.members.includes(rank)) continue;
      if (record.lives[rank] === this.#lifeOf(transport.rank)) continue;
      const section = { index, token: record.token };
      if (await store.check([closingKey(section, rank)])) continue;
      await this.giveBack(section, rank, 'all', true);
    }
    this.#returned.clear();
  }

  /** They are dead, or another process is in their place than the one that had opened the group. */
  async #cutOff({ ranks, lives }: Taken, of: readonly number[]): Promise<readonly number[]> {
    const { fence } = this.#init.transport;
    const replaced = of.filter((rank) => {
      const life = this.#lifeOf(ranks[rank]!);
      return life !== '' && life !== lives[rank];
    });
    const rest = of.filter((rank) => !replaced.includes(rank));
    if (fence === undefined || rest.length === 0) return replaced;
    const fenced = await fence(rest.map((rank) => ranks[rank]!));
    return [...replaced, ...rest.filter((rank) => fenced.includes(ranks[rank]!))];
  }

  #keep(section: SectionName, rank: number): void {
    this.#returned.set(section.token, { section, rank });
  }

  #lifeOf(transportRank: number): string {
    return this.#init.transport.succession?.lifeOf(transportRank) ?? '';
  }

  /** Frees the section if it can be. `own`: what this rank has given back. */
  async #settle(index: number, own?: Returned): Promise<Settled> {
    const { store } = this.#init;
    for (;;) {
      const held = await readKey(store, recordKey(index));
      const record = parseTaken(held);
      if (held === undefined || record === undefined) return 'other';
      if (own !== undefined && own.section.token !== record.token) return 'other';
      const verdict = await this.#judge({ index, token: record.token }, record, own?.rank);
      if (verdict !== 'free') return verdict;
      const free = freeRecord(record.token);
      if (!same(await store.compareSet(recordKey(index), held, free), free)) continue;
      await store.delete(closedKey({ index, token: record.token }));
      for (const rank of record.members) await store.delete(closingKey({ index, token: record.token }, rank));
      return 'free';
    }
  }

  async #judge(section: SectionName, record: Taken, own: number | undefined): Promise<Exclude<Settled, 'other'>> {
    const { store } = this.#init;
    const { members } = record;
    const closings = new Map<number, Closing['cutOff']>();
    for (const rank of members) {
      const said = await readKey(store, closingKey(section, rank));
      if (said !== undefined) closings.set(rank, (JSON.parse(Buffer.from(said).toString()) as Closing).cutOff);
    }
    const missing = members.filter((rank) => !closings.has(rank));
    if (missing.length === 0) return 'free';
    const cutOff = await this.#cutOff(record, missing);
    if (cutOff.length < missing.length) return 'used';
    const covers = (closing: Closing['cutOff']): boolean =>
      closing === 'all' || missing.every((rank) => closing.includes(rank));
    const mine = own === undefined ? undefined : closings.get(own);
    if (own !== undefined && mine !== undefined && mine !== 'all' && !covers(mine)) {
      const now = [...new Set([...mine, ...cutOff])];
      await store.set(closingKey(section, own), toJson({ cutOff: now } satisfies Closing));
      closings.set(own, now);
    }
    const behind = [...closings].flatMap(([rank, closing]) => (covers(closing) ? [] : [rank]));
    // Of those that are gone themselves, nobody uses the memory.
    const alive = behind.length - (await this.#cutOff(record, behind)).length;
    return alive === 0 ? 'free' : 'awaited';
  }
}
