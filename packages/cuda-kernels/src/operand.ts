/** Where a kernel reads a caller's tensor: in place if native code owns the memory, from a copy otherwise. */
import {
  byteRange,
  checkFixed,
  type DType,
  elementCount,
  invalid,
  isStorageOf,
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

/** What a call wants of a source; made once for each part. */
export interface SourceSpec {
  readonly where: string;
  readonly dtype: DType;
  readonly rows: number;
  /** Either will do: rows as they are described, or flattened. */
  readonly shapes: readonly (readonly number[])[];
}

export function sourceSpec(where: string, dtype: DType, rows: number, rowShape: readonly number[]): SourceSpec {
  return {
    where,
    dtype,
    rows,
    shapes: [
      [rows, ...rowShape],
      [rows, elementCount(rowShape)],
    ],
  };
}

function sameShape(a: readonly number[], b: readonly number[]): boolean {
  if (a.length !== b.length) return false;
  for (let axis = 0; axis < a.length; axis++) if (a[axis] !== b[axis]) return false;
  return true;
}

/**
 * Ordinary JS memory is copied at the call: JS may detach or free it while a kernel reads, and nothing could stop the kernel in time. Rows that are
 * not contiguous in themselves are copied, too. Throws `EP_INVALID_ARGUMENT` or `EP_DETACHED`.
 */
export function sourceOperand(source: Tensor | undefined, spec: SourceSpec): SourceOperand {
  const { where, rows } = spec;
  if (source?.shape === undefined) throw invalid('source', { where, expected: 'a tensor', found: source });
  if (source.dtype !== spec.dtype) throw invalid('dtype', { where, expected: spec.dtype, found: source.dtype });
  if (!Array.isArray(source.shape)) throw invalid('shape', { where, expected: 'a list', found: source.shape });
  if (!isStorageOf(source.dtype, source.data)) {
    throw invalid('data', { where, expected: `the typed array of ${source.dtype}`, found: source.data });
  }
  if (!sameShape(source.shape, spec.shapes[0]!) && !sameShape(source.shape, spec.shapes[1]!)) {
    const expected = spec.shapes.map((shape) => `[${shape.join(', ')}]`).join(' or ');
    throw invalid('shape', { where, expected, found: source.shape });
  }
  checkFixed(source.data, where);
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
