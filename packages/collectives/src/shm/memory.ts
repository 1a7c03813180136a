/** Group memory: parts of this rank's shared segments, which peers map when a call first names them. */
import { checkInteger, createStorage, type DType, elementBytes, type Storage, viewStorage } from '@ep/core';
import { type NativeCollectiveGroup, native } from '@ep/native';
import type { Elements } from '../engine.js';

/** A segment costs every peer a mapping: small allocations share one. */
const SLAB_BYTES = 4 * 1024 * 1024;
const LARGEST_IN_SLAB = SLAB_BYTES / 4;
const ALIGNMENT = 64;

/** Of ordinary memory. */
export const NO_ALLOCATION = -1;

export class GroupMemory {
  #group: NativeCollectiveGroup;
  readonly #allocations = new Map<ArrayBufferLike, number>();
  #slab: ArrayBuffer | undefined;
  #used = 0;
  /** The last buffer asked for: training loops use the same tensors again and again. */
  #known: ArrayBufferLike | undefined;
  #knownAllocation = NO_ALLOCATION;

  constructor(group: NativeCollectiveGroup) {
    this.#group = group;
  }

  /** Goes on with a group that has taken the memory over. */
  move(group: NativeCollectiveGroup): void {
    this.#group = group;
  }

  allocate<D extends DType>(dtype: D, length: number): Storage[D] {
    // Before anything is taken: what a refused length took would lie over the next.
    checkInteger(length, 'length', 'allocate', 0);
    if (length === 0) return createStorage(dtype, 0);
    const byteLength = length * elementBytes(dtype);
    if (byteLength > LARGEST_IN_SLAB) return viewStorage(dtype, this.#segment(byteLength), 0, length);
    if (this.#slab === undefined || this.#used + byteLength > SLAB_BYTES) {
      this.#slab = this.#segment(SLAB_BYTES);
      this.#used = 0;
    }
    const byteOffset = this.#used;
    this.#used += Math.ceil(byteLength / ALIGNMENT) * ALIGNMENT;
    return viewStorage(dtype, this.#slab, byteOffset, length);
  }

  /** The allocation that the elements lie in, or `NO_ALLOCATION`; their place in it is their `byteOffset`. */
  allocationOf(elements: Elements): number {
    const { buffer } = elements;
    if (buffer !== this.#known) {
      this.#known = buffer;
      this.#knownAllocation = this.#allocations.get(buffer) ?? NO_ALLOCATION;
    }
    return this.#knownAllocation;
  }

  /** Detaches everything handed out, so that a use after close is inert. */
  release(): void {
    const { binding } = native();
    for (const buffer of this.#allocations.keys()) binding.detach(buffer as ArrayBuffer);
    this.#allocations.clear();
    this.#known = undefined;
    this.#slab = undefined;
  }

  #segment(byteLength: number): ArrayBuffer {
    const allocation = this.#group.allocate(byteLength);
    const buffer = this.#group.window(allocation);
    this.#allocations.set(buffer, allocation);
    return buffer;
  }
}
