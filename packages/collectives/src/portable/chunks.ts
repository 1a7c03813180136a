/** Payload cut into slots: a header that says whose, which and where, then the bytes. */
import type { Elements } from '../engine.js';
import type { LaneSource } from './channel.js';
import { CHUNK_HEADER_BYTES } from './layout.js';

export interface Chunk {
  /** Sequence of the collective call, or id of the message. */
  readonly id: number;
  /** Which of the streams of a call between two ranks. */
  readonly stream: number;
  readonly byteOffset: number;
  readonly payload: Uint8Array;
}

export const bytesOf = (elements: Elements): Uint8Array =>
  new Uint8Array(elements.buffer, elements.byteOffset, elements.byteLength);

/** Elements `begin` .. `end` of the same memory. */
export function part<E extends Elements>(elements: E, begin: number, end: number): E {
  return elements.subarray(begin, end) as E;
}

export function readChunk(slot: Uint8Array): Chunk {
  const header = new DataView(slot.buffer, slot.byteOffset, CHUNK_HEADER_BYTES);
  const byteLength = header.getUint32(0, true);
  return {
    id: header.getFloat64(8, true),
    stream: header.getUint32(4, true),
    byteOffset: header.getFloat64(16, true),
    payload: slot.subarray(CHUNK_HEADER_BYTES, CHUNK_HEADER_BYTES + byteLength),
  };
}

export interface StreamInit {
  readonly id: number;
  readonly stream: number;
  readonly bytes: Uint8Array;
  /** How much of it is there already; all unless given. */
  readonly available?: number;
  /** A chunk was handed to the transport. */
  readonly onSent: (byteLength: number) => void;
  /** The peer has read all of it. */
  readonly onConsumed?: () => void;
  /** Its array is no longer there: nothing more is sent. */
  readonly onGone: () => void;
}

/** One run of bytes towards one peer, in order. Its bytes are read when a slot is free, so they must stay until it is finished. */
export class Stream implements LaneSource {
  readonly #init: StreamInit;
  readonly #byteLength: number;
  #available: number;
  #sent = 0;
  #unread = 0;
  #cut = false;

  constructor(init: StreamInit) {
    this.#init = init;
    this.#byteLength = init.bytes.byteLength;
    this.#available = init.available ?? this.#byteLength;
  }

  get finished(): boolean {
    return this.#cut || this.#sent === this.#byteLength;
  }

  get sentBytes(): number {
    return this.#sent;
  }

  /** More of the bytes may be sent: those before `byteOffset`. */
  advance(byteOffset: number): void {
    this.#available = byteOffset;
  }

  /** The rest is not sent. */
  cut(): void {
    this.#cut = true;
  }

  readonly fill = (slot: Uint8Array): number => {
    const { id, stream, bytes, onSent, onGone } = this.#init;
    if (bytes.byteLength !== this.#byteLength) {
      this.cut();
      // Not from within the lane that is sending.
      queueMicrotask(onGone);
      return 0;
    }
    const byteLength = Math.min(slot.byteLength - CHUNK_HEADER_BYTES, this.#available - this.#sent);
    if (byteLength <= 0) return 0;
    const header = new DataView(slot.buffer, slot.byteOffset, CHUNK_HEADER_BYTES);
    header.setUint32(0, byteLength, true);
    header.setUint32(4, stream, true);
    header.setFloat64(8, id, true);
    header.setFloat64(16, this.#sent, true);
    slot.set(bytes.subarray(this.#sent, this.#sent + byteLength), CHUNK_HEADER_BYTES);
    this.#sent += byteLength;
    this.#unread++;
    onSent(byteLength);
    return CHUNK_HEADER_BYTES + byteLength;
  };

  readonly consumed = (): void => {
    this.#unread--;
    if (this.#unread === 0 && !this.#cut && this.finished) this.#init.onConsumed?.();
  };
}

/** What becomes of the chunks of one incoming stream. */
export interface Sink {
  /** `release` is called as soon as the payload is no longer needed. */
  readonly accept: (chunk: Chunk, release: () => void) => void;
  /** Something of the stream has yet to come. */
  readonly lacks: boolean;
  /** Gives back what it holds. */
  readonly drop: () => void;
}

/** Copies to where the bytes belong. */
export class CopySink implements Sink {
  readonly #target: Uint8Array;
  readonly #onComplete: () => void;
  #left: number;

  constructor(target: Uint8Array, onComplete: () => void) {
    this.#target = target;
    this.#left = target.byteLength;
    this.#onComplete = onComplete;
  }

  get lacks(): boolean {
    return this.#left > 0;
  }

  readonly accept = (chunk: Chunk, release: () => void): void => {
    this.#target.set(chunk.payload, chunk.byteOffset);
    this.#left -= chunk.payload.byteLength;
    release();
    if (this.#left === 0) this.#onComplete();
  };

  readonly drop = (): void => {};
}
