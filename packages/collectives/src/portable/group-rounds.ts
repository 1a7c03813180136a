/**
 * What ranks call, and the little that they give, told in rounds of the transport (`Transport.rounds`), where it has them: one call into native code instead of a record to each peer, for which all
 * peers' threads of JS have to come.
 *
 * Rounds are a faster way for the same words, and never the only one. A rank says its word of a small call in the round of the call's number. If the round comes at once, it has all words. Otherwise it tells
 * its word to all peers in a record, as without rounds, and takes what comes first. So nothing has to be agreed on but whether a group uses them at all, and all that the records promise
 * stays as it is, if a rank that has told its word in a round only tells it in a record as well
 * - to a peer that does the same, for that one has no round: `owed` when its record comes;
 * - to whoever agrees on the next view, before it says how far it has come, because others may lack it whose round went with a rank that died; and before it closes.
 *
 * HAZARD: what a rank that is gone has said is not heard any more (membership.ts): none looks at rounds once one of their members is lost, nor ever after. Those who are left have others (view-rounds.ts).
 */
import {
  type Carrier,
  isEpError,
  type RoundFold,
  type RoundMaker,
  type Rounds,
  type Store,
  type SymmetricMemory,
} from '@ep/core';
import type { Elements, EngineCall } from '../engine.js';
import type { Words } from './arrivals.js';
import { BegunCall, CarriedPlan, callAmong, carriedCallOf, isCarried, longestOf } from './carried-plan.js';
import type { PlannedCall } from './collectives-init.js';
import type { nameOf } from './ordered.js';
import { type CallRecord, RECORD_BYTES, recordBytes } from './records.js';
import type { SectionName } from './sections.js';
import { toldToAll } from './signature.js';

/**
 * Milliseconds that the thread is held for a round: so long that ranks which outnumber their cores get their turns. Half as long after each time in vain: peers that come later than that
 * are not worth it.
 */
const LONGEST_HOLD_MS = 4;
const SHORTEST_HOLD_MS = 0.5;
/** Lengths of what is called, and of what else is said of it. */
const LENGTH_BYTES = 2;
/** Calls that others may still lack a word of: the one that this rank ended last, and the one that it is in. */
const CALLS_KEPT = 2;

const partKey = (key: string, rank: number): string => `${key}/rounds/part/${rank}`;
const carrierKey = (key: string, rank: number): string => `${key}/rounds/carrier/${rank}`;
const readyKey = (key: string, rank: number): string => `${key}/rounds/ready/${rank}`;
/** What a rank can: nothing, take rounds, and carry large calls, too. */
const NO = Uint8Array.of(0);
const YES = Uint8Array.of(1);
const CARRIES = Uint8Array.of(2);
const NOTHING = new Uint8Array(0);

export interface GroupRoundsInit {
  readonly maker: RoundMaker;
  readonly memory: SymmetricMemory;
  /** For carriers, where the transport has them. */
  readonly carriers: SymmetricMemory | undefined;
  readonly section: SectionName;
  readonly key: string;
  readonly store: Store;
  /** The view of which they are, ascending ranks of the group: what `Membership.active` is then. */
  readonly members: readonly number[];
  /** By member: its rank of the transport. */
  readonly ranks: readonly number[];
  /** For each of them a number that those of its host have, and no other. */
  readonly hosts: readonly number[];
  /** In which order what members give is folded: `RoundsOptions.folds`. */
  readonly folds: readonly (readonly number[])[];
  /** Ranks of the group, whether or not they take part: a call has arrays for all of them. */
  readonly size: () => number;
  /** Of this process in the group. */
  readonly rank: number;
}

/** A word of this rank that not all have been told in a record. */
interface Said {
  sequence: number;
  /** Absent until somebody asks, where `Rounds.kept` has it. */
  record: CallRecord | undefined;
  kind: ReturnType<typeof nameOf>;
  readonly told: Set<number>;
}

/** What is said, or folded, of a small call as `exchange` takes it. */
export interface ExchangedCall {
  readonly sequence: number;
  readonly kind: Said['kind'];
  /** Of `headOf`. */
  readonly head: Uint8Array;
  readonly given: Elements | undefined;
  readonly fold: RoundFold | undefined;
  readonly output: Elements | undefined;
}

/** The rounds that this thread uses. HAZARD: ranks that share a thread would hold each other up. */
const makers = new Map<RoundMaker, number>();

function count(maker: RoundMaker, by: number): void {
  const users = (makers.get(maker) ?? 0) + by;
  if (users > 0) makers.set(maker, users);
  else makers.delete(maker);
}

