/** Typed arrays that exist on every PE at the same place of the symmetric heap. */
import { checkInteger, type DType, EpError, elementBytes, type Rank, type Storage } from '@ep/core';
import type { RankMemory } from '@ep/native/ranks';

/** What one element is in JS. */
export type Element<D extends DType> = D extends 'i64' | 'u64' ? bigint : number;

/** An object of the heap; `freed` makes every array on it unusable. */
export interface Block {
  readonly memory: RankMemory;
  readonly byteOffset: number;
  readonly byteLength: number;
  freed: boolean;
}

/** A symmetric array of whatever dtype. */
export interface AnySymmetric {
  readonly dtype: DType;
  readonly length: number;
  readonly byteOffset: number;
  readonly bytesPerElement: number;
  readonly local: Storage[DType];
  on(pe: Rank | undefined): Storage[DType];
  check(memory: RankMemory, where: string): void;
}

/**
 * `length` elements on every PE. It takes the place of OpenSHMEM's symmetric address: where C passes `&x[i]`, pass `x.subarray(i)`, or the index where
 * a call has one.
 */
export class SymmetricArray<D extends DType = DType> implements AnySymmetric {
  readonly dtype: D;
  readonly length: number;
  /** Bytes into the symmetric heap; the same on every PE. */
  readonly byteOffset: number;
  readonly bytesPerElement: number;
  readonly #block: Block;
  #local: Storage[D] | undefined;

  /** Use `malloc`, `calloc` or `align`. */
  constructor(dtype: D, block: Block, byteOffset: number, length: number) {
    this.dtype = dtype;
    this.#block = block;
    this.byteOffset = byteOffset;
    this.length = length;
    this.bytesPerElement = elementBytes(dtype);
  }

  get byteLength(): number {
    return this.length * this.bytesPerElement;
  }

  /** This PE's elements. Detached by `finalize()`. */
  get local(): Storage[D] {
    this.#local ??= this.on(undefined);
    return this.#local;
  }

  /** Elements `begin` to `end` (not included) of the same object. Throws `EP_INVALID_ARGUMENT` outside of it. */
  subarray(begin: number, end: number = this.length): SymmetricArray<D> {
    checkInteger(begin, 'begin', 'subarray', 0, this.length);
    checkInteger(end, 'end', 'subarray', begin, this.length);
    return new SymmetricArray(this.dtype, this.#block, this.byteOffset + begin * this.bytesPerElement, end - begin);
  }

  /** A PE's elements as a typed array on its memory; this PE's own unless given. */
  on(pe: Rank | undefined): Storage[D] {
    const { memory } = this.#block;
    this.check(memory, 'view');
    if (pe === undefined) return memory.view(this.dtype, this.byteOffset, this.length);
    return memory.peerView(pe, this.dtype, this.byteOffset, this.length);
  }

  /** Throws `EP_INVALID_ARGUMENT` unless this is an object of that heap, `EP_CLOSED` if it was freed. */
  check(memory: RankMemory, where: string): void {
    if (this.#block.memory !== memory) {
      throw new EpError('EP_INVALID_ARGUMENT', `${where}: the symmetric array belongs to another symmetric heap`);
    }
    if (this.#block.freed) {
      throw new EpError(
        'EP_CLOSED',
        `${where}: the symmetric array of ${this.length} ${this.dtype} at heap offset ${this.#block.byteOffset} was freed`,
      );
    }
  }

  /** The object that this array is the whole of; undefined for a part of one. */
  get block(): Block | undefined {
    const { byteOffset, byteLength } = this.#block;
    return byteOffset === this.byteOffset && byteLength === this.byteLength ? this.#block : undefined;
  }
}
