/**
 * Element types. Storage is the raw carrier, so that nobody mistakes bits for values.
 *
 * Codecs between raw floats and numbers, the same on every machine:
 *
 * | dtype  | format                                   | beyond the largest finite value | infinity    | NaN                             |
 * |--------|------------------------------------------|---------------------------------|-------------|---------------------------------|
 * | f16    | IEEE binary16                            | infinity                        | kept        | quiet; sign and top payload kept |
 * | bf16   | upper half of binary32                   | infinity                        | kept        | quiet; sign and top payload kept |
 * | f8e5m2 | OCP E5M2, largest 57 344                 | saturates                       | saturates   | quiet; sign and top payload kept |
 * | f8e4m3 | OCP E4M3, largest 448, no infinity       | saturates                       | saturates   | 0x7f; sign kept                 |
 * | ue8m0  | power of two 2^-127 .. 2^127, no sign, no zero | saturates, also below     | saturates   | 0xff; negative numbers too      |
 *
 * `encode` rounds once, to nearest even, from the exact value that it was given (a double is not first rounded to single). The single
 * significand bit of ue8m0 is always odd, so its ties (1.5 · 2^k) go up. Saturation of the 8-bit formats is the SAT mode of the OCP 8-bit
 * floating point specification, revision 1.0.
 */
import { checkAttached, isDetached } from './buffers.js';
import { checkInteger, EpError, invalid } from './errors.js';

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

/** The dtypes that `encode` and `decode` know: integers are their own storage. */
export type FloatDType = 'f64' | 'f32' | 'f16' | 'bf16' | 'f8e4m3' | 'f8e5m2' | 'ue8m0';

type StorageConstructor<D extends DType> = {
  readonly BYTES_PER_ELEMENT: number;
  new (length: number): Storage[D];
  new (buffer: ArrayBufferLike, byteOffset: number, length: number): Storage[D];
};

const CONSTRUCTORS: { readonly [D in DType]: StorageConstructor<D> } = {
  f64: Float64Array,
  f32: Float32Array,
  f16: Uint16Array,
  bf16: Uint16Array,
  f8e4m3: Uint8Array,
  f8e5m2: Uint8Array,
  ue8m0: Uint8Array,
  i64: BigInt64Array,
  u64: BigUint64Array,
  i32: Int32Array,
  u32: Uint32Array,
  i16: Int16Array,
  u16: Uint16Array,
  i8: Int8Array,
  u8: Uint8Array,
};

export const DTYPES = Object.freeze(Object.keys(CONSTRUCTORS)) as readonly DType[];

export function isDType(value: unknown): value is DType {
  return typeof value === 'string' && Object.hasOwn(CONSTRUCTORS, value);
}

function constructorOf<D extends DType>(dtype: D, where: string): StorageConstructor<D> {
  if (!isDType(dtype)) throw invalid('dtype', { where, expected: `one of ${DTYPES.join(', ')}`, found: dtype });
  return CONSTRUCTORS[dtype] as StorageConstructor<D>;
}

/** Bytes of one element. */
export function elementBytes(dtype: DType): number {
  return constructorOf(dtype, 'elementBytes').BYTES_PER_ELEMENT;
}

/**
 * Zeroed storage of `length` elements (for ue8m0, whose code 0 is 2^-127, zero bytes are not the number zero). Throws `EP_INVALID_ARGUMENT`, or
 * `EP_MEMORY_LIMIT` for more than this process can have in one buffer.
 */
export function createStorage<D extends DType>(dtype: D, length: number): Storage[D] {
  const make = constructorOf(dtype, 'createStorage');
  checkInteger(length, 'length', 'createStorage');
  try {
    return new make(length);
  } catch (error) {
    throw new EpError('EP_MEMORY_LIMIT', `createStorage: ${length} elements of ${dtype} do not fit one buffer`, {
      cause: error,
      context: { dtype, length },
    });
  }
}

/**
 * A window of `length` elements on existing memory, `byteOffset` bytes behind its start. Throws `EP_INVALID_ARGUMENT` for a window that is not aligned
 * to its elements or does not lie in the buffer, `EP_DETACHED` for a buffer that is gone.
 */
export function viewStorage<D extends DType>(
  dtype: D,
  buffer: ArrayBufferLike,
  byteOffset: number,
  length: number,
): Storage[D] {
  const where = 'viewStorage';
  const make = constructorOf(dtype, where);
  if (!(buffer instanceof ArrayBuffer) && !(buffer instanceof SharedArrayBuffer))
    throw invalid('buffer', { where, expected: 'an ArrayBuffer or a SharedArrayBuffer', found: buffer });
  if (isDetached(buffer))
    throw new EpError('EP_DETACHED', `${where}: the buffer was detached or transferred`, { context: { where } });
  checkInteger(byteOffset, 'byteOffset', where, 0, buffer.byteLength);
  checkInteger(length, 'length', where, 0, Math.floor((buffer.byteLength - byteOffset) / make.BYTES_PER_ELEMENT));
  if (byteOffset % make.BYTES_PER_ELEMENT !== 0) {
    const expected = `a multiple of the ${make.BYTES_PER_ELEMENT} bytes of ${dtype}`;
    throw invalid('byteOffset', { where, expected, found: byteOffset });
  }
  return new make(buffer, byteOffset, length);
}