/** A word, or what one begins with that says what is given: that follows. */
export function headOf(record: Pick<CallRecord, 'call' | 'gives' | 'takes' | 'carry'>): Uint8Array {
  return encode(record);
}

/** What all ranks say alike is a text of its own, so that it need not be read of each. */
function encode({ call, gives, takes, carry, given = NOTHING }: Omit<CallRecord, 'kind' | 'sequence'>): Uint8Array {
  const name = Buffer.from(call);
  const isPlain = gives === undefined && carry === undefined;
  const rest = isPlain ? NOTHING : Buffer.from(JSON.stringify({ gives, takes, carry }));
  const bytes = Buffer.alloc(2 * LENGTH_BYTES + name.byteLength + rest.byteLength + given.byteLength);
  bytes.writeUInt16LE(name.byteLength, 0);
  bytes.writeUInt16LE(rest.byteLength, LENGTH_BYTES);
  name.copy(bytes, 2 * LENGTH_BYTES);
  bytes.set(rest, 2 * LENGTH_BYTES + name.byteLength);
  bytes.set(given, bytes.byteLength - given.byteLength);
  return bytes;
}

/** Copies: the next round uses the memory again, and elements are read where they are aligned. */
function decode(sequence: number, word: Uint8Array): CallRecord {
  const bytes = Buffer.from(word.buffer, word.byteOffset, word.byteLength);
  const name = 2 * LENGTH_BYTES + bytes.readUInt16LE(0);
  const rest = name + bytes.readUInt16LE(LENGTH_BYTES);
  const more = rest > name ? (JSON.parse(bytes.toString('utf8', name, rest)) as Partial<CallRecord>) : {};
  return {
    kind: 'call',
    sequence,
    call: bytes.toString('utf8', 2 * LENGTH_BYTES, name),
    ...more,
    ...(more.carry === undefined && { given: new Uint8Array(bytes.subarray(rest)) }),
  };
}

/** Nothing of a group's is left in the store. */
export async function forgetRounds(store: Store, key: string, rank: number): Promise<void> {
  await store.delete(partKey(key, rank));
  await store.delete(carrierKey(key, rank));
  await store.delete(readyKey(key, rank));
}

interface StoreLimits {
  readonly signal: AbortSignal;
  readonly timeoutMs: number;
}

export class GroupRounds {
  readonly #init: GroupRoundsInit;
  readonly #stop = new AbortController();
  readonly #said: Said[] = [];
  #rounds: Rounds | undefined;
  #carrier: Carrier | undefined;
  #carries = false;
  /** HAZARD: ranks learn at different times that all carry calls: those of one call that all have carried know it. */
  #joins = false;
  /** A call whose first turn was not its last, or that may be another on others. */
  #carried: BegunCall | undefined;
  #begun = false;
  #ready = false;
  #used = false;
  #exchanges = false;
  #holdMs = LONGEST_HOLD_MS;
  #opening: Promise<void> = Promise.resolve();

  constructor(init: GroupRoundsInit) {
    this.#init = init;
  }

  /** HAZARD: by identity: a call belongs to the view in which it was begun, and the same ranks may be another one's. */
  isOf(contributors: readonly number[] | undefined): boolean {
    return contributors === this.#init.members;
  }

  /** All ranks can take them, as this one knows by now. */
  get ready(): boolean {
    return this.#ready;
  }

  /** This rank may have said something in one. */
  get used(): boolean {
    return this.#used;
  }

  /** They take `exchange`, too. */
  get exchanges(): boolean {
    return this.#ready && this.#exchanges;
  }

  /** All ranks carry large calls, as this one knows by now. */
  get carries(): boolean {
    return this.#carries;
  }

  /** Whether `exchange` folds this. */
  folds(type: number, reduction: number): boolean {
    return this.#init.maker.carriers?.carries(type, reduction) === true;
  }

