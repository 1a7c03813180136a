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
 * HAZARD: what a rank that is gone has said is not heard any more (membership.ts): none looks at rounds once a member is lost, nor ever after.
 */
import { isEpError, type RoundMaker, type Rounds, type Store, type SymmetricMemory } from '@ep/core';
import type { nameOf } from './ordered.js';
import type { CallRecord } from './records.js';
import type { Section } from './sections.js';

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
const readyKey = (key: string, rank: number): string => `${key}/rounds/ready/${rank}`;
const YES = Uint8Array.of(1);
const NO = Uint8Array.of(0);

export interface GroupRoundsInit {
  readonly maker: RoundMaker;
  readonly memory: SymmetricMemory;
  readonly section: Section;
  readonly key: string;
  readonly store: Store;
  /** Of the transport, in group order. */
  readonly ranks: readonly number[];
  /** For each of them a number that those of its host have, and no other. */
  readonly hosts: readonly number[];
  /** Of this process in the group. */
  readonly rank: number;
}

/** A word of this rank that not all have been told in a record. */
interface Said {
  readonly record: CallRecord;
  readonly kind: ReturnType<typeof nameOf>;
  readonly told: Set<number>;
}

/** The rounds that this thread uses. HAZARD: ranks that share a thread would hold each other up. */
const makers = new Map<RoundMaker, number>();

function count(maker: RoundMaker, by: number): void {
  const users = (makers.get(maker) ?? 0) + by;
  if (users > 0) makers.set(maker, users);
  else makers.delete(maker);
}

/** What all ranks say alike is a text of its own, so that it need not be read of each. */
function encode({ call, gives, takes, given }: CallRecord): Uint8Array {
  const name = Buffer.from(call);
  const rest = gives === undefined ? Buffer.alloc(0) : Buffer.from(JSON.stringify({ gives, takes }));
  const bytes = Buffer.alloc(2 * LENGTH_BYTES + name.byteLength + rest.byteLength + given!.byteLength);
  bytes.writeUInt16LE(name.byteLength, 0);
  bytes.writeUInt16LE(rest.byteLength, LENGTH_BYTES);
  name.copy(bytes, 2 * LENGTH_BYTES);
  rest.copy(bytes, 2 * LENGTH_BYTES + name.byteLength);
  bytes.set(given!, bytes.byteLength - given!.byteLength);
  return bytes;
}

/** Copies: the next round uses the memory again, and elements are read where they are aligned. */
function decode(sequence: number, word: Uint8Array): CallRecord {
  const bytes = Buffer.from(word.buffer, word.byteOffset, word.byteLength);
  const name = 2 * LENGTH_BYTES + bytes.readUInt16LE(0);
  const rest = name + bytes.readUInt16LE(LENGTH_BYTES);
  return {
    kind: 'call',
    sequence,
    call: bytes.toString('utf8', 2 * LENGTH_BYTES, name),
    ...(rest > name && (JSON.parse(bytes.toString('utf8', name, rest)) as Pick<CallRecord, 'gives' | 'takes'>)),
    given: new Uint8Array(bytes.subarray(rest)),
  };
}

/** Nothing of a group's is left in the store. */
export async function forgetRounds(store: Store, key: string, rank: number): Promise<void> {
  await store.delete(partKey(key, rank));
  await store.delete(readyKey(key, rank));
}

export class GroupRounds {
  readonly #init: GroupRoundsInit;
  readonly #stop = new AbortController();
  readonly #said: Said[] = [];
  #rounds: Rounds | undefined;
  #begun = false;
  #ready = false;
  #holdMs = LONGEST_HOLD_MS;
  #opening: Promise<void> = Promise.resolve();

  constructor(init: GroupRoundsInit) {
    this.#init = init;
  }

  /** All ranks can take them, as this one knows by now. */
  get ready(): boolean {
    return this.#ready;
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

  /** Says this rank's word of a small call, and holds the thread for a moment; what all say of it, by rank, if they do by then. */
  say(record: CallRecord, kind: Said['kind']): readonly CallRecord[] | undefined {
    this.#said.push({ record, kind, told: new Set() });
    if (this.#said.length > CALLS_KEPT) this.#said.shift();
    const mostMs = makers.size === 1 ? this.#holdMs : 0;
    const words = this.#rounds!.enter(record.sequence, encode(record), mostMs);
    this.#holdMs = words === undefined ? Math.max(SHORTEST_HOLD_MS, this.#holdMs / 2) : LONGEST_HOLD_MS;
    return this.#decoded(record.sequence, words);
  }

  /** The same, at once, of a call that this rank has said its word of. */
  look(sequence: number): readonly CallRecord[] | undefined {
    return this.#ready ? this.#decoded(sequence, this.#rounds!.look(sequence)) : undefined;
  }

  /** What this rank has told in rounds, and not yet in a record to this peer, which it is told now: of one call, or of all that others may lack. */
  owed(peer: number, sequence?: number): readonly Pick<Said, 'record' | 'kind'>[] {
    const lacking = this.#said.filter(
      ({ record, told }) => !told.has(peer) && (sequence === undefined || record.sequence === sequence),
    );
    for (const { told } of lacking) told.add(peer);
    return lacking;
  }

  async close(): Promise<void> {
    if (this.#stop.signal.aborted) return;
    this.#stop.abort();
    this.#ready = false;
    if (this.#begun) count(this.#init.maker, -1);
    await this.#rounds?.close();
    await this.#opening;
  }

  #decoded(sequence: number, words: readonly Uint8Array[] | undefined): readonly CallRecord[] | undefined {
    return words?.map((word) => decode(sequence, word));
  }

  /** HAZARD: a rank that cannot map its leader's memory says so: all others would hold their threads for it in vain. */
  async #open(): Promise<void> {
    const { maker, memory, key, store, ranks, hosts, rank, section } = this.#init;
    const { signal } = this.#stop;
    const limits = { signal, timeoutMs: Number.POSITIVE_INFINITY };
    const first = hosts.indexOf(hosts[rank]!);
    if (first === rank) await store.set(partKey(key, rank), maker.part(memory));
    const leader = await store.get(partKey(key, first), limits);
    if (signal.aborted) return;
    const token = BigInt(`0x${section.token}`);
    let opened: Rounds | undefined;
    try {
      opened = maker.open({ memory, group: section.index, token, ranks, hosts, leader });
    } catch (error) {
      if (!isEpError(error)) throw error;
    }
    this.#rounds = opened;
    await store.set(readyKey(key, rank), opened === undefined ? NO : YES);
    let all = true;
    for (const peer of ranks.keys()) all = (await store.get(readyKey(key, peer), limits))[0] === YES[0] && all;
    this.#ready = all && !signal.aborted;
  }
}
