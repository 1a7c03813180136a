/** Messages between the engines of one memory group: a send ends when a receive has taken it. */
import { EpError } from '@ep/core';
import type { RecvCall, RecvEnd, SendCall } from '../src/engine.js';

interface Posted<C, T> {
  readonly rank: number;
  readonly call: C;
  readonly resolve: (end: T) => void;
  readonly reject: (error: unknown) => void;
}

const takes = (recv: Posted<RecvCall, RecvEnd>, send: Posted<SendCall, void>): boolean =>
  send.call.peer === recv.rank &&
  send.call.tag === recv.call.tag &&
  (recv.call.peer === -1 || recv.call.peer === send.rank);

export class MemoryMessages {
  readonly #size: number;
  readonly #sends: Posted<SendCall, void>[] = [];
  readonly #receives: Posted<RecvCall, RecvEnd>[] = [];
  readonly #lost = new Set<number>();

  constructor(size: number) {
    this.#size = size;
  }

  send(rank: number, call: SendCall): Promise<void> {
    return this.#post(this.#sends, rank, call, call.peer);
  }

  recv(rank: number, call: RecvCall): Promise<RecvEnd> {
    return this.#post(this.#receives, rank, call, call.peer);
  }

  /** Ends what waits for `rank`, and what it had posted itself. */
  leave(rank: number): void {
    this.#lost.add(rank);
    for (const list of [this.#sends, this.#receives]) {
      for (const posted of [...list]) {
        if (posted.rank === rank) {
          posted.reject(new EpError('EP_ABORTED', `rank ${rank} closed its engine`, { context: { ranks: [rank] } }));
        } else if (this.#hopeless(posted.rank, posted.call.peer)) posted.reject(this.#lostError(posted.call.peer));
      }
    }
  }

  #hopeless(rank: number, peer: number): boolean {
    if (peer !== -1) return this.#lost.has(peer);
    return Array.from({ length: this.#size }, (_, other) => other).every(
      (other) => other === rank || this.#lost.has(other),
    );
  }

  #lostError(peer: number): EpError {
    const lost = peer === -1 ? [...this.#lost].sort((a, b) => a - b) : [peer];
    return new EpError('EP_PEER_LOST', `rank ${lost.join(', ')} died or closed`, { context: { lost } });
  }

  #post<C extends SendCall | RecvCall, T>(list: Posted<C, T>[], rank: number, call: C, peer: number): Promise<T> {
    const { signal, timeoutMs } = call;
    return new Promise<T>((resolve, reject) => {
      if (this.#lost.has(peer)) return reject(this.#lostError(peer));
      const onAbort = (): void => posted.reject(signal?.reason);
      const end = (): void => {
        clearTimeout(timer);
        signal?.removeEventListener('abort', onAbort);
        const at = list.indexOf(posted);
        if (at >= 0) list.splice(at, 1);
      };
      const posted: Posted<C, T> = {
        rank,
        call,
        resolve: (value) => {
          end();
          resolve(value);
        },
        reject: (error) => {
          end();
          reject(error);
        },
      };
      const timer =
        timeoutMs === Number.POSITIVE_INFINITY
          ? undefined
          : setTimeout(() => {
              const awaited = peer === -1 ? [] : [peer];
              const message = `message of tag ${call.tag}: rank ${peer} did not come within ${timeoutMs} ms`;
              posted.reject(new EpError('EP_TIMEOUT', message, { context: { awaited } }));
            }, timeoutMs);
      signal?.addEventListener('abort', onAbort);
      list.push(posted);
      if (signal?.aborted === true) onAbort();
      this.#match();
    });
  }

  #match(): void {
    for (const recv of [...this.#receives]) {
      const send = this.#sends.find((candidate) => takes(recv, candidate));
      if (send !== undefined) this.#pass(send, recv);
    }
  }

  #pass(send: Posted<SendCall, void>, recv: Posted<RecvCall, RecvEnd>): void {
    const [from, to] = [send.call.data, recv.call.data];
    if (from[Symbol.toStringTag] !== to[Symbol.toStringTag] || from.length > to.length) {
      const error = new EpError(
        'EP_MISMATCH',
        `message of tag ${send.call.tag}: rank ${send.rank} sends ${from.length} of ${from[Symbol.toStringTag]}, rank ${recv.rank} takes ${to.length} of ${to[Symbol.toStringTag]}`,
        { context: { ranks: [send.rank, recv.rank], expected: to.length, found: from.length } },
      );
      send.reject(error);
      recv.reject(error);
      return;
    }
    to.set(from as never);
    send.resolve();
    recv.resolve({ source: send.rank, byteLength: from.byteLength });
  }
}
