/** The demo's tensors, made on the host. */
import { createStorage, decode, elementBytes, encode, type Storage, type Tensor, tensor } from '@ep/core';
import type { AttentionDType, AttentionShape } from '@ep/cuda-kernels';
import { allocateHost } from '@ep/native';

export type RowKind = 'q' | 'k' | 'v' | 'dO';

/** Rows of the demo's tensors, made from a seed: any rank can make any row of any document. */
export interface RowSource {
  /** Writes `count` rows of a document's tensor, from its token `from` on: [count, heads, head dimension]. */
  fill(kind: RowKind, document: number, from: number, count: number, into: Float32Array): void;
}

export interface RowsInput {
  readonly shape: AttentionShape;
  readonly source: RowSource;
}

/** Zeroed rows in memory that kernels use in place. */
export function hostRows<D extends AttentionDType | 'f32'>(dtype: D, shape: readonly number[]): Tensor<D> {
  const count = shape.reduce((product, extent) => product * extent, 1);
  const empty = createStorage(dtype, 0);
  const Carrier = empty.constructor as new (buffer: ArrayBuffer, byteOffset: number, length: number) => Storage[D];
  return tensor(dtype, shape, new Carrier(allocateHost(Math.max(64, count * elementBytes(dtype))), 0, count));
}

function store(dtype: AttentionDType, values: Float32Array, into: Tensor<AttentionDType>, at: number): void {
  if (dtype === 'f32') (into.data as Float32Array).set(values, at);
  else (into.data as Uint16Array).set(encode('bf16', values), at);
}

export function asFloats(dtype: AttentionDType, data: Storage[AttentionDType]): Float32Array {
  return dtype === 'f32' ? (data as Float32Array) : Float32Array.from(decode('bf16', data as Uint16Array));
}

const rowShapeOf = (shape: AttentionShape, kind: RowKind): readonly [number, number] =>
  kind === 'k' || kind === 'v' ? [shape.kvHeads, shape.headDim] : [shape.queryHeads, shape.headDim];

/** Rows of one document part after the other, as they lie on a home rank, or a whole document from its start. */
export function generate(
  { shape, source }: RowsInput,
  kind: RowKind,
  pieces: readonly { document: number; from: number; count: number }[],
): Tensor<AttentionDType> {
  const rowShape = rowShapeOf(shape, kind);
  const rowElements = rowShape[0] * rowShape[1];
  const rows = pieces.reduce((sum, piece) => sum + piece.count, 0);
  const made = hostRows(shape.dtype, [rows, ...rowShape]);
  const block = 256;
  const values = new Float32Array(block * rowElements);
  let row = 0;
  for (const { document, from, count } of pieces) {
    for (let done = 0; done < count; done += block) {
      const some = Math.min(block, count - done);
      const window = values.subarray(0, some * rowElements);
      source.fill(kind, document, from + done, some, window);
      store(shape.dtype, window, made, row * rowElements);
      row += some;
    }
  }
  return made;
}
