/** Elements that tell who made them, and what reducing them must give: plain loops over numbers, nothing shared with the engines. */
import assert from 'node:assert/strict';
import {
  createStorage,
  type DType,
  decode,
  encode,
  type FloatDType,
  type Storage,
  type Tensor,
  tensor,
} from '@ep/core';
import { REDUCE_OPS, type ReduceOp, type ReduceOpName, refusal } from '../../../src/reduce-op.js';

export type Elements = Storage[DType];

export const REDUCIBLE = ['f64', 'f32', 'f16', 'bf16', 'i64', 'u64', 'i32', 'u32', 'i16', 'u16', 'i8', 'u8'] as const;
export const MOVABLE_ONLY = ['f8e4m3', 'f8e5m2', 'ue8m0'] as const;

const FLOATS: readonly DType[] = ['f64', 'f32', 'f16', 'bf16'];
const WIDE: readonly DType[] = ['i64', 'u64'];

/** Half is exact in every float format, so that a factor says nothing about where it was rounded. */
export const PREMUL: ReduceOp = { op: 'premul-sum', factor: -1.5 };

export const opsOf = (dtype: DType): readonly ReduceOp[] =>
  REDUCE_OPS.filter((op) => refusal(op, dtype) === undefined).map((op) => (op === 'premul-sum' ? PREMUL : op));

export const nameOf = (op: ReduceOp): ReduceOpName => (typeof op === 'object' ? op.op : op);

export const ranksOf = (worldSize: number): readonly number[] => Array.from({ length: worldSize }, (_, rank) => rank);

export const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

/** 32 bits of a number: murmur3's finaliser. */
function mix(value: number): number {
  let mixed = value | 0;
  mixed = Math.imul(mixed ^ (mixed >>> 16), 0x85ebca6b);
  mixed = Math.imul(mixed ^ (mixed >>> 13), 0xc2b2ae35);
  return (mixed ^ (mixed >>> 16)) >>> 0;
}

/** Elements after which a pattern comes again. A prime: no border of chunks or lines falls on the same place of it twice. */
const PERIOD = 4_099;

/** `length` elements that repeat those of `base`. */
function tiled<D extends DType>(dtype: D, base: Storage[D], length: number): Storage[D] {
  if (base.length === length) return base;
  const storage = createStorage(dtype, length);
  storage.set(base as never);
  for (let filled = base.length; filled < length; filled *= 2)
    storage.copyWithin(filled, 0, Math.min(filled, length - filled));
  return storage;
}

/** Floats lie in [-8, 8); integers and the formats that are only moved have all their bits random. */
export function pattern<D extends DType>(dtype: D, length: number, writer: number, round = 0): Storage[D] {
  const key = Math.imul(writer + 1, 0x9e3779b1) ^ Math.imul(round + 1, 0x7feb352d);
  const period = Math.min(length, PERIOD);
  if (FLOATS.includes(dtype)) {
    const values = new Float32Array(period);
    for (let i = 0; i < period; i++) values[i] = (mix(key + i) >>> 8) / 2 ** 20 - 8;
    return tiled(dtype, encode(dtype as FloatDType, values) as Storage[D], length);
  }
  const base = createStorage(dtype, period);
  if (WIDE.includes(dtype)) {
    for (let i = 0; i < period; i++) base[i] = (BigInt(mix(key + i)) << 32n) | BigInt(mix(key - i));
  } else {
    for (let i = 0; i < period; i++) base[i] = mix(key + i);
  }
  return tiled(dtype, base, length);
}

export const patterns = <D extends DType>(dtype: D, length: number, writers: number, round = 0): Storage[D][] =>
  ranksOf(writers).map((writer) => pattern(dtype, length, writer, round));

/** A contiguous tensor of one axis. */
export const vector = <D extends DType>(dtype: D, data: Storage[D]): Tensor<D> => tensor(dtype, [data.length], data);

/** Storage of `dtype` with these numbers in it. */
export function numbers<D extends DType>(dtype: D, values: readonly (number | bigint)[]): Storage[D] {
  if (!(REDUCIBLE as readonly DType[]).includes(dtype)) return createStorage(dtype, values.length);
  if (FLOATS.includes(dtype)) return encode(dtype as FloatDType, values.map(Number)) as Storage[D];
  const storage = createStorage(dtype, values.length);
  for (const [i, value] of values.entries()) storage[i] = WIDE.includes(dtype) ? BigInt(value) : Number(value);
  return storage;
}

const numberStep: { readonly [N in Exclude<ReduceOpName, 'premul-sum' | 'avg'>]: (a: number, b: number) => number } = {
  sum: (a, b) => a + b,
  product: (a, b) => a * b,
  min: Math.min,
  max: Math.max,
  band: (a, b) => a & b,
  bor: (a, b) => a | b,
  bxor: (a, b) => a ^ b,
};
const bigintStep: Readonly<Record<keyof typeof numberStep, (a: bigint, b: bigint) => bigint>> = {
  sum: (a, b) => a + b,
  product: (a, b) => a * b,
  // biome-ignore lint/complexity/useMathMinMax: it takes no bigints.
  min: (a, b) => (a < b ? a : b),
  // biome-ignore lint/complexity/useMathMinMax: it takes no bigints.
  max: (a, b) => (a < b ? b : a),
  band: (a, b) => a & b,
  bor: (a, b) => a | b,
  bxor: (a, b) => a ^ b,
};

