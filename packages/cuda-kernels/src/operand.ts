/** Where a kernel reads a caller's tensor: in place if native code owns the memory, from a copy otherwise. */
import {
  byteRange,
  elementCount,
  invalid,
  isStorageOf,
  pinBuffer,
  rowLayout,
  type Tensor,
  toContiguous,
} from '@ep/core';
import { allocateHost, type NativeOperand, nativePlaceOf } from '@ep/native';

export interface SourceOperand {
  readonly operand: NativeOperand;
  readonly byteOffset: number;
  readonly strideBytes: number;
  /** Bytes that had to be copied first: 0 for memory of `allocateHost` or of a symmetric memory. */
  readonly stagedBytes: number;
}

/**
 * Ordinary JS memory is copied at the call: JS may detach or free it while a kernel reads, and nothing could stop the kernel in time. Rows that are
 * not contiguous in themselves are copied, too. Throws `EP_INVALID_ARGUMENT` or `EP_DETACHED`.
 */
export function sourceOperand(source: Tensor, where: string, rows: number, rowShape: readonly number[]): SourceOperand {
  if (!Array.isArray(source.shape)) throw invalid('shape', { where, expected: 'a list', found: source.shape });
  if (!isStorageOf(source.dtype, source.data)) {
    throw invalid('data', { where, expected: `the typed array of ${source.dtype}`, found: source.data });
  }
  const flat = [rows, elementCount(rowShape)];
  const fits = (wanted: readonly number[]) =>
    wanted.length === source.shape.length && wanted.every((extent, axis) => extent === source.shape[axis]);
  if (!fits([rows, ...rowShape]) && !fits(flat)) {
    throw invalid('shape', {
      where,
      expected: `[${[rows, ...rowShape].join(', ')}] or [${flat.join(', ')}]`,
      found: source.shape,
    });
  }
  pinBuffer(source.data, where);
  // HAZARD: a tensor that was not made by `tensor()` may claim rows that its data does not have; kernels would read behind it.
  const { byteLength } = byteRange(source);
  if (!(byteLength <= source.data.byteLength)) {
    throw invalid('data', {
      where,
      expected: `at least ${byteLength} bytes for its shape and strides`,
      found: source.data,
    });
  }
  const layout = rowLayout(source);
  const place = layout && nativePlaceOf(source.data);
  if (layout !== undefined && place !== undefined) {
    return { operand: place.operand, byteOffset: place.byteOffset, strideBytes: layout.strideBytes, stagedBytes: 0 };
  }
  const packed = toContiguous(source).data;
  const bytes = new Uint8Array(packed.buffer, packed.byteOffset, packed.byteLength);
  const staged = new Uint8Array(allocateHost(bytes.byteLength));
  staged.set(bytes);
  const copy = nativePlaceOf(staged)!;
  return {
    operand: copy.operand,
    byteOffset: copy.byteOffset,
    strideBytes: rows > 0 ? bytes.byteLength / rows : 0,
    stagedBytes: bytes.byteLength,
  };
}
