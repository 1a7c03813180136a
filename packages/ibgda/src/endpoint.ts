/** Operations towards one peer, on a connection of JS's own. */
import { EpError, invalid, type RemoteRegion, type Work } from '@ep/core';
import type { NativeIbgdaNic, NativeSymmetricMemory } from '@ep/native';
import { NicEndpoint, type NicEndpointInit } from '@ep/native/ranks';
import { type AtomicWord, AtomicWords } from './atomic-words.js';
import { pairError } from './failure.js';
import type { IbgdaNeeds } from './probe.js';

export interface IbgdaEndpointInit extends Omit<NicEndpointInit<IbgdaNeeds>, 'broken'> {
  readonly nic: NativeIbgdaNic;
  /** The NIC has them. */
  readonly atomics: boolean;
}

/** Requests are carried out in the order in which they were made, so signals are of `prior` order whichever was asked for. */
export class IbgdaEndpoint extends NicEndpoint<IbgdaNeeds> {
  readonly #nic: NativeIbgdaNic;
  readonly #atomics: boolean;
  readonly #words = new AtomicWords();

  constructor(init: IbgdaEndpointInit) {
    const { nic, peer, context, atomics } = init;
    super({ ...init, broken: (where) => pairError(where, peer, nic.failure(peer), context.life(peer)) });
    this.#nic = nic;
    this.#atomics = atomics;
  }

  /**
   * Adds to a word of 8 bytes, at a multiple of 8, of the peer, modulo 2^64; resolves with its old value. Atomic against other atomics of NICs; of software NICs also
   * against processors. Rejects with `EP_UNSUPPORTED` where `capabilities.needs` lacks `atomics`.
   */
  readonly fetchAdd = (to: RemoteRegion, add: bigint): Work<bigint> =>
    this.#atomic('fetchAdd', to, (memory, word) =>
      this.#nic.fetchAdd(memory, this.peer, to.byteOffset, word.memory, word.byteOffset, BigInt.asUintN(64, add)),
    );

  /** As `fetchAdd`, but stores `swap` if the word is `compare`. */
  readonly compareSwap = (to: RemoteRegion, compare: bigint, swap: bigint): Work<bigint> =>
    this.#atomic('compareSwap', to, (memory, { memory: target, byteOffset }) => {
      const [expected, made] = [BigInt.asUintN(64, compare), BigInt.asUintN(64, swap)];
      return this.#nic.compareSwap(memory, this.peer, to.byteOffset, target, byteOffset, expected, made);
    });

  #atomic(
    op: string,
    to: RemoteRegion,
    post: (memory: NativeSymmetricMemory, word: AtomicWord) => number,
  ): Work<bigint> {
    // A word of a request that failed is not given back: the NIC may still write there.
    const word = this.#words.take();
    const begin = (memory: NativeSymmetricMemory): number => {
      if (!this.#atomics) {
        throw new EpError('EP_UNSUPPORTED', `${op}: the NIC has no atomics of 8 bytes in this machine's byte order`);
      }
      if (to.byteLength !== 8 || to.byteOffset % 8 !== 0) {
        const found = `${to.byteLength} bytes at ${to.byteOffset}`;
        throw invalid('region', { where: op, expected: '8 bytes at a multiple of 8', found });
      }
      return post(memory, word);
    };
    return this.request(op, to, begin, () => {
      const old = word.read();
      this.#words.give(word);
      return old;
    });
  }
}
