/** One element as the word that crosses into native code. */
import { createStorage, type DType, invalid } from '@ep/core';
import type { Element } from './symmetric.js';

export type AtomicDType = 'i32' | 'u32' | 'i64' | 'u64';
/** For fetch, set and swap. */
export type ExtendedAtomicDType = AtomicDType | 'f32' | 'f64';

export interface WordCodec<D extends DType> {
  readonly width: 4 | 8;
  encode(value: Element<D> | number, where: string): number | bigint;
  decode(word: number | bigint): Element<D>;
}

const f32 = new Float32Array(1);
const f32Bits = new Uint32Array(f32.buffer);
const f64 = new Float64Array(1);
const f64Bits = new BigUint64Array(f64.buffer);

function encode32(value: number | bigint, where: string): number {
  if (typeof value === 'number' && Number.isInteger(value) && value >= -(2 ** 31) && value < 2 ** 32)
    return value >>> 0;
  throw invalid('value', { where, expected: 'a 32-bit integer', found: value });
}

const I64_LEAST = -(2n ** 63n);
const U64_END = 2n ** 64n;

/** Numbers are taken too where they are exact. */
export function encode64(value: number | bigint, where: string): bigint {
  if (typeof value === 'bigint' && value >= I64_LEAST && value < U64_END) return value;
  if (typeof value === 'number' && Number.isSafeInteger(value)) return BigInt(value);
  throw invalid('value', { where, expected: 'a 64-bit bigint, or a safe integer', found: value });
}

function checkNumber(value: number | bigint, where: string): number {
  if (typeof value === 'number') return value;
  throw invalid('value', { where, expected: 'a number', found: value });
}

const CODECS: { readonly [D in ExtendedAtomicDType]: WordCodec<D> } = {
  i32: { width: 4, encode: encode32, decode: (word) => Number(word) | 0 },
  u32: { width: 4, encode: encode32, decode: (word) => Number(word) },
  i64: { width: 8, encode: encode64, decode: (word) => BigInt.asIntN(64, word as bigint) },
  u64: { width: 8, encode: encode64, decode: (word) => word as bigint },
  f32: {
    width: 4,
    encode(value, where) {
      f32[0] = checkNumber(value, where);
      return f32Bits[0]!;
    },
    decode(word) {
      f32Bits[0] = Number(word);
      return f32[0]!;
    },
  },
  f64: {
    width: 8,
    encode(value, where) {
      f64[0] = checkNumber(value, where);
      return f64Bits[0]!;
    },
    decode(word) {
      f64Bits[0] = word as bigint;
      return f64[0]!;
    },
  },
};

const isFloat = (dtype: DType): boolean => dtype === 'f32' || dtype === 'f64';

export function wordCodec<D extends ExtendedAtomicDType>(dtype: D, floats: boolean, where: string): WordCodec<D> {
  const codec = Object.hasOwn(CODECS, dtype) ? (CODECS[dtype] as unknown as WordCodec<D>) : undefined;
  if (codec !== undefined && (floats || !isFloat(dtype))) return codec;
  throw invalid('dtype', {
    where,
    expected: floats ? Object.keys(CODECS).join(', ') : 'i32, u32, i64 or u64',
    found: dtype,
  });
}

/** One element in memory of its own, for single-element puts and gets. */
const scratch = new Map<DType, ReturnType<typeof createStorage>>();

export function scratchElement(dtype: DType): ReturnType<typeof createStorage> {
  let storage = scratch.get(dtype);
  if (storage === undefined) {
    storage = createStorage(dtype, 1);
    scratch.set(dtype, storage);
  }
  return storage;
}

/** Stores as a typed array does: integers wrap. Throws `EP_INVALID_ARGUMENT` for a bigint where a number belongs, or the other way round. */
export function storeElement(dtype: DType, value: number | bigint, where: string): ReturnType<typeof createStorage> {
  const storage = scratchElement(dtype);
  if (dtype === 'i64' || dtype === 'u64') (storage as BigInt64Array)[0] = encode64(value, where);
  else (storage as Float64Array)[0] = checkNumber(value, where);
  return storage;
}
