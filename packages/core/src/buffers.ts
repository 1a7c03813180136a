/** Whether the memory under a typed array is still there: JS buffers can be detached, transferred and resized at any time. */
import type { DType, Storage } from './dtype.js';
import { EpError, invalid } from './errors.js';

type TypedArray = Storage[DType];

/** Node 20 has no `ArrayBuffer.prototype.detached`; making a view on a detached buffer throws, on an empty one it does not. */
export function isDetached(buffer: ArrayBufferLike): boolean {
  if (buffer instanceof SharedArrayBuffer || buffer.byteLength > 0) return false;
  try {
    new Uint8Array(buffer);
    return false;
  } catch {
    return true;
  }
}

/**
 * Throws `EP_DETACHED` if the buffer was detached (transferred), or was resized so that the view lies outside of it, `EP_INVALID_ARGUMENT` for what is
 * no typed array.
 */
export function checkAttached(view: TypedArray, where: string): void {
  if (!ArrayBuffer.isView(view) || (view as ArrayBufferView) instanceof DataView)
    throw invalid('data', { where, expected: 'a typed array', found: view });
  if (view.byteLength > 0) return;
  // Both kinds of dead view report length 0, as a living empty one does; only the dead ones refuse to be read.
  try {
    Uint8Array.prototype.at.call(view, 0);
  } catch {
    const fate = isDetached(view.buffer) ? 'was detached or transferred' : 'was resized below the view';
    throw new EpError('EP_DETACHED', `${where}: the buffer of the ${view[Symbol.toStringTag]} ${fate}`, {
      context: { where },
    });
  }
}

/** Watches over one view for as long as an operation uses its memory. */
export interface BufferPin {
  /** Throws `EP_DETACHED` if the buffer was detached or resized since it was pinned. */
  check(): void;
}

/**
 * For operations that use the memory after the call returned. Throws `EP_DETACHED` for a buffer that is gone, and for one that can be resized:
 * shrinking unmaps pages under whoever reads them. A SharedArrayBuffer is accepted: it cannot be detached and only grows; who else writes
 * to it is the caller's affair.
 */
export function checkFixed(view: TypedArray, where: string): void {
  checkAttached(view, where);
  const { buffer } = view;
  if (!(buffer instanceof SharedArrayBuffer) && (buffer as { readonly resizable?: boolean }).resizable === true) {
    throw new EpError(
      'EP_DETACHED',
      `${where}: the buffer of the ${view[Symbol.toStringTag]} can be resized while it is in use; pass one of fixed length`,
      {
        context: { where },
      },
    );
  }
}

/** As `checkFixed`, and to be asked again when the operation ends. */
export function pinBuffer(view: TypedArray, where: string): BufferPin {
  checkFixed(view, where);
  const { buffer, byteLength, byteOffset } = view;
  return {
    check() {
      if (view.byteLength === byteLength && view.byteOffset === byteOffset && !isDetached(buffer)) return;
      throw new EpError(
        'EP_DETACHED',
        `${where}: the buffer was detached or transferred while it was in use: ${byteLength} bytes before, ${view.byteLength} now`,
        {
          context: { where, before: byteLength, after: view.byteLength },
        },
      );
    },
  };
}
