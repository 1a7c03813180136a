/** Operations towards one peer, on a connection of JS's own. */
import { EpError, type RemoteRegion, type Work } from '@ep/core';
import type { NativeIbgdaNic } from '@ep/native';
import { AtomicEndpoint, type AtomicEndpointInit, wordOf } from '@ep/native/ranks';
import { pairError } from './failure.js';
import type { IbgdaNeeds } from './probe.js';

export interface IbgdaEndpointInit extends Omit<AtomicEndpointInit<IbgdaNeeds>, 'broken' | 'noAtomics'> {
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

const NO_ATOMICS = "the NIC has no atomics of 8 bytes in this machine's byte order";

/**
 * Requests are carried out in the order in which they were made, so signals are of `prior` order whichever was asked for. Atomics are atomic against other atomics of NICs; of software
 * NICs also against processors.
 */
export class IbgdaEndpoint extends AtomicEndpoint<IbgdaNeeds> {
  readonly #nic: NativeIbgdaNic;
  readonly #maskedSwap: boolean;

  constructor(init: IbgdaEndpointInit) {
    const { nic, peer, context, atomics, maskedSwap } = init;
    super({
      ...init,
      noAtomics: atomics ? '' : NO_ATOMICS,
      broken: (where) => pairError(where, peer, nic.failure(peer), context.life(peer)),
    });
    this.#nic = nic;
    this.#maskedSwap = maskedSwap;
  }

  /**
   * With `masks`, only the bits of `masks.compare` are compared and those of `masks.swap` stored (all bits unless given); that is two blocks of the ring and a third to end them:
   * `EP_UNSUPPORTED` where `port.maskedSwap` is false, for a depth below 8, say.
   */
  readonly compareSwap = (to: RemoteRegion, compare: bigint, swap: bigint, masks?: SwapMasks): Work<bigint> => {
    if (masks === undefined) return this.swap(to, compare, swap);
    return this.atomic('compareSwap', to, (memory, { memory: target, byteOffset }) => {
      if (!this.#maskedSwap) {
        throw new EpError(
          'EP_UNSUPPORTED',
          'compareSwap: the NIC does not compare and swap some bits of a word, or the depth is below 8',
        );
      }
      const [where, place] = [to.byteOffset, byteOffset];
      const word = (name: string, value: bigint): bigint => wordOf('compareSwap', name, value);
      const [first, second] = [word('compare', compare), word('swap', swap)];
      const [third, fourth] = [word('masks.compare', masks.compare ?? -1n), word('masks.swap', masks.swap ?? -1n)];
      return this.#nic.compareSwap(memory, this.peer, where, target, place, first, second, third, fourth);
    });
  };
}
