/**
 * Put and get. Each has landed when its call returns, so the non-blocking forms are the same functions; `quiet()` and `fence()` order them and stores
 * through `ptr()`.
 */
import { checkInteger, type DType, type Rank, type Storage } from '@ep/core';
import { scratchElement, storeElement } from './element.js';
import { checkFits, checkSymmetric, elementOffset, type LocalArray, localElements, type Space } from './space.js';
import type { Element, SymmetricArray } from './symmetric.js';

/** Elements that a strided access spans. */
const span = (count: number, stride: number): number => (count === 0 ? 0 : (count - 1) * stride + 1);

interface Indexed {
  [index: number]: number | bigint;
}

function copyStrided(to: Indexed, toStride: number, from: Indexed, fromStride: number, count: number): void {
  for (let i = 0; i < count; i++) to[i * toStride] = from[i * fromStride]!;
}

export function rma(space: Space) {
  const { memory, native } = space;

  /** Copies all elements of `source`, an ordinary or a symmetric array, to the beginning of `dest` on `pe`. */
  function put<D extends DType>(dest: SymmetricArray<D>, source: LocalArray<D>, pe: Rank): void {
    checkSymmetric(space, dest, 'put');
    const from = localElements(space, dest.dtype, source, 'put');
    checkFits(from.length, dest.length, 'put');
    native.putBytes(space.pe(pe, 'put'), dest.byteOffset, from);
  }

  /** Copies all elements of `source` on `pe` to the beginning of `dest`, an ordinary or a symmetric array. */
  function get<D extends DType>(dest: LocalArray<D>, source: SymmetricArray<D>, pe: Rank): void {
    checkSymmetric(space, source, 'get');
    const into = localElements(space, source.dtype, dest, 'get');
    checkFits(source.length, into.length, 'get');
    const exact = into.length === source.length ? into : into.subarray(0, source.length);
    native.getBytes(space.pe(pe, 'get'), source.byteOffset, exact);
  }

  function checkStrides(where: string, destStride: number, sourceStride: number, count: number): void {
    checkInteger(destStride, 'destStride', where, 1);
    checkInteger(sourceStride, 'sourceStride', where, 1);
    checkInteger(count, 'count', where);
  }

  return {
    put,
    /** As `put`: it has landed when the call returns, which a non-blocking put may. */
    putNbi: put,
    get,
    /** As `get`. */
    getNbi: get,

    /** `count` elements, every `sourceStride`-th of `source` to every `destStride`-th of `dest` on `pe`. Strides in elements. */
    iput<D extends DType>(
      dest: SymmetricArray<D>,
      source: LocalArray<D>,
      destStride: number,
      sourceStride: number,
      count: number,
      pe: Rank,
    ): void {
      checkStrides('iput', destStride, sourceStride, count);
      checkSymmetric(space, dest, 'iput');
      const from = localElements(space, dest.dtype, source, 'iput');
      checkFits(span(count, destStride), dest.length, 'iput');
      checkFits(span(count, sourceStride), from.length, 'iput: source');
      copyStrided(dest.on(space.pe(pe, 'iput')) as Indexed, destStride, from as Indexed, sourceStride, count);
      // Stores through a window wake nobody by themselves.
      native.fence();
    },

    /** The other way round: from `source` on `pe` to `dest` here. */
    iget<D extends DType>(
      dest: LocalArray<D>,
      source: SymmetricArray<D>,
      destStride: number,
      sourceStride: number,
      count: number,
      pe: Rank,
    ): void {
      checkStrides('iget', destStride, sourceStride, count);
      checkSymmetric(space, source, 'iget');
      const into = localElements(space, source.dtype, dest, 'iget');
      checkFits(span(count, destStride), into.length, 'iget');
      checkFits(span(count, sourceStride), source.length, 'iget: source');
      native.fence();
      copyStrided(into as Indexed, destStride, source.on(space.pe(pe, 'iget')) as Indexed, sourceStride, count);
    },

    /** Stores one element on `pe`. Integers wrap, as in typed arrays. */
    p<D extends DType>(dest: SymmetricArray<D>, value: Element<D>, pe: Rank, index = 0): void {
      const offset = elementOffset(space, dest, index, 'p');
      native.putBytes(space.pe(pe, 'p'), offset, storeElement(dest.dtype, value, 'p'));
    },

    /** Reads one element of `pe`. */
    g<D extends DType>(source: SymmetricArray<D>, pe: Rank, index = 0): Element<D> {
      const offset = elementOffset(space, source, index, 'g');
      const storage = scratchElement(source.dtype);
      native.getBytes(space.pe(pe, 'g'), offset, storage);
      return storage[0] as Element<D>;
    },

    /** Load and store access to the elements on `pe`. Detached by `finalize()`; stores need `fence()` or `quiet()` to be seen in order. */
    ptr<D extends DType>(source: SymmetricArray<D>, pe: Rank): Storage[D] {
      checkSymmetric(space, source, 'ptr');
      return source.on(space.pe(pe, 'ptr'));
    },

    /** True if `pe` can be reached by `ptr`: always, all ranks are on this host. Throws for a PE that does not exist. */
    peAccessible(pe: Rank): boolean {
      space.pe(pe, 'peAccessible');
      return !memory.closed;
    },
  };
}