  /**
   * What this rank tells all others of a call that is not small, if all ranks can carry it. HAZARD: ranks find out at different times whether all can, so a call is carried only where all have told of it
   * in this way.
   */
  recordOf(call: EngineCall): CallRecord | undefined {
    const { maker } = this.#init;
    const size = this.#init.size();
    if (!this.#carries || !isCarried(call, maker.carriers!)) return undefined;
    const told = toldToAll(call, size);
    if (told === undefined) return undefined;
    const record = { ...told, carry: longestOf(this.#among(call)) };
    // As a record too, which another rank may pass on.
    const fits = encode(record).byteLength <= maker.mostBytes && recordBytes({ ...record, of: size }) <= RECORD_BYTES;
    return fits ? record : undefined;
  }

  /** `longest`: as all have told. */
  planOf(data: PlannedCall, longest: number): CarriedPlan {
    const { call } = data;
    const begun = this.#carried?.sequence === call.sequence ? this.#carried : undefined;
    this.#carried = undefined;
    this.#joins = true;
    begun?.settle(longest);
    const begin = (): BegunCall => BegunCall.begin(this.#carrier!, this.#among(call), longest);
    return new CarriedPlan({ ...data, begun, begin, mostMs: () => this.#mostMs });
  }

  /**
   * Says `head` of a call that is carried if all say the same, begins it, and holds the thread for it for a moment: while others have yet to say theirs, too, once all have carried one. Bytes that left the host from
   * here, if it is over by then; undefined: `planOf` goes on with it, or it goes another way.
   */
  carry(call: EngineCall, head: Uint8Array, longest: number): number | undefined {
    const { sequence, kind } = call;
    const carrier = this.#carrier!;
    const among = this.#among(call);
    if (!this.#joins || carrier.join === undefined) {
      const said = { sequence, kind, head, given: undefined, fold: undefined, output: undefined };
      if (!this.exchange(said)) return undefined;
      this.#joins = true;
      this.#carried = BegunCall.begin(carrier, among, longest);
      return this.#endOf(this.#carried.turn(this.#mostMs));
    }
    const begun = new BegunCall(carrier, among, longest);
    const { inputs, outputs } = among;
    const mostMs = this.#mostMs;
    const roundMs = Math.min(mostMs, this.#holdMs);
    const end = carrier.join(this.#rounds!, head, carriedCallOf(among, longest), inputs, outputs, roundMs, mostMs);
    // HAZARD: not before: what it throws it throws before the word is said.
    this.#remember(sequence, kind, undefined);
    this.#carried = begun;
    this.#holdFor(end !== 'late');
    return this.#endOf(end);
  }

  #endOf(end: string): number | undefined {
    if (end !== 'over') return undefined;
    const { sent } = this.#carried!;
    this.#carried = undefined;
    return sent;
  }

  /** For how long the thread may be held. */
  get #mostMs(): number {
    return makers.size === 1 ? LONGEST_HOLD_MS : 0;
  }

  /** Finds that out; nobody waits for it. */
  begin(): void {
    count(this.#init.maker, 1);
    this.#begun = true;
    this.#opening = this.#open().catch((error: unknown) => {
      // Of a store or a transport that was closed, or does not answer: then there are none.
      if (!isEpError(error) && !this.#stop.signal.aborted) throw error;
    });
  }

  /** Says this rank's word of a small call, and holds the thread for a moment; what all say of it, if they do by then. */
  say(record: CallRecord, kind: Said['kind']): Words | undefined {
    const { sequence } = record;
    // As `exchange` has it, for which the thread was held.
    if (this.#remember(sequence, kind, record)) return this.look(sequence);
    const words = this.#rounds!.enter(sequence, encode(record), Math.min(this.#mostMs, this.#holdMs));
    this.#holdFor(words !== undefined);
    return this.#decoded(sequence, words);
  }

  /** As `say`, of a call whose words are not looked at one by one. True: all have said the same, and what they give is folded, if it is to be. */
  exchange({ sequence, kind, head, given, fold, output }: ExchangedCall): boolean {
    this.#remember(sequence, kind, undefined);
    const mostMs = Math.min(this.#mostMs, this.#holdMs);
    const end = this.#rounds!.exchange!(sequence, head, given, mostMs, fold, output);
    this.#holdFor(end !== 'late');
    return end === 'alike';
  }

  /** Of a call that has ended in `exchange`, until two more have. */
  wordsOf(sequence: number): Words {
    return this.#decoded(sequence, this.#rounds!.kept!(sequence)) ?? new Map();
  }

  /** The same, at once, of a call that this rank has said its word of. */
  look(sequence: number): Words | undefined {
    return this.#ready ? this.#decoded(sequence, this.#rounds!.look(sequence)) : undefined;
  }

  /** What this rank has told in rounds, and not yet in a record to this peer, which it is told now: of one call, or of all that others may lack. */
  owed(peer: number, sequence?: number): readonly { readonly record: CallRecord; readonly kind: Said['kind'] }[] {
    const lacking = this.#said.filter(
      (said) => !said.told.has(peer) && (sequence === undefined || said.sequence === sequence),
    );
    return lacking.flatMap((said) => {
      said.told.add(peer);
      said.record ??= this.wordsOf(said.sequence).get(this.#init.rank);
      const { record, kind } = said;
      // Two calls later nobody lacks it.
      return record === undefined ? [] : [{ record, kind }];
    });
  }

  /** True: it was said before. */
  #remember(sequence: number, kind: Said['kind'], record: CallRecord | undefined): boolean {
    const last = this.#said.at(-1);
    if (last?.sequence === sequence) {
      last.record = record;
      return true;
    }
    if (this.#said.length < CALLS_KEPT) {
      this.#said.push({ sequence, kind, record, told: new Set() });
      return false;
    }
    // Used again: of short calls, an object for each is much.
    const said = this.#said.shift()!;
    said.sequence = sequence;
    said.kind = kind;
    said.record = record;
    if (said.told.size > 0) said.told.clear();
    this.#said.push(said);
    return false;
  }

  #among(call: EngineCall): EngineCall {
    const { members, size } = this.#init;
    return members.length === size() ? call : callAmong(call, members);
  }

  #holdFor(came: boolean): void {
    this.#holdMs = came ? LONGEST_HOLD_MS : Math.max(SHORTEST_HOLD_MS, this.#holdMs / 2);
  }

  async close(): Promise<void> {
    if (this.#stop.signal.aborted) return;
    this.#stop.abort();
    this.#ready = false;
    if (this.#begun) count(this.#init.maker, -1);
    this.#carries = false;
    await this.#rounds?.close();
    await this.#carrier?.close();
    await this.#opening;
  }

  #decoded(sequence: number, words: readonly Uint8Array[] | undefined): Words | undefined {
    const { members } = this.#init;
    return words && new Map(words.map((word, at) => [members[at]!, decode(sequence, word)]));
  }

  /** HAZARD: a rank that cannot map its leader's memory says so: all others would hold their threads for it in vain. */
  async #open(): Promise<void> {
    const { maker, memory, key, store, members, ranks, hosts, folds, rank, section } = this.#init;
    const { signal } = this.#stop;
    const limits = { signal, timeoutMs: Number.POSITIVE_INFINITY };
    const first = members[hosts.indexOf(hosts[members.indexOf(rank)]!)]!;
    if (first === rank) await store.set(partKey(key, rank), maker.part(memory));
    const leader = await store.get(partKey(key, first), limits);
    if (signal.aborted) return;
    const token = BigInt(`0x${section.token}`);
    let opened: Rounds | undefined;
    try {
      opened = maker.open({ memory, group: section.index, token, ranks, hosts, leader, folds });
    } catch (error) {
      if (!isEpError(error)) throw error;
    }
    this.#rounds = opened;
    this.#exchanges = opened?.exchange !== undefined && opened.kept !== undefined;
    const carrier = opened && (await this.#openCarrier(limits));
    if (signal.aborted) {
      await carrier?.close();
      return;
    }
    this.#carrier = carrier;
    await store.set(readyKey(key, rank), opened === undefined ? NO : carrier === undefined ? YES : CARRIES);
    let least: number = CARRIES[0]!;
    for (const peer of members) least = Math.min(least, (await store.get(readyKey(key, peer), limits))[0]!);
    this.#ready = least >= YES[0]! && !signal.aborted;
    this.#used ||= this.#ready;
    this.#carries = least === CARRIES[0]! && !signal.aborted;
  }

  /** HAZARD: a rank says where its part is once it has forgotten what an earlier group has left there. */
  async #openCarrier(limits: StoreLimits): Promise<Carrier | undefined> {
    const { maker, carriers: memory, key, store, members, ranks, hosts, rank, section } = this.#init;
    if (maker.carriers === undefined || memory === undefined || new Set(hosts).size < 2) return undefined;
    maker.carriers.clear(memory, section.index);
    await store.set(carrierKey(key, rank), maker.carriers.part(memory));
    const parts: Uint8Array[] = [];
    const own = hosts[members.indexOf(rank)];
    for (const [at, host] of hosts.entries()) {
      if (host === own) parts.push(await store.get(carrierKey(key, members[at]!), limits));
    }
    if (limits.signal.aborted) return undefined;
    try {
      return maker.carriers.open({ memory, group: section.index, ranks, hosts, parts });
    } catch (error) {
      if (!isEpError(error)) throw error;
      return undefined;
    }
  }
}
