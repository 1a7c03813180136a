/** Host memory that native code owns: kernels read it without a copy, whatever JS does with its views. */
import { checkAttached, checkInteger, type DType, type Storage } from '@ep/core';
import type { NativeHostMemory, NativeOperand } from './binding.js';
import { native } from './native.js';

/** Where the bytes of a typed array live natively, so that a kernel can use them in place. */
export interface NativePlace {
  readonly operand: NativeOperand;
  /** Bytes of the array's first element into the operand. */
  readonly byteOffset: number;
}

const places = new WeakMap<ArrayBufferLike, { readonly operand: NativeOperand; readonly base: number }>();

/** Remembers that a window is backed by a native operand; `base` is the window's offset into it. */
export function registerWindow(buffer: ArrayBuffer, operand: NativeOperand, base: number): void {
  places.set(buffer, { operand, base });
}

/**
 * Undefined for ordinary JS memory: that is copied before a kernel uses it. Throws `EP_DETACHED` for a view whose buffer is gone, which says of no
 * place where it was, and `EP_INVALID_ARGUMENT` for what is no typed array.
 */
export function nativePlaceOf(view: Storage[DType]): NativePlace | undefined {
  checkAttached(view, 'nativePlaceOf');
  const place = places.get(view.buffer);
  return place && { operand: place.operand, byteOffset: place.base + view.byteOffset };
}

/** An ArrayBuffer holds at most 4 GiB; larger memories are viewed through windows. */
export const LARGEST_WINDOW = 2 ** 32;

/**
 * Zeroed, page-aligned host memory as one ArrayBuffer (at most 4 GiB). Freed when neither JS nor a kernel uses it any more.
 *
 * All its pages are taken before this returns, so that a lack of memory is `EP_MEMORY_LIMIT` here and not a kill at the first touch: some 0.1 to 0.4 s
 * per GiB, on this thread. Allocate once, not per step. Throws `EP_INVALID_ARGUMENT` for more than an ArrayBuffer holds, before any page is taken.
 */
export function allocateHost(byteLength: number): ArrayBuffer {
  checkInteger(byteLength, 'byteLength', 'allocateHost', 0, LARGEST_WINDOW);
  const memory: NativeHostMemory = new (native().binding.HostMemory)(byteLength);
  const buffer = memory.window(0, byteLength);
  registerWindow(buffer, memory, 0);
  return buffer;
}