/** True if `data` is the carrier of `dtype` (a Buffer is a Uint8Array). */
export function isStorageOf<D extends DType>(dtype: D, data: unknown): data is Storage[D] {
  return isDType(dtype) && data instanceof (CONSTRUCTORS[dtype] as unknown as abstract new () => unknown);
}

interface SmallFormat {
  readonly mantissaBits: number;
  readonly bias: number;
  /** The largest finite code without sign, and what everything above becomes. */
  readonly largest: number;
  readonly overflow: number;
  /** Sign bit of the code. */
  readonly sign: number;
  /** A NaN of this format that keeps what it can of a binary32 NaN's payload. */
  readonly nan: (singleBits: number) => number;
}

const F16: SmallFormat = {
  mantissaBits: 10,
  bias: 15,
  largest: 0x7bff,
  overflow: 0x7c00,
  sign: 0x8000,
  nan: (bits) => 0x7e00 | ((bits >>> 13) & 0x1ff),
};
const F8E5M2: SmallFormat = {
  mantissaBits: 2,
  bias: 15,
  largest: 0x7b,
  overflow: 0x7b,
  sign: 0x80,
  nan: (bits) => 0x7e | ((bits >>> 21) & 1),
};
const F8E4M3: SmallFormat = {
  mantissaBits: 3,
  bias: 7,
  largest: 0x7e,
  overflow: 0x7e,
  sign: 0x80,
  nan: () => 0x7f,
};

/** `value >>> shift`, rounded to nearest even; `value` < 2^31, `shift` in 1..31. */
function shiftRound(value: number, shift: number): number {
  const kept = value >>> shift;
  const rest = value & ((1 << shift) - 1);
  const half = 1 << (shift - 1);
  return rest > half || (rest === half && (kept & 1) === 1) ? kept + 1 : kept;
}

function smallFromSingle(bits: number, format: SmallFormat): number {
  const sign = bits >>> 31 === 1 ? format.sign : 0;
  const magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | format.nan(magnitude);
  const drop = 23 - format.mantissaBits;
  const smallestNormal = (128 - format.bias) << 23;
  let code: number;
  if (magnitude >= smallestNormal) {
    code = shiftRound(magnitude - ((127 - format.bias) << 23), drop);
  } else {
    // Numbers below the format's normals share one exponent: shift the whole significand there.
    const shift = drop + 128 - format.bias - (magnitude >>> 23);
    code = shift > 24 ? 0 : shiftRound((magnitude & 0x7fffff) | 0x800000, shift);
  }
  return sign | (code > format.largest ? format.overflow : code);
}

function singleFromSmall(code: number, format: SmallFormat, isNaNCode: boolean): number {
  const sign = (code & format.sign) !== 0 ? 0x80000000 : 0;
  const magnitude = code & (format.sign - 1);
  const grow = 23 - format.mantissaBits;
  const mantissa = magnitude & ((1 << format.mantissaBits) - 1);
  if (isNaNCode) return (sign | 0x7fc00000 | (mantissa << grow)) >>> 0;
  if (magnitude > format.largest) return (sign | 0x7f800000) >>> 0;
  if (magnitude >>> format.mantissaBits !== 0)
    return (sign | ((magnitude << grow) + ((127 - format.bias) << 23))) >>> 0;
  if (mantissa === 0) return sign;
  // Subnormal here, normal in binary32: bring the leading one to bit 23.
  const up = Math.clz32(mantissa) - 8;
  const exponent = 128 - format.bias + grow - up;
  return (sign | ((exponent << 23) + ((mantissa << up) & 0x7fffff))) >>> 0;
}

function bf16FromSingle(bits: number): number {
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >>> 16) | 0x40;
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

function ue8m0FromSingle(bits: number): number {
  const magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000 || (bits >>> 31 === 1 && magnitude !== 0)) return 0xff;
  // Below 2^-126 binary32 has no implicit one: 1.5 · 2^-127 is the mantissa 0x600000.
  const code = magnitude < 0x800000 ? (magnitude >= 0x600000 ? 1 : 0) : (magnitude + 0x400000) >>> 23;
  return Math.min(code, 0xfe);
}

function singleFromUe8m0(code: number): number {
  return code === 0xff ? 0x7fc00000 : code === 0 ? 0x400000 : code << 23;
}

