/** Element types. Storage is the raw carrier, so that nobody mistakes bits for values. */

export interface Storage {
  readonly f64: Float64Array;
  readonly f32: Float32Array;
  readonly f16: Uint16Array;
  readonly bf16: Uint16Array;
  readonly f8e4m3: Uint8Array;
  readonly f8e5m2: Uint8Array;
  readonly ue8m0: Uint8Array;
  readonly i64: BigInt64Array;
  readonly u64: BigUint64Array;
  readonly i32: Int32Array;
  readonly u32: Uint32Array;
  readonly i16: Int16Array;
  readonly u16: Uint16Array;
  readonly i8: Int8Array;
  readonly u8: Uint8Array;
}

export type DType = keyof Storage;
