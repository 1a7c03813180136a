/** Atomics of JS on words of a peer, for NICs that may have them. */
import { EpError, invalid, type Need, type RemoteRegion, type Work } from '@ep/core';
import type { NativeOperand, NativeSymmetricMemory } from '../binding.js';
import { type AtomicWord, AtomicWords } from './atomic-words.js';
import { NicEndpoint, type NicEndpointInit, type NicRequests, type PostedRequest } from './nic-endpoint.js';
import { wordOf } from './requests.js';

/** What such an endpoint needs of the addon's NIC: the word's old value lands in `target`. */
export interface NicAtomics extends NicRequests {
  fetchAdd(
    memory: NativeSymmetricMemory,
    peer: number,
    byteOffset: number,
    target: NativeOperand,
    targetOffset: number,
    add: bigint,
  ): PostedRequest;
  compareSwap(
    memory: NativeSymmetricMemory,
    peer: number,
    byteOffset: number,
    target: NativeOperand,
    targetOffset: number,
    compare: bigint,
    swap: bigint,
  ): PostedRequest;
}

export interface AtomicEndpointInit<C extends Need> extends NicEndpointInit<C> {
  readonly nic: NicAtomics;
  /** Why there are no atomics; empty where there are. */
  readonly noAtomics: string;
}

export class AtomicEndpoint<C extends Need> extends NicEndpoint<C> {
  readonly #nic: NicAtomics;
  readonly #noAtomics: string;
  readonly #words = new AtomicWords();

  constructor(init: AtomicEndpointInit<C>) {
    super(init);
    this.#nic = init.nic;
    this.#noAtomics = init.noAtomics;
  }

  /** As `Endpoint.fetchAdd` says; negative numbers subtract. */
  readonly fetchAdd = (to: RemoteRegion, add: bigint): Work<bigint> =>
    this.atomic('fetchAdd', to, (memory, word) => {
      const operand = wordOf('fetchAdd', 'add', add);
      return this.#nic.fetchAdd(memory, this.peer, to.byteOffset, word.memory, word.byteOffset, operand);
    });

  protected swap(to: RemoteRegion, compare: bigint, swap: bigint): Work<bigint> {
    return this.atomic('compareSwap', to, (memory, word) => {
      const [expected, next] = [wordOf('compareSwap', 'compare', compare), wordOf('compareSwap', 'swap', swap)];
      return this.#nic.compareSwap(
        ...([memory, this.peer, to.byteOffset, word.memory, word.byteOffset, expected, next] as const),
      );
    });
  }

  protected atomic(
    op: string,
    to: RemoteRegion,
    post: (memory: NativeSymmetricMemory, word: AtomicWord) => PostedRequest,
  ): Work<bigint> {
    // A word of a request that failed is not given back: the NIC may still write there.
    const word = this.#words.take();
    const begin = (memory: NativeSymmetricMemory): PostedRequest => {
      if (this.#noAtomics !== '') throw new EpError('EP_UNSUPPORTED', `${op}: ${this.#noAtomics}`);
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
