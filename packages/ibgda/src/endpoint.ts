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
  readonly maskedSwap: boolean;
}

/** Bits of a word that `IbgdaEndpoint.compareSwap` looks at, and that it changes. */
export interface SwapMasks {
  readonly compare?: bigint;
  readonly swap?: bigint;
}

/** Requests are carried out in the order in which they were made, so signals are of `prior` order whichever was asked for. */
export class IbgdaEndpoint extends NicEndpoint<IbgdaNeeds> {
  readonly #nic: NativeIbgdaNic;
  readonly #atomics: boolean;
  readonly #maskedSwap: boolean;
  readonly #words = new AtomicWords();

  constructor(init: IbgdaEndpointInit) {
    const { nic, peer, context, atomics, maskedSwap } = init;
    super({ ...init, broken: (where) => pairError(where, peer, nic.failure(peer), context.life(peer)) });
    this.#nic = nic;
    this.#atomics = atomics;
    this.#maskedSwap = maskedSwap;
  }

  /**
   * Adds to a word of 8 bytes, at a multiple of 8, of the peer, modulo 2^64; resolves with its old value. Atomic against other atomics of NICs; of software NICs also
   * against processors. Rejects with `EP_UNSUPPORTED` where `capabilities.needs` lacks `atomics`.
   */
  readonly fetchAdd = (to: RemoteRegion, add: bigint): Work<bigint> =>
    this.#atomic('fetchAdd', to, (memory, word) =>
      this.#nic.fetchAdd(memory, this.peer, to.byteOffset, word.memory, word.byteOffset, BigInt.asUintN(64, add)),
    );

  /**
   * As `fetchAdd`, but stores `swap` if the word is `compare`. With `masks`, only the bits of `masks.compare` are compared and those of `masks.swap` stored (all bits unless given);
   * that is two blocks of the ring and a third to end them: `EP_UNSUPPORTED` where `port.maskedSwap` is false, for a depth below 8, say.
   */
  readonly compareSwap = (to: RemoteRegion, compare: bigint, swap: bigint, masks?: SwapMasks): Work<bigint> =>
    this.#atomic('compareSwap', to, (memory, { memory: target, byteOffset }) => {
      const word = (value: bigint): bigint => BigInt.asUintN(64, value);
      const bits =
        masks === undefined ? ([] as const) : ([word(masks.compare ?? -1n), word(masks.swap ?? -1n)] as const);
      if (bits.length > 0 && !this.#maskedSwap) {
        throw new EpError(
          'EP_UNSUPPORTED',
          'compareSwap: the NIC does not compare and swap some bits of a word, or the depth is below 8',
        );
      }
      return this.#nic.compareSwap(
        memory,
        this.peer,
        to.byteOffset,
        target,
        byteOffset,
        word(compare),
        word(swap),
        ...bits,
      );
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
