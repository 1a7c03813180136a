/**
 * Bytes of messages between tensors of GPUs. Who sends what to whom, ranks agree on by records (portable/messages.ts); here the bytes go, once the receiver has granted them: the
 * sender copies a piece into a ring of its own staging memory, of which each peer has one, and says so; the receiver copies it out of there, and gives the range back.
 *
 * HAZARD: nothing here waits on a device for a peer. A kernel or copy that did would hold up what lies behind it on its stream, and streams that GPUs run one behind the other; ranks
 * that post messages in different orders would wait for each other for ever.
 */
import { EpError } from '@ep/core';
import { codeOfStatus, type GpuQueue, type NativeGpuOperand, type NativeGpuStream, native } from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import type { PieceRecord } from '../portable/records.js';
import type { DeviceElements } from './elements.js';
import { Ring } from './ring.js';

/** A tensor of a message. */
export interface Cargo {
  readonly data: DeviceElements;
  /** What lay on the group's stream when the message was posted has run. */
  readonly ready: Promise<void>;
}

/** What the peer has asked for. */
export interface Shipment {
  readonly cargo: Cargo;
  /** A piece lies in staging memory: the peer is told. */
  readonly onPiece: (piece: Omit<PieceRecord, 'kind' | 'id'>) => void;
  /** The peer has all of it. */
  readonly onConsumed: () => void;
  readonly onFailed: (error: unknown) => void;
  /** The tensor is read until `copy` has ended. */
  readonly hold: (copy: Promise<unknown>) => void;
}

interface Underway {
  readonly shipment: Shipment;
  sent: number;
  /** Pieces that the peer has not given back. */
  unread: number;
  cut: boolean;
}

interface Outbox {
  readonly ring: Ring;
  readonly queue: Underway[];
  /** By offset in the ring: whose piece lies there, and may be read by the peer. */
  readonly told: Map<number, Underway>;
}

export interface FreightInit {
  readonly memory: DeviceMemory;
  /** Rings of this rank's part, and of everybody's. */
  readonly byteOffset: number;
  readonly ringBytes: number;
  /** This rank, of the group. */
  readonly rank: number;
  /** World rank of each member. */
  readonly ranks: readonly number[];
  /** Of the group: messages go behind what lies on it when they are posted. */
  readonly queue: GpuQueue;
  /** That messages are copied on, beside what was put on the group's stream after them. Stays the caller's. */
  readonly copies: NativeGpuStream;
}

export class Freight {
  readonly #init: FreightInit;
  readonly #own: NativeGpuOperand;
  /** Address of each member's part, from here. */
  readonly #parts: readonly bigint[];
  readonly #outboxes: readonly Outbox[];
  readonly #copies = new Set<Promise<void>>();

  constructor(init: FreightInit) {
    const { memory, ranks, ringBytes } = init;
    this.#init = init;
    this.#own = memory.nativeMemory('messages');
    this.#parts = ranks.map((peer) => memory.address(peer));
    this.#outboxes = ranks.map(() => ({ ring: new Ring(ringBytes), queue: [], told: new Map() }));
  }

  /** Of a message that is being posted. Throws `EP_INVALID_ARGUMENT` for what is no memory of the group's GPU. */
  load(data: DeviceElements): Cargo {
    const { library, device } = this.#init.memory;
    if (data.device !== device) {
      throw new EpError(
        'EP_INVALID_ARGUMENT',
        `message: a tensor of GPU ${data.device}, the group is of GPU ${device}`,
      );
    }
    const { operand, byteOffset } = data.place;
    if (typeof operand === 'bigint' && data.length > 0) {
      const { bytes = 0, why } = library.find(device, operand);
      if (bytes < byteOffset + data.byteLength) {
        const found = why ?? `${bytes} bytes from there on, of ${byteOffset + data.byteLength}`;
        throw new EpError('EP_INVALID_ARGUMENT', `message: address ${operand} of GPU ${device}: ${found}`);
      }
    }
    const ready = this.#init.queue.follow((stream) => stream.follow(-1)).then(succeeded);
    // Whoever needs it hears of its failure.
    ready.catch(() => {});
    return { data, ready };
  }

