/** Bytes that came and were not read yet, and readers that stop where they end and go on when more came. */
import { EpError } from '../../errors.js';

const SMALLEST = 4096;

/**
 * One growing buffer, not a list of chunks: a peer that sends a byte at a time would make each of them cost an object. Never larger than twice what
 * it holds, or SMALLEST.
 */
export class ByteQueue {
  #buffer: Buffer = Buffer.allocUnsafeSlow(SMALLEST);
  #start = 0;
  #end = 0;

  get length(): number {
    return this.#end - this.#start;
  }

  /** The next byte, which stays. */
  get first(): number {
    return this.#buffer[this.#start]!;
  }

  push(chunk: Uint8Array): void {
    if (this.#end + chunk.byteLength > this.#buffer.byteLength) this.#makeRoom(chunk.byteLength);
    this.#buffer.set(chunk, this.#end);
    this.#end += chunk.byteLength;
  }

  /** A copy: what is kept must not keep the queue's buffer alive. */
  take(count: number): Buffer {
    const taken = Buffer.allocUnsafeSlow(count);
    this.#buffer.copy(taken, 0, this.#start, this.#start + count);
    this.#start += count;
    return taken;
  }

  takeU8(): number {
    return this.#buffer[this.#start++]!;
  }

  takeU32(): number {
    const value = this.#buffer.readUInt32LE(this.#start);
    this.#start += 4;
    return value;
  }

  takeI64(): bigint {
    const value = this.#buffer.readBigInt64LE(this.#start);
    this.#start += 8;
    return value;
  }

  #makeRoom(more: number): void {
    const length = this.length;
    const needed = Math.max(SMALLEST, length + more);
    const old = this.#buffer;
    // Also shrinks: one large value must not leave its size behind for the life of the connection.
    if (needed > old.byteLength || 4 * needed < old.byteLength)
      this.#buffer = Buffer.allocUnsafeSlow(Math.max(SMALLEST, Math.min(2 * needed, needed + (1 << 20))));
    old.copy(this.#buffer, 0, this.#start, this.#end);
    this.#start = 0;
    this.#end = length;
  }
}

/** Yields where it needs more bytes. */
export type Parsing<T> = Generator<void, T, void>;

export function* readU8(queue: ByteQueue): Parsing<number> {
  while (queue.length < 1) yield;
  return queue.takeU8();
}

export function* readU32(queue: ByteQueue): Parsing<number> {
  while (queue.length < 4) yield;
  return queue.takeU32();
}

export function* readI64(queue: ByteQueue): Parsing<bigint> {
  while (queue.length < 8) yield;
  return queue.takeI64();
}

/** What one message may still hold, so that no announced length is believed before it was checked. */
export interface Budget {
  /** Bytes of one string. */
  readonly stringBytes: number;
  /** Items of one list. */
  readonly items: number;
  /** Bytes of all strings of the message together; counted down. */
  bytes: number;
}

/** `what` is wrong with the bytes that came. The message says who sent them once it reaches a connection. */
export const malformed = (what: string): EpError<'EP_TRANSPORT_FAILED'> =>
  new EpError('EP_TRANSPORT_FAILED', `tcp store: malformed message: ${what}`, { context: { what } });

function checkLength(value: bigint, what: string, most: number): number {
  // Lengths are unsigned: a negative one here is one of 2^63 and more.
  if (value < 0n || value > BigInt(most)) throw malformed(`${what} is ${BigInt.asUintN(64, value)}, at most ${most}`);
  return Number(value);
}

export function* readString(queue: ByteQueue, budget: Budget): Parsing<Buffer> {
  const length = checkLength(yield* readI64(queue), 'the length of a string', budget.stringBytes);
  budget.bytes -= length;
  if (budget.bytes < 0) throw malformed('its strings are longer together than one message may be');
  while (queue.length < length) yield;
  return queue.take(length);
}

export function* readCount(queue: ByteQueue, budget: Budget): Parsing<number> {
  return checkLength(yield* readI64(queue), 'the number of items', budget.items);
}
