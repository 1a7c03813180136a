/**
 * Everything between this rank and one peer: three lanes each way, over one signal word each way.
 *
 * A lane is a ring of slots in the receiver's memory. Whoever fills a slot adds the slot's bit to the receiver's word, bundled with the put, and fills it
 * again only after the receiver has added the slot's other bit to the word of the sender. So each bit is added at most once between two looks, and the
 * difference of two values of a word, modulo 2^64, is the set of what happened in between: nothing else has to be ordered, and nothing is ever zeroed.
 *
 * HAZARD: adding a bit twice without the peer's answer would carry into the bit above, and a slot would be taken for full that is not.
 */
import { type Endpoint, EpError, isEpError, type Request, type SeenWord, type SymmetricMemory } from '@ep/core';
import {
  filledOf,
  freeBit,
  freedOf,
  fullBit,
  LANES,
  type LaneName,
  type SectionLayout,
  SLOTS_PER_LANE,
} from './layout.js';
import { RECORD_BYTES } from './records.js';

export type Portable = 'bundled' | 'add';
type ChannelRequest = Exclude<Request<Portable>, { readonly kind: 'put-value' }>;

/** What a lane sends, piece by piece, in the order in which sources were given to it. */
export interface LaneSource {
  /** Nothing will come any more; the lane drops it. */
  readonly finished: boolean;
  /** Writes the next piece into a slot and returns its length, 0 if there is none yet. */
  readonly fill: (slot: Uint8Array) => number;
  /** A piece of it was read by the peer. */
  readonly consumed?: () => void;
}

/** Takes a filled slot. False: not now, ask again at `drain`. Once it returned true, `release` must be called when the slot has been read. */
export type SlotReader = (slot: Uint8Array, release: () => void) => boolean;

export interface ChannelInit {
  readonly self: number;
  readonly peer: number;
  readonly memory: SymmetricMemory;
  readonly layout: SectionLayout;
  readonly sectionOffset: number;
  /** All bytes of this rank's section. */
  readonly section: Uint8Array;
  /** The word of this rank that the peer adds to, and the word of the peer that this rank adds to. */
  readonly ownSlot: number;
  readonly peerSlot: number;
  /** Transport rank of the peer. */
  readonly peerRank: number;
  /** The word's value from which this group counts. */
  readonly base: bigint;
  readonly readers: Readonly<Record<LaneName, SlotReader>>;
  /** The word has changed, or the peer is lost: time to `look`, at this channel and, as that costs little, at the others. */
  readonly onEvent: () => void;
  /** Resolves when it is time to wait again; until then, somebody looks. */
  readonly quiet: () => Promise<void>;
  /** The peer died or closed; called once. */
  readonly onLost: (error: EpError) => void;
  /** The transport refused a put or a wait for another reason. */
  readonly onBroken: (error: unknown) => void;
}

const laneBytes = (layout: SectionLayout, lane: LaneName): number =>
  lane === 'control' ? RECORD_BYTES : layout.slotBytes;

class OutLane {
  readonly #slots: readonly Uint8Array[];
  readonly #put: (slot: number, byteLength: number) => void;
  readonly #queue: LaneSource[] = [];
  /** By slot: whose piece the peer has not read yet. */
  readonly #unread: (LaneSource | undefined)[];
  #next = 0;

  constructor(slots: readonly Uint8Array[], put: (slot: number, byteLength: number) => void) {
    this.#slots = slots;
    this.#put = put;
    this.#unread = slots.map(() => undefined);
  }

  get idle(): boolean {
    return this.#queue.length === 0;
  }

  push(source: LaneSource): void {
    this.#queue.push(source);
  }

  freed(slot: number): void {
    const source = this.#unread[slot];
    this.#unread[slot] = undefined;
    source?.consumed?.();
  }

