/** What the operations of one PE share. */
import {
  checkAttached,
  createStorage,
  DTYPES,
  type DType,
  EpError,
  invalid,
  isStorageOf,
  type Rank,
  type Storage,
} from '@ep/core';
import type { NativeSymmetricMemory } from '@ep/native';
import type { Liveness, RankMemory } from '@ep/native/ranks';
import { type AnySymmetric, SymmetricArray } from './symmetric.js';

/** Numbering of PEs: the world's, or a team's. */
export type Numbering = (pe: Rank, where: string) => Rank;

export interface Space {
  readonly memory: RankMemory;
  /** The same memory's native side; its calls throw `EP_CLOSED` after `finalize()`. */
  readonly native: NativeSymmetricMemory;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly liveness: Liveness;
  readonly timeoutMs: number;
  readonly pe: Numbering;
}

const CARRIERS = Object.fromEntries(
  DTYPES.map((dtype) => [dtype, Object.getPrototypeOf(createStorage(dtype, 0))]),
) as Readonly<Record<DType, object>>;

/** Where an operation's elements come from or go to on this PE. */
export type LocalArray<D extends DType> = Storage[D] | SymmetricArray<D>;

/** `EP_INVALID_ARGUMENT` for a wrong element type, `EP_DETACHED` for a buffer that is gone. */
export function localElements<D extends DType>(
  space: Space,
  dtype: D,
  array: LocalArray<D>,
  where: string,
): Storage[D] {
  if (array instanceof SymmetricArray) {
    array.check(space.memory, where);
    if ((array.dtype as DType) === dtype) return array.local;
    throw invalid('dtype', { where, expected: `${dtype}, as the other side has`, found: array.dtype });
  }
  // The comparison of prototypes is what nearly every call needs; the rest is for Buffers, which are Uint8Arrays too.
  const typed = typeof array === 'object' && array !== null;
  if (!typed || (Object.getPrototypeOf(array) !== CARRIERS[dtype] && !isStorageOf(dtype, array)))
    throw invalid('array', { where, expected: `the typed array of ${dtype}`, found: array });
  checkAttached(array as Storage[DType], where);
  return array;
}

export function checkSymmetric(space: Space, array: AnySymmetric, where: string): void {
  if (!(array instanceof SymmetricArray)) {
    throw invalid('array', { where, expected: 'a symmetric array', found: array });
  }
  array.check(space.memory, where);
}

/** Byte offset of one element. */
export function elementOffset(space: Space, array: AnySymmetric, index: number, where: string): number {
  checkSymmetric(space, array, where);
  if (!Number.isInteger(index) || index < 0 || index >= array.length) {
    throw invalid('index', { where, expected: `an integer from 0 to ${array.length - 1}`, found: index });
  }
  return array.byteOffset + index * array.bytesPerElement;
}

export function checkFits(length: number, room: number, where: string): void {
  if (length <= room) return;
  throw new EpError('EP_CAPACITY', `${where}: ${length} elements do not fit the target's ${room}`, {
    context: { where, length, room },
  });
}
