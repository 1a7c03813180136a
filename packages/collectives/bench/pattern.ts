/**
 * The values that the contenders move and reduce, and what must come of them. open_mpi.c and gloo.py compute the same ones.
 *
 * Element i of rank r is (i + 1009 r) mod p: small integers, so that every sum is exact in every order. p is a prime: blocks and chunks are not multiples of it, so a
 * chunk in the wrong place shows. An all-reduce in place multiplies its values by the number of ranks, a power of two, with every call: still exact, until the
 * exponent ends, and no call of a row can be left out unseen.
 */
import type { BenchDType, BenchOp } from './protocol.js';

/** Of bf16, which has eight bits: 16 ranks of at most 12 add up to at most 192. */
const PERIOD_OF: Readonly<Record<BenchDType, number>> = { f32: 4093, bf16: 13 };
const RANK_STEP = 1009;
/** No element is this. */
const POISON = -1;
/** Elements of a result that are compared after every batch. */
const SAMPLES = 1024;
/** Doublings that the largest sum survives. */
const GROWTH_BITS = 112;

export const MOST_RANKS = 16;

export type Values = Float32Array | Uint16Array;

/** What one operation does on one rank: `elements` as in a command. */
export interface Shape {
  readonly op: BenchOp;
  readonly dtype: BenchDType;
  readonly elements: number;
  readonly rank: number;
  readonly size: number;
}

/** How often an all-reduce may follow another in place. */
export function mostCallsInPlace(size: number): number {
  return Math.floor(GROWTH_BITS / Math.max(1, Math.ceil(Math.log2(size))));
}

export function isInPlace(op: BenchOp): boolean {
  return op === 'all-reduce' || op === 'broadcast';
}

export function inputLength({ op, elements, size }: Shape): number {
  if (op === 'barrier') return 0;
  return op === 'all-gather' ? elements / size : elements;
}

export function resultLength({ op, elements, size }: Shape): number {
  if (op === 'barrier') return 0;
  return op === 'reduce-scatter' ? elements / size : elements;
}

export function elementAt(dtype: BenchDType, source: number, i: number): number {
  return (i + source * RANK_STEP) % PERIOD_OF[dtype];
}

const word = new Float32Array(1);
const wordBits = new Uint32Array(word.buffer);

/** A number as it lies in an array of `dtype`; bf16: exact ones only, as all values here are. */
function stored(dtype: BenchDType, value: number): number {
  if (dtype === 'f32') return Math.fround(value);
  word[0] = value;
  return wordBits[0]! >>> 16;
}

function shown(dtype: BenchDType, value: number): number {
  if (dtype === 'f32') return value;
  wordBits[0] = value << 16;
  return word[0]!;
}

/** `length` elements of `data` become `pattern` over and over. */
function repeat(data: Values, length: number, pattern: readonly number[]): void {
  let done = Math.min(length, pattern.length);
  for (let i = 0; i < done; i++) data[i] = pattern[i]!;
  for (; done < length; ) {
    const part = Math.min(done, length - done);
    data.copyWithin(done, 0, part);
    done += part;
  }
}

/** The values of this rank before a call. */
export function fillInput(data: Values, shape: Shape): void {
  const { op, dtype, rank } = shape;
  const length = inputLength(shape);
  const offset = op === 'all-gather' ? rank * length : 0;
  const pattern = Array.from({ length: PERIOD_OF[dtype] }, (_, i) => stored(dtype, elementAt(dtype, rank, offset + i)));
  repeat(data, length, pattern);
}

/** A stretch of the result: element `first + i` is `pattern[i mod p]`. */
interface Stretch {
  readonly first: number;
  readonly length: number;
  readonly pattern: readonly number[];
}

function stretchesOf(shape: Shape, scale: number): readonly Stretch[] {
  const { op, dtype, elements, rank, size } = shape;
  const block = elements / size;
  const pattern = (of: (i: number) => number): readonly number[] =>
    Array.from({ length: PERIOD_OF[dtype] }, (_, i) => stored(dtype, of(i)));
  const ranks = Array.from({ length: size }, (_, source) => source);
  const sum = (i: number): number => ranks.reduce((total, source) => total + elementAt(dtype, source, i), 0);
  switch (op) {
    case 'barrier':
      return [];
    case 'broadcast':
      return [{ first: 0, length: elements, pattern: pattern((i) => elementAt(dtype, 0, i)) }];
    case 'all-reduce':
      return [{ first: 0, length: elements, pattern: pattern((i) => sum(i) * scale) }];
    case 'reduce-scatter':
      return [{ first: 0, length: block, pattern: pattern((i) => sum(rank * block + i)) }];
    case 'all-gather':
    case 'all-to-all':
      return ranks.map((source) => ({
        first: source * block,
        length: block,
        pattern: pattern((i) => elementAt(dtype, source, (op === 'all-gather' ? source : rank) * block + i)),
      }));
  }
}

/** Odd, so that it meets every place within a chunk; 1 for a short result. */
export function sampleStep(shape: Shape): number {
  const length = resultLength(shape);
  return length <= SAMPLES ? 1 : Math.floor(length / SAMPLES) | 1;
}

/** Overwrites every `step`-th element of the result with what no call leaves there. */
export function poison(result: Values, shape: Shape, step: number): void {
  const value = stored(shape.dtype, POISON);
  const length = resultLength(shape);
  for (let i = 0; i < length; i += step) result[i] = value;
}

/**
 * Prepared comparison of every `step`-th element, 1: of every element. `callsInPlace`: how many all-reduces have followed each other on the input; of no meaning to
 * other operations. Throws an error that names the element.
 */
export function expectation(shape: Shape): (result: Values, step: number, callsInPlace: number) => void {
  const { op, dtype, rank, size } = shape;
  const patterns = new Map<number, readonly Stretch[]>();
  const stretches = (callsInPlace: number): readonly Stretch[] => {
    const calls = op === 'all-reduce' ? callsInPlace : 1;
    const found = patterns.get(calls) ?? stretchesOf(shape, size ** (calls - 1));
    patterns.set(calls, found);
    return found;
  };
  return (result, step, callsInPlace) => {
    for (const { first, length, pattern } of stretches(callsInPlace)) {
      const period = pattern.length;
      const stride = step % period;
      const start = (step - (first % step)) % step;
      for (let i = start, p = start % period; i < length; i += step) {
        if (result[first + i] !== pattern[p]) {
          const found = shown(dtype, result[first + i]!);
          throw new Error(
            `rank ${rank}: ${op} of ${dtype}: element ${first + i} of ${resultLength(shape)}: found ${found}, expected ${shown(dtype, pattern[p]!)}`,
          );
        }
        p += stride;
        if (p >= period) p -= period;
      }
    }
  };
}