  /** Sends what can be sent. */
  kick(): void {
    for (;;) {
      while (this.#queue[0]?.finished === true) this.#queue.shift();
      const source = this.#queue[0];
      if (source === undefined || this.#unread[this.#next] !== undefined) return;
      const slot = this.#next;
      const byteLength = source.fill(this.#slots[slot]!);
      if (byteLength === 0) return;
      this.#unread[slot] = source;
      this.#next = (slot + 1) % this.#slots.length;
      this.#put(slot, byteLength);
    }
  }
}

class InLane {
  readonly #slots: readonly Uint8Array[];
  readonly #read: SlotReader;
  readonly #free: (slot: number) => void;
  readonly #full: boolean[];
  #next = 0;
  #draining = false;

  constructor(slots: readonly Uint8Array[], read: SlotReader, free: (slot: number) => void) {
    this.#slots = slots;
    this.#read = read;
    this.#free = free;
    this.#full = slots.map(() => false);
  }

  filled(slot: number): void {
    this.#full[slot] = true;
  }

  /** Slots are handed on in the order in which the peer filled them, however their puts landed. */
  drain(): void {
    if (this.#draining) return;
    this.#draining = true;
    while (this.#full[this.#next] === true) {
      const slot = this.#next;
      if (!this.#read(this.#slots[slot]!, () => this.#free(slot))) break;
      this.#full[slot] = false;
      this.#next = (slot + 1) % this.#slots.length;
    }
    this.#draining = false;
  }
}

export class Channel {
  readonly #init: ChannelInit;
  readonly #out: Readonly<Record<LaneName, OutLane>>;
  readonly #in: Readonly<Record<LaneName, InLane>>;
  #seen: bigint;
  #endpoint: Endpoint<Portable> | undefined;
  #lost = false;
  #paused = false;
  /** Bits of slots that were read and of which the peer does not know yet: they ride on the next put, or go by themselves. */
  #owed = 0;
  #payScheduled = false;

  constructor(init: ChannelInit) {
    this.#init = init;
    this.#seen = init.base;
    const { layout, section, peer } = init;
    const slots = (lane: LaneName, offset: SectionLayout['sendOffset']): Uint8Array[] =>
      Array.from({ length: SLOTS_PER_LANE }, (_, slot) => {
        const begin = offset(peer, lane, slot);
        return section.subarray(begin, begin + laneBytes(layout, lane));
      });
    const perLane = <T>(make: (lane: LaneName) => T): Record<LaneName, T> =>
      Object.fromEntries(LANES.map((lane) => [lane, make(lane)])) as Record<LaneName, T>;
    this.#out = perLane(
      (lane) => new OutLane(slots(lane, layout.sendOffset), (slot, byteLength) => this.#put(lane, slot, byteLength)),
    );
    this.#in = perLane(
      (lane) => new InLane(slots(lane, layout.receiveOffset), init.readers[lane], (slot) => this.#owe(lane, slot)),
    );
  }

  get connected(): boolean {
    return this.#endpoint !== undefined && !this.#lost;
  }

  get lost(): boolean {
    return this.#lost;
  }

  get endpoint(): Endpoint<Portable> | undefined {
    return this.#endpoint;
  }

  /** The word that the peer adds to, as this rank has seen it. */
  get seen(): SeenWord {
    return { slot: this.#init.ownSlot, value: this.#seen };
  }

  /** Nothing waits to be sent on the lane. */
  idle(lane: LaneName): boolean {
    return this.#lost || this.#out[lane].idle;
  }

  /** Puts nothing until `resume`. What the peer puts is looked at all the same. */
  pause(): void {
    this.#paused = true;
  }

  resume(): void {
    this.#paused = false;
    for (const lane of LANES) this.kick(lane);
    this.#pay();
  }

  /** From now on the peer may be written to. */
  connect(endpoint: Endpoint<Portable>): void {
    this.#endpoint = endpoint;
    for (const lane of LANES) this.kick(lane);
    this.#pay();
  }

  /** The peer is not spoken to any more. */
  lose(): void {
    this.#lost = true;
  }

  send(lane: LaneName, source: LaneSource): void {
    this.#out[lane].push(source);
    this.kick(lane);
  }

  kick(lane: LaneName): void {
    if (!this.connected || this.#paused) return;
    try {
      this.#out[lane].kick();
    } catch (error) {
      // The slots are gone: somebody closed the transport.
      queueMicrotask(() => this.#failed(error));
    }
  }

  drain(lane: LaneName): void {
    this.#in[lane].drain();
  }

  /** Records first: they say what payload is for. */
  drainAll(): void {
    for (const lane of LANES) this.#in[lane].drain();
  }

  /** Follows the word until the peer is lost or `signal` fires. */
  async watch(signal: AbortSignal): Promise<void> {
    const { memory, ownSlot, peerRank, onEvent, quiet, onLost, onBroken } = this.#init;
    const options = { peers: [peerRank], timeoutMs: Number.POSITIVE_INFINITY, signal };
    try {
      while (!signal.aborted && !this.#lost) {
        await quiet();
        const lost = await memory.signals.until(ownSlot, { cmp: 'ne', value: this.#seen }, options).then(
          () => undefined,
          (error: unknown) => {
            if (isEpError(error) && error.code === 'EP_PEER_LOST') return error;
            throw error;
          },
        );
        // Of a peer that is lost, too: what it did before it went counts.
        onEvent();
        if (lost === undefined || this.#lost) continue;
        this.#lost = true;
        onLost(lost);
      }
    } catch (error) {
      if (!signal.aborted) onBroken(error);
    }
  }

  /** Acts on what has happened since the last look. False if nothing has. */
  look(): boolean {
    if (this.#lost) return false;
    const value = this.#init.memory.signals.peek(this.#init.ownSlot);
    if (value === this.#seen) return false;
    const happened = Number(BigInt.asUintN(64, value - this.#seen));
    this.#seen = value;
    for (const lane of LANES) {
      const freed = freedOf(happened, lane);
      const filled = filledOf(happened, lane);
      if ((freed | filled) === 0) continue;
      for (let slot = 0; slot < SLOTS_PER_LANE; slot++) {
        if (freed & (1 << slot)) this.#out[lane].freed(slot);
        if (filled & (1 << slot)) this.#in[lane].filled(slot);
      }
      if (freed !== 0) this.kick(lane);
    }
    this.drainAll();
    return true;
  }

  #put(lane: LaneName, slot: number, byteLength: number): void {
    const { memory, layout, peer, self, peerRank, sectionOffset, peerSlot } = this.#init;
    const from = memory.local(sectionOffset + layout.sendOffset(peer, lane, slot), byteLength);
    const to = memory.remote(peerRank, sectionOffset + layout.receiveOffset(self, lane, slot), byteLength);
    const value = BigInt((1 << fullBit(lane, slot)) | this.#owed);
    this.#owed = 0;
    this.#run({ kind: 'put', from, to, signal: { slot: peerSlot, op: 'add', value } });
  }

  #owe(lane: LaneName, slot: number): void {
    this.#owed |= 1 << freeBit(lane, slot);
    if (this.#payScheduled || !this.#isDue(lane)) return;
    this.#payScheduled = true;
    queueMicrotask(() => {
      this.#payScheduled = false;
      this.#pay();
    });
  }

  /**
   * A sender of records with half of its slots need not be woken. HAZARD: not so for payload, whose slots are freed out of order: the one that is owed may be
   * the next of the ring, and the sender stands still however many others are free.
   */
  #isDue(lane: LaneName): boolean {
    if (lane !== 'control') return true;
    let owed = 0;
    for (let slot = 0; slot < SLOTS_PER_LANE; slot++) if (this.#owed & (1 << freeBit(lane, slot))) owed++;
    return owed >= SLOTS_PER_LANE / 2;
  }

  #pay(): void {
    if (this.#owed === 0 || !this.connected || this.#paused) return;
    const { memory, peerSlot } = this.#init;
    const value = BigInt(this.#owed);
    this.#owed = 0;
    this.#run({ kind: 'signal', memory, signal: { slot: peerSlot, op: 'add', value } });
  }

  /**
   * That a request has landed is heard of when the peer frees its slot. Failures are told from a microtask: whoever sends must not find itself in the handling of a loss.
   */
  #run(request: ChannelRequest): void {
    const endpoint = this.#endpoint!;
    try {
      if (endpoint.post !== undefined) {
        endpoint.post(request);
        return;
      }
      const { signal } = request;
      const work =
        request.kind === 'put'
          ? endpoint.put(request.from, request.to, signal && { signal })
          : endpoint.signal(request.memory, request.signal);
      if (work.status !== 'done') work.catch((error) => this.#failed(error));
    } catch (error) {
      queueMicrotask(() => this.#failed(error));
    }
  }

  /**
   * HAZARD: a peer that has said why it goes, and good-bye, may have closed before this rank looked: its words come first, or it is told as lost, and where its
   * memory went before its transport even as one that refuses.
   */
  #failed(error: unknown): void {
    if (this.#lost) return;
    this.#init.onEvent();
    if (this.#lost) return;
    if (isEpError(error) && error.code === 'EP_PEER_LOST') {
      this.#lost = true;
      this.#init.onLost(error);
    } else {
      this.#init.onBroken(
        error ?? new EpError('EP_TRANSPORT_FAILED', `a put to rank ${this.#init.peer} failed without a reason`),
      );
    }
  }
}