let hosts: readonly (readonly number[])[] = [];

/** From now on what all ranks of the world give is folded by host, as `InitOptions.hosts` has them. */
export function foldByHost(hostOf: readonly number[]): void {
  hosts = [...new Set(hostOf)].map((host) => ranksOf(hostOf.length).filter((rank) => hostOf[rank] === host));
}

/** What the elements of these contributors come to, in this order; of a world of several hosts by host. */
export function reduced<D extends DType>(dtype: D, op: ReduceOp, parts: readonly Storage[D][]): Storage[D] {
  const name = nameOf(op);
  // Sums of 16 bits are rounded once.
  if (
    (dtype === 'f16' || dtype === 'bf16') &&
    name !== 'min' &&
    name !== 'max' &&
    hosts.flat().length === parts.length
  ) {
    const singles = parts.map((part) => decode(dtype as FloatDType, part as Storage[FloatDType]) as Float32Array);
    return encode(dtype as FloatDType, reduced('f32', op, singles)) as Storage[D];
  }
  const exact = dtype === 'f32' || dtype === 'f64';
  if (!exact || hosts.flat().length !== parts.length) return inOrder(dtype, op, parts);
  const within = name === 'avg' ? 'sum' : op;
  const ofHosts = hosts.map((members) =>
    inOrder(
      dtype,
      within,
      members.map((rank) => parts[rank]!),
    ),
  );
  const result = inOrder(dtype, name === 'avg' || name === 'premul-sum' ? 'sum' : op, ofHosts);
  if (name === 'avg') for (let i = 0; i < result.length; i++) result[i] = Number(result[i]) / parts.length;
  return result;
}

function inOrder<D extends DType>(dtype: D, op: ReduceOp, parts: readonly Storage[D][]): Storage[D] {
  const name = nameOf(op);
  const length = parts[0]!.length;
  if (FLOATS.includes(dtype)) {
    // Every step is rounded to what the accumulator holds: f64 to itself, all others to single.
    const round = dtype === 'f64' ? (value: number): number => value : Math.fround;
    const factor = typeof op === 'object' ? op.factor : 1;
    const step = numberStep[name === 'avg' || name === 'premul-sum' ? 'sum' : name];
    const values = parts.map((part) => decode(dtype as FloatDType, part as Storage[FloatDType]));
    const result = values[0]!.map((value) => round(value * factor));
    for (const more of values.slice(1)) {
      for (let i = 0; i < length; i++) result[i] = round(step(result[i]!, round(more[i]! * factor)));
    }
    if (name === 'avg') for (let i = 0; i < length; i++) result[i] = round(result[i]! / parts.length);
    return encode(dtype as FloatDType, result) as Storage[D];
  }
  const result = parts[0]!.slice() as Storage[D];
  if (WIDE.includes(dtype)) {
    const [wide, step] = [result as BigInt64Array, bigintStep[name as keyof typeof bigintStep]];
    for (const part of parts.slice(1) as BigInt64Array[]) {
      for (let i = 0; i < length; i++) wide[i] = step(wide[i]!, part[i]!);
    }
  } else {
    const narrow = result as Int32Array;
    // A product of two 32-bit numbers is more than a double holds.
    const step = name === 'product' ? Math.imul : numberStep[name as keyof typeof numberStep];
    for (const part of parts.slice(1) as Int32Array[]) {
      for (let i = 0; i < length; i++) narrow[i] = step(narrow[i]!, part[i]!);
    }
  }
  return result;
}

/** What the patterns of ranks 0 .. writers - 1 come to: one period of it is worked out, which says it all. */
export function reducedPatterns<D extends DType>(
  dtype: D,
  op: ReduceOp,
  length: number,
  writers: number,
  round = 0,
): Storage[D] {
  const base = reduced(dtype, op, patterns(dtype, Math.min(length, PERIOD), writers, round));
  return tiled(dtype, base, length);
}

export const bytesOf = (data: ArrayBufferView): Uint8Array =>
  new Uint8Array(data.buffer, data.byteOffset, data.byteLength);

const isNaNElement = (dtype: DType, data: Elements, index: number): boolean =>
  FLOATS.includes(dtype) &&
  Number.isNaN(decode(dtype as FloatDType, data.subarray(index, index + 1) as Storage[FloatDType])[0]!);

/** Bit by bit, but that one NaN is as good as another. */
export function expectElements(dtype: DType, found: Elements, expected: Elements, what: string): void {
  assert.equal(found.length, expected.length, `${what}: length`);
  if (Buffer.compare(bytesOf(found), bytesOf(expected)) === 0) return;
  for (let i = 0; i < expected.length; i++) {
    const same = Buffer.compare(bytesOf(found.subarray(i, i + 1)), bytesOf(expected.subarray(i, i + 1))) === 0;
    if (same || (isNaNElement(dtype, found, i) && isNaNElement(dtype, expected, i))) continue;
    assert.fail(`${what}: element ${i} of ${expected.length} ${dtype}: expected ${expected[i]}, found ${found[i]}`);
  }
}

/** 32 bits that stand for the bytes: FNV-1a. */
export function digest(...arrays: readonly ArrayBufferView[]): number {
  let hash = 0x811c9dc5;
  for (const array of arrays) for (const byte of bytesOf(array)) hash = Math.imul(hash ^ byte, 0x01000193);
  return hash >>> 0;
}