  /** Begins to send. */
  send(peer: number, shipment: Shipment): { readonly cut: () => void } {
    const underway: Underway = { shipment, sent: 0, unread: 0, cut: false };
    const outbox = this.#outboxes[peer]!;
    shipment.cargo.ready.then(() => {
      outbox.queue.push(underway);
      this.#kick(outbox);
    }, shipment.onFailed);
    const cut = (): void => {
      underway.cut = true;
    };
    return { cut };
  }

  /** The peer has read what lay at `at`. */
  onTaken(peer: number, at: number): void {
    const outbox = this.#outboxes[peer]!;
    const underway = outbox.told.get(at);
    if (underway === undefined) return;
    outbox.told.delete(at);
    underway.unread--;
    this.#giveBack(outbox, at);
    const { shipment, sent, unread, cut } = underway;
    if (!cut && unread === 0 && sent === shipment.cargo.data.byteLength) shipment.onConsumed();
  }

  /** Copies a piece that lies in the peer's staging memory to where it belongs. Resolves when that may be used again. */
  receive(peer: number, { at, byteOffset, bytes }: PieceRecord, { data }: Cargo): Promise<void> {
    const from = this.#parts[peer]! + BigInt(this.#ringOffset(this.#init.rank) + at);
    return this.#copy(data.place.operand, data.place.byteOffset + byteOffset, from, 0, bytes);
  }

  /** From one tensor of this rank to another, as much as the first has. Both are ready. */
  pass({ data: from }: Cargo, { data: to }: Cargo): Promise<void> {
    return this.#copy(
      to.place.operand,
      to.place.byteOffset,
      from.place.operand,
      from.place.byteOffset,
      from.byteLength,
    );
  }

  /** When no message is under way any more. */
  async close(): Promise<void> {
    await Promise.allSettled(this.#copies);
  }

  #ringOffset(peer: number): number {
    const { byteOffset, ringBytes } = this.#init;
    return byteOffset + peer * ringBytes;
  }

  #giveBack(outbox: Outbox, at: number): void {
    outbox.ring.giveBack(at);
    this.#kick(outbox);
  }

  /** Sends what there is room for. */
  #kick(outbox: Outbox): void {
    const { ring, queue } = outbox;
    for (;;) {
      const underway = queue[0];
      if (underway === undefined) return;
      const left = underway.shipment.cargo.data.byteLength - underway.sent;
      if (underway.cut || left === 0) {
        queue.shift();
        continue;
      }
      const bytes = Math.min(left, ring.most);
      const at = ring.take(bytes);
      if (at === undefined) return;
      this.#put(outbox, underway, at, bytes);
    }
  }

  #put(outbox: Outbox, underway: Underway, at: number, bytes: number): void {
    const { shipment, sent: byteOffset } = underway;
    const { place } = shipment.cargo.data;
    underway.sent += bytes;
    underway.unread++;
    const ringAt = this.#ringOffset(this.#outboxes.indexOf(outbox)) + at;
    const copy = this.#copy(this.#own, ringAt, place.operand, place.byteOffset + byteOffset, bytes).then(
      () => {
        if (underway.cut) return this.#giveBack(outbox, at);
        outbox.told.set(at, underway);
        shipment.onPiece({ at, byteOffset, bytes });
      },
      (error: unknown) => {
        this.#giveBack(outbox, at);
        shipment.onFailed(error);
      },
    );
    shipment.hold(copy);
  }

  #copy(
    to: NativeGpuOperand,
    toOffset: number,
    from: NativeGpuOperand,
    fromOffset: number,
    bytes: number,
  ): Promise<void> {
    const { copies } = this.#init;
    const copy = native()
      .operations.run(() => {
        copies.copy(to, toOffset, from, fromOffset, bytes);
        return copies.follow(-1);
      })
      .then(succeeded);
    this.#copies.add(copy);
    const done = (): void => void this.#copies.delete(copy);
    copy.then(done, done);
    return copy;
  }
}

function succeeded({ status, message }: { readonly status: number; readonly message?: string }): void {
  if (status !== 0) throw new EpError(codeOfStatus(status), `message: ${message ?? 'the stream was cut off'}`);
}
