/** Atomic operations on one element of a PE, sequentially consistent. 64-bit values are bigints; safe integers are taken too. */
import type { Rank } from '@ep/core';
import { type AtomicDType, type ExtendedAtomicDType, wordCodec } from './element.js';
import { elementOffset, type Space } from './space.js';
import type { Element, SymmetricArray } from './symmetric.js';

/** Codes of the native call, see `NativeSymmetricMemory.atomic`. */
const OPS = { fetch: 0, set: 1, add: 2, and: 3, or: 4, xor: 5, swap: 6, compareSwap: 7 } as const;
type Operation = keyof typeof OPS;

export function atomics(space: Space) {
  const { native } = space;

  function run<D extends ExtendedAtomicDType>(
    op: Operation,
    floats: boolean,
    dest: SymmetricArray<D>,
    operand: Element<D> | number,
    expected: Element<D> | number,
    pe: Rank,
    index: number,
  ): Element<D> {
    const offset = elementOffset(space, dest, index, op);
    const codec = wordCodec(dest.dtype, floats, op);
    const word = codec.encode(operand, op);
    const other = op === 'compareSwap' ? codec.encode(expected, op) : 0;
    return codec.decode(native.atomic(space.pe(pe, op), offset, codec.width, OPS[op], word, other));
  }

  /** Makes the two forms of an operation that takes one value. */
  const fetching = (op: Operation) =>
    function fetchOp<D extends AtomicDType>(
      dest: SymmetricArray<D>,
      value: Element<D> | number,
      pe: Rank,
      index = 0,
    ): Element<D> {
      return run(op, false, dest, value, 0, pe, index);
    };
  const silent = (op: Operation) =>
    function silentOp<D extends AtomicDType>(
      dest: SymmetricArray<D>,
      value: Element<D> | number,
      pe: Rank,
      index = 0,
    ): void {
      run(op, false, dest, value, 0, pe, index);
    };

  return {
    atomicFetch<D extends ExtendedAtomicDType>(source: SymmetricArray<D>, pe: Rank, index = 0): Element<D> {
      return run('fetch', true, source, 0, 0, pe, index);
    },
    atomicSet<D extends ExtendedAtomicDType>(
      dest: SymmetricArray<D>,
      value: Element<D> | number,
      pe: Rank,
      index = 0,
    ): void {
      run('set', true, dest, value, 0, pe, index);
    },
    /** Returns the value before. */
    atomicSwap<D extends ExtendedAtomicDType>(
      dest: SymmetricArray<D>,
      value: Element<D> | number,
      pe: Rank,
      index = 0,
    ): Element<D> {
      return run('swap', true, dest, value, 0, pe, index);
    },
    /** Stores `value` if the element equals `condition`. Returns the value before. */
    atomicCompareSwap<D extends AtomicDType>(
      dest: SymmetricArray<D>,
      condition: Element<D> | number,
      value: Element<D> | number,
      pe: Rank,
      index = 0,
    ): Element<D> {
      return run('compareSwap', false, dest, value, condition, pe, index);
    },
    atomicInc<D extends AtomicDType>(dest: SymmetricArray<D>, pe: Rank, index = 0): void {
      run('add', false, dest, 1, 0, pe, index);
    },
    atomicFetchInc<D extends AtomicDType>(dest: SymmetricArray<D>, pe: Rank, index = 0): Element<D> {
      return run('add', false, dest, 1, 0, pe, index);
    },
    /** Wraps around. */
    atomicAdd: silent('add'),
    atomicFetchAdd: fetching('add'),
    atomicAnd: silent('and'),
    atomicFetchAnd: fetching('and'),
    atomicOr: silent('or'),
    atomicFetchOr: fetching('or'),
    atomicXor: silent('xor'),
    atomicFetchXor: fetching('xor'),
  };
}