const ENCODERS: Readonly<Record<Exclude<FloatDType, 'f64' | 'f32'>, (bits: number) => number>> = {
  bf16: bf16FromSingle,
  f16: (bits) => smallFromSingle(bits, F16),
  f8e5m2: (bits) => smallFromSingle(bits, F8E5M2),
  f8e4m3: (bits) => smallFromSingle(bits, F8E4M3),
  ue8m0: ue8m0FromSingle,
};

const DECODERS: Readonly<Record<Exclude<FloatDType, 'f64' | 'f32'>, (code: number) => number>> = {
  bf16: (code) => ((code << 16) | ((code & 0x7fff) > 0x7f80 ? 0x400000 : 0)) >>> 0,
  f16: (code) => singleFromSmall(code, F16, (code & 0x7fff) > 0x7c00),
  f8e5m2: (code) => singleFromSmall(code, F8E5M2, (code & 0x7f) > 0x7c),
  f8e4m3: (code) => singleFromSmall(code, F8E4M3, (code & 0x7f) === 0x7f),
  ue8m0: singleFromUe8m0,
};

const scratchSingle = new Float32Array(1);
const scratchBits = new Uint32Array(scratchSingle.buffer);

/**
 * Bits of a double rounded to single "to odd": towards zero, with the last bit set if anything was lost. Rounding that once more to a
 * format of at most 22 significant bits gives what one rounding of the double gives; two roundings to nearest do not.
 */
function singleToOdd(value: number): number {
  scratchSingle[0] = value;
  const single = scratchSingle[0]!;
  const bits = scratchBits[0]!;
  if (single === value || Number.isNaN(value)) return bits;
  return (Math.abs(single) > Math.abs(value) ? bits - 1 : bits) | 1;
}

/**
 * Numbers of raw storage: a new array, exact for every dtype. `f64` gives a Float64Array, all others a Float32Array. Throws `EP_INVALID_ARGUMENT` for
 * another carrier, `EP_DETACHED` for a buffer that is gone.
 */
export function decode<D extends FloatDType>(
  dtype: D,
  storage: Storage[D],
): D extends 'f64' ? Float64Array : Float32Array;
export function decode(dtype: FloatDType, storage: Storage[FloatDType]): Float64Array | Float32Array {
  const expected = constructorOf(dtype, 'decode').name;
  if (!isStorageOf(dtype, storage)) throw invalid('storage', { where: `decode ${dtype}`, expected, found: storage });
  checkAttached(storage, `decode ${dtype}`);
  if (dtype === 'f64' || dtype === 'f32') return storage.slice() as Float64Array | Float32Array;
  const decoder = DECODERS[dtype];
  if (decoder === undefined) throw notFloat(dtype, 'decode');
  const out = new Float32Array(storage.length);
  const bits = new Uint32Array(out.buffer);
  for (let i = 0; i < storage.length; i++) bits[i] = decoder(storage[i] as number);
  return out;
}

/** HAZARD: a detached array is read as an empty one, and what is no number becomes NaN. */
function checkValues(values: unknown, where: string): void {
  const wrong = (what: string, found: unknown) => invalid(what, { where, expected: 'an array of numbers', found });
  if (typeof values !== 'object' || values === null) throw wrong('values', values);
  if (ArrayBuffer.isView(values)) {
    if (values instanceof DataView || values instanceof BigInt64Array || values instanceof BigUint64Array)
      throw wrong('values', values);
    checkAttached(values as Storage[FloatDType], where);
    return;
  }
  const list = values as ArrayLike<unknown>;
  checkInteger(list.length, 'values.length', where);
  for (let i = 0; i < list.length; i++)
    if (typeof list[i] !== 'number') throw invalid(`values[${i}]`, { where, expected: 'a number', found: list[i] });
}

/**
 * Raw storage of numbers: a new array, each value rounded once. See the table above for overflow and NaN. Throws `EP_INVALID_ARGUMENT` for values that
 * are no numbers, `EP_DETACHED` for a buffer that is gone.
 */
export function encode<D extends FloatDType>(dtype: D, values: ArrayLike<number>): Storage[D];
export function encode(dtype: FloatDType, values: ArrayLike<number>): Storage[FloatDType] {
  constructorOf(dtype, 'encode');
  checkValues(values, `encode ${dtype}`);
  if (dtype === 'f64') return Float64Array.from(values);
  if (dtype === 'f32') return Float32Array.from(values);
  const encoder = ENCODERS[dtype];
  if (encoder === undefined) throw notFloat(dtype, 'encode');
  const out = createStorage(dtype, values.length);
  if (values instanceof Float32Array) {
    // Read as bits: as numbers, engines may change the payload of a NaN.
    const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
    for (let i = 0; i < bits.length; i++) out[i] = encoder(bits[i]!);
  } else {
    for (let i = 0; i < out.length; i++) out[i] = encoder(singleToOdd(values[i]!));
  }
  return out;
}

function notFloat(dtype: string, where: string) {
  return invalid('dtype', { where, expected: `one of f64, f32, ${Object.keys(ENCODERS).join(', ')}`, found: dtype });
}
