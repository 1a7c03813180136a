/** Messages that have not ended, and when their time begins: at the head of those with the same peer and tag. */

import { EpError, formatRanks } from '@ep/core';
import type { Cargo } from '../device/freight.js';
import type { Data, Elements, RecvCall, RecvEnd, SendCall } from '../engine.js';
import { checkStillLiving } from '../operands.js';
import { listenToAbort } from './abort.js';
import { bytesOf, type Chunk } from './chunks.js';

interface Settle<T> {
  readonly resolve: (value: T) => void;
  readonly reject: (error: unknown) => void;
}

interface Queued {
  /** Those with the same key wait for each other. */
  readonly key: string;
  activate(): void;
}

/** FIFO lists by peer and tag, whose heads are active. */
export class MessageQueues {
  readonly #queues = new Map<string, Queued[]>();

  add(message: Queued): void {
    const queue = this.#queues.get(message.key);
    if (queue === undefined) {
      this.#queues.set(message.key, [message]);
      message.activate();
    } else {
      queue.push(message);
    }
  }

  remove(message: Queued): void {
    const queue = this.#queues.get(message.key);
    const at = queue?.indexOf(message) ?? -1;
    if (queue === undefined || at < 0) return;
    queue.splice(at, 1);
    if (queue.length === 0) this.#queues.delete(message.key);
    else if (at === 0) queue[0]!.activate();
  }
}

abstract class Message<C extends SendCall<Data> | RecvCall<Data>, T> implements Queued {
  readonly call: C;
  readonly key: string;
  /** Takes it out of the books; and tells the peer that it is cut off, where the peer can know of it. */
  onEnd: () => void = () => {};
  onCut: (error: unknown) => void = () => {};
  readonly #kind: 'send' | 'recv';
  readonly #queues: MessageQueues;
  readonly #settle: Settle<T>;
  readonly #stopListening: () => void;
  #timer: NodeJS.Timeout | undefined;
  #ended = false;
  #copies = 0;
  #settleLate: (() => void) | undefined;

  protected constructor(kind: 'send' | 'recv', call: C, queues: MessageQueues, settle: Settle<T>) {
    this.call = call;
    this.#kind = kind;
    this.key = `${kind} ${call.peer} ${call.tag}`;
    this.#queues = queues;
    this.#settle = settle;
    this.#stopListening = listenToAbort(call.signal, () => this.cut(call.signal!.reason));
  }

  enqueue(): void {
    this.#queues.add(this);
  }

  activate(): void {
    const { timeoutMs } = this.call;
    if (timeoutMs === Number.POSITIVE_INFINITY) return;
    this.#timer = setTimeout(() => this.cut(this.timeoutError()), Math.min(timeoutMs, 2 ** 31 - 1));
  }

  protected succeed(value: T): void {
    if (this.#close()) this.#afterCopies(() => this.#settle.resolve(value));
  }

  /** Ends it badly; the peer knows already, or never heard of it. */
  fail(error: unknown): void {
    if (this.#close()) this.#afterCopies(() => this.#settle.reject(error));
  }

  /** HAZARD: a device that copies from or to the caller's tensor does so until `copy` has ended, however the message ends: the caller must not be told before. */
  hold(copy: Promise<unknown>): void {
    this.#copies++;
    const ended = (): void => {
      this.#copies--;
      if (this.#copies === 0) this.#settleLate?.();
    };
    copy.then(ended, ended);
  }

  protected abstract timeoutError(): EpError;

  /** Ends it badly, and tells the peer. */
  cut(error: unknown): void {
    if (this.#ended) return;
    this.fail(error);
    this.onCut(error);
  }

  #afterCopies(settle: () => void): void {
    if (this.#copies === 0) settle();
    else this.#settleLate = settle;
  }

  #close(): boolean {
    if (this.#ended) return false;
    this.#ended = true;
    clearTimeout(this.#timer);
    this.#stopListening();
    this.onEnd();
    this.stop();
    this.#queues.remove(this);
    return true;
  }

  /** The caller has transferred its array. */
  gone(): void {
    const { peer, tag, data } = this.call;
    const what = peer < 0 ? `recv with tag ${tag}` : `${this.#kind} with rank ${peer}, tag ${tag}`;
    try {
      checkStillLiving(data, what);
    } catch (error) {
      this.cut(error);
    }
  }

  /** No byte of it moves any more. */
  protected abstract stop(): void;
}

export class OutgoingMessage extends Message<SendCall<Data>, void> {
  readonly id: number;
  /** As it was offered: an array that is transferred has none. */
  readonly byteLength: number;
  /** Of a tensor on a GPU. */
  readonly cargo: Cargo | undefined;
  /** Once it was granted. */
  sending: { readonly cut: () => void } | undefined;

  constructor(id: number, call: SendCall<Data>, queues: MessageQueues, settle: Settle<void>, cargo?: Cargo) {
    super('send', call, queues, settle);
    this.id = id;
    this.byteLength = call.data.byteLength;
    this.cargo = cargo;
  }

  end(): void {
    this.succeed();
  }

  protected override stop(): void {
    this.sending?.cut();
  }

  protected override timeoutError(): EpError {
    const { peer, tag, timeoutMs } = this.call;
    const what = this.sending === undefined ? 'did not ask for it' : 'did not take all of it';
    return new EpError(
      'EP_TIMEOUT',
      `send to rank ${peer} with tag ${tag}: rank ${peer} ${what} within ${timeoutMs} ms`,
      {
        context: { arrived: [], awaited: [peer], tag, timeoutMs },
      },
    );
  }
}

export class IncomingMessage extends Message<RecvCall<Data>, RecvEnd> {
  /** Bytes that there is room for, as it was posted. */
  readonly room: number;
  /** Into a tensor on a GPU. */
  readonly cargo: Cargo | undefined;
  #source = -1;
  #byteLength = 0;
  #taken = 0;

  constructor(call: RecvCall<Data>, queues: MessageQueues, settle: Settle<RecvEnd>, cargo?: Cargo) {
    super('recv', call, queues, settle);
    this.room = call.data.byteLength;
    this.cargo = cargo;
  }

  match(source: number, byteLength: number): void {
    this.#source = source;
    this.#byteLength = byteLength;
  }

  take({ payload, byteOffset }: Chunk): void {
    const data = this.call.data as Elements;
    if (byteOffset + payload.byteLength > data.byteLength) {
      // Not from within the lane that is received from.
      queueMicrotask(() => this.gone());
      return;
    }
    bytesOf(data).set(payload, byteOffset);
    this.took(payload.byteLength);
  }

  /** So many more bytes lie where they belong. */
  took(byteLength: number): void {
    this.#taken += byteLength;
    if (this.#taken === this.#byteLength) this.end();
  }

  end(): void {
    this.succeed({ source: this.#source, byteLength: this.#byteLength });
  }

  protected override stop(): void {}

  protected override timeoutError(): EpError {
    const { peer, tag, timeoutMs } = this.call;
    const from = peer < 0 ? 'any rank' : formatRanks([peer]);
    const what = this.#source < 0 ? 'nothing came' : `${this.#taken} of ${this.#byteLength} bytes came`;
    return new EpError('EP_TIMEOUT', `recv from ${from} with tag ${tag}: ${what} within ${timeoutMs} ms`, {
      context: { arrived: [], awaited: peer < 0 ? [] : [peer], tag, timeoutMs },
    });
  }
}
