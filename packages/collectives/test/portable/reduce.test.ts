/** Reductions against plain loops over numbers, bigints and bits. */
import { createStorage, DTYPES, type DType, decode, encode, type Storage } from '@ep/core';
import { describe, expect, it } from 'vitest';
import type { Elements } from '../../src/engine.js';
import { foldElements, NATIVE_ELEMENTS } from '../../src/portable/fold-elements.js';
import { reduceInto } from '../../src/reduce.js';
import { REDUCE_OPS, type ReduceOp, type ReduceOpName, refusal } from '../../src/reduce-op.js';
import { numbers } from './world.js';

const LENGTH = 200;
const FACTOR = 0.1;
const INTEGER_BITS: { readonly [dtype in DType]?: readonly [bits: number, signed: boolean] } = {
  i64: [64, true],
  u64: [64, false],
  i32: [32, true],
  u32: [32, false],
  i16: [16, true],
  u16: [16, false],
  i8: [8, true],
  u8: [8, false],
};

const opOf = (name: ReduceOpName): ReduceOp => (name === 'premul-sum' ? { op: name, factor: FACTOR } : name);
const reduce = (dtype: DType, op: ReduceOp, target: Elements, sources: readonly Elements[]): void =>
  reduceInto(dtype, op, target as never, sources as never);
const bits = (elements: Elements): string =>
  Buffer.from(elements.buffer, elements.byteOffset, elements.byteLength).toString('hex');

function randomBytes<D extends DType>(dtype: D, length: number, seed: number): Storage[D] {
  const made = createStorage(dtype, length);
  const below = numbers(seed);
  const bytes = new Uint8Array(made.buffer);
  for (let i = 0; i < bytes.length; i++) bytes[i] = below(256);
  return made;
}

/** In exact integers, cut to the width only at the end. */
function integerOracle(dtype: DType, name: ReduceOpName, elements: readonly bigint[]): bigint {
  const [width, signed] = INTEGER_BITS[dtype]!;
  const folded = elements.reduce((a, b) => {
    switch (name) {
      case 'sum':
        return a + b;
      case 'product':
        return a * b;
      case 'min':
        // biome-ignore lint/complexity/useMathMinMax: Math.min takes no bigints.
        return a < b ? a : b;
      case 'max':
        // biome-ignore lint/complexity/useMathMinMax: nor does Math.max.
        return a > b ? a : b;
      case 'band':
        return a & b;
      case 'bor':
        return a | b;
      default:
        return a ^ b;
    }
  });
  return signed ? BigInt.asIntN(width, folded) : BigInt.asUintN(width, folded);
}

/** Of numbers that are no NaN. `round` is that of the dtype in which the folding is done. */
function floatOracle(name: ReduceOpName, elements: readonly number[], round: (value: number) => number): number {
  const factor = round(FACTOR);
  const scaled = name === 'premul-sum' ? elements.map((value) => round(value * factor)) : elements;
  switch (name) {
    case 'min':
      return elements.reduce((a, b) => (a < b || (a === b && Object.is(a, -0)) ? a : b));
    case 'max':
      return elements.reduce((a, b) => (a > b || (a === b && Object.is(b, -0)) ? a : b));
    case 'product':
      return elements.reduce((a, b) => round(a * b));
    case 'avg':
      return round(elements.reduce((a, b) => round(a + b)) / elements.length);
    default:
      return scaled.reduce((a, b) => round(a + b));
  }
}

/** Finite values of every magnitude that the format has, zeros of both signs among them. */
function floats(dtype: 'f64' | 'f32' | 'f16' | 'bf16', length: number, seed: number): Elements {
  const below = numbers(seed);
  const values = Array.from({ length }, (_, i) => {
    if (i % 17 === 0) return below(2) === 0 ? 0 : -0;
    return (below(2 ** 26) / 2 ** 26 - 0.5) * 2 ** (below(18) - 9);
  });
  return encode(dtype, values);
}

const cases = DTYPES.flatMap((dtype) => REDUCE_OPS.map((name) => ({ dtype, name })));
const taken = cases.filter(({ dtype, name }) => refusal(name, dtype) === undefined);

describe.each([1, 2, 3, 5])('over %i sources', (count) => {
  it.each(taken.filter(({ dtype }) => dtype in INTEGER_BITS))('$name of $dtype', ({ dtype, name }) => {
    const sources = Array.from({ length: count }, (_, s) => randomBytes(dtype, LENGTH, 7 * s + count) as Elements);
    const target = createStorage(dtype, LENGTH) as Elements;
    reduce(dtype, opOf(name), target, sources);
    for (let i = 0; i < LENGTH; i++) {
      const elements = sources.map((source) => BigInt(source[i]!));
      expect(BigInt(target[i]!)).toBe(integerOracle(dtype, name, elements));
    }
  });

  it.each(taken.filter(({ dtype }) => !(dtype in INTEGER_BITS)))('$name of $dtype', ({ dtype, name }) => {
    const kind = dtype as 'f64' | 'f32' | 'f16' | 'bf16';
    const round = kind === 'f64' ? (value: number) => value : Math.fround;
    const sources = Array.from({ length: count }, (_, s) => floats(kind, LENGTH, 31 * s + count));
    const numeric = sources.map((source): ArrayLike<number> => decode(kind, source as never));
    const target = createStorage(dtype, LENGTH) as Elements;
    reduce(dtype, opOf(name), target, sources);
    const values = Array.from({ length: LENGTH }, (_, i) => {
      const elements = numeric.map((source) => source[i]!);
      return floatOracle(name, elements, round);
    });
    const expected = encode(kind, values) as Elements;
    expect(bits(target)).toBe(bits(expected));
  });
});

it('takes what the table says and nothing else', () => {
  for (const { dtype, name } of cases) {
    const target = createStorage(dtype, 1);
    const act = (): void => reduce(dtype, opOf(name), target, [target, target]);
    if (refusal(name, dtype) === undefined) expect(act).not.toThrow();
    else expect(act).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
  }
  expect(taken.length).toBe(8 * 7 + 4 * 6);
});

it('folds in the order of the sources', () => {
  const big = Float32Array.of(2 ** 24);
  const one = Float32Array.of(1);
  const target = new Float32Array(1);
  reduceInto('f32', 'sum', target, [big, one, one]);
  expect(target[0]).toBe(2 ** 24);
  reduceInto('f32', 'sum', target, [one, one, big]);
  expect(target[0]).toBe(2 ** 24 + 2);
});

it('adds f16 and bf16 up in f32 and rounds once', () => {
  // 2048 + 1 + 1: rounded at each step to f16 it stays 2048.
  const halves = [2048, 1, 1].map((value) => encode('f16', [value]));
  const target = new Uint16Array(1);
  reduceInto('f16', 'sum', target, halves);
  expect(decode('f16', target)[0]).toBe(2050);
  const brains = [256, 1, 1].map((value) => encode('bf16', [value]));
  reduceInto('bf16', 'sum', target, brains);
  expect(decode('bf16', target)[0]).toBe(258);
  // 65504 + 65504 - 65504: beyond f16 on the way.
  reduceInto(
    'f16',
    'sum',
    target,
    [65504, 65504, -65504].map((value) => encode('f16', [value])),
  );
  expect(decode('f16', target)[0]).toBe(65504);
});

it('may write into one of its sources', () => {
  for (const { dtype, name } of taken) {
    const sources = [1, 2, 3].map((seed) =>
      dtype in INTEGER_BITS ? (randomBytes(dtype, 9, seed) as Elements) : floats(dtype as 'f32', 9, seed),
    );
    const apart = createStorage(dtype, 9) as Elements;
    reduce(dtype, opOf(name), apart, sources);
    for (let s = 0; s < 3; s++) {
      const copies = sources.map((source) => source.slice() as Elements);
      reduce(dtype, opOf(name), copies[s]!, copies);
      expect(bits(copies[s]!), `${name} of ${dtype} into source ${s}`).toBe(bits(apart));
    }
  }
});

describe('NaN', () => {
  const CANONICAL = { f64: '000000000000f87f', f32: '0000c07f', f16: '007e', bf16: 'c07f' } as const;
  /** Signalling, with a sign and a payload; and the same, quiet. */
  const ODD = {
    f64: ['010000000000f0ff', '010000000000f8ff'],
    f32: ['010080ff', '0100c0ff'],
    f16: ['01fc', '01fe'],
    bf16: ['81ff', 'c1ff'],
  } as const;
  const raw = (dtype: keyof typeof ODD, hex: string): Elements => {
    const made = createStorage(dtype, hex.length / 2 / ODD_BYTES[dtype]);
    new Uint8Array(made.buffer).set(Buffer.from(hex, 'hex'));
    return made;
  };
  const ODD_BYTES = { f64: 8, f32: 4, f16: 2, bf16: 2 } as const;

  describe.each(['f64', 'f32', 'f16', 'bf16'] as const)('of %s', (dtype) => {
    const one = encode(dtype, [1]) as Elements;
    const [signalling, quiet] = ODD[dtype];
    const odd = raw(dtype, signalling);
    const sums = REDUCE_OPS.filter((name) => !['min', 'max', 'band', 'bor', 'bxor'].includes(name));

    it.each(sums)('is canonical after %s', (name) => {
      const target = createStorage(dtype, 1) as Elements;
      for (const sources of [[odd], [odd, one], [one, odd], [odd, odd]]) {
        reduce(dtype, opOf(name), target, sources);
        expect(bits(target)).toBe(CANONICAL[dtype]);
      }
    });

    it('is canonical after inf - inf and 0 * inf', () => {
      const target = createStorage(dtype, 1) as Elements;
      const infinity = dtype === 'f16' ? raw('f16', '007c') : encode(dtype, [Number.POSITIVE_INFINITY]);
      const minus = encode(dtype, [Number.NEGATIVE_INFINITY]);
      reduce(dtype, 'sum', target, [infinity, minus]);
      expect(bits(target)).toBe(CANONICAL[dtype]);
      reduce(dtype, 'product', target, [encode(dtype, [0]), infinity]);
      expect(bits(target)).toBe(CANONICAL[dtype]);
    });

    it.each(['min', 'max'] as const)('of %s is the first one, quiet', (name) => {
      const target = createStorage(dtype, 1) as Elements;
      const other = raw(dtype, CANONICAL[dtype]);
      for (const sources of [[odd], [odd, one], [one, odd], [one, odd, other]]) {
        reduce(dtype, name, target, sources);
        expect(bits(target)).toBe(quiet);
      }
      reduce(dtype, name, target, [one, other, odd]);
      expect(bits(target)).toBe(CANONICAL[dtype]);
    });

    it('is not made of zeros, whose signs min and max order', () => {
      const target = createStorage(dtype, 1) as Elements;
      const [minus, plus] = [encode(dtype, [-0]), encode(dtype, [0])];
      for (const sources of [
        [minus, plus],
        [plus, minus],
      ]) {
        reduce(dtype, 'min', target, sources);
        expect(bits(target)).toBe(bits(minus));
        reduce(dtype, 'max', target, sources);
        expect(bits(target)).toBe(bits(plus));
      }
    });
  });
});

it('rounds the factor of premul-sum to f32, but for f64', () => {
  const op = { op: 'premul-sum', factor: 0.1 } as const;
  const single = new Float32Array(1);
  reduceInto('f32', op, single, [Float32Array.of(3)]);
  expect(single[0]).toBe(Math.fround(3 * Math.fround(0.1)));
  const double = new Float64Array(1);
  reduceInto('f64', op, double, [Float64Array.of(3)]);
  expect(double[0]).toBe(3 * 0.1);
});

describe('native code folds to the same bits', () => {
  const length = 2 * NATIVE_ELEMENTS + 5;
  const cases = DTYPES.flatMap((dtype) =>
    REDUCE_OPS.filter((op) => refusal(op, dtype) === undefined).map((op) => [dtype, op] as const),
  );
  it.each(cases)('%s, %s', (dtype, op) => {
    for (const count of [1, 2, 5]) {
      const sources = Array.from({ length: count }, (_, s) => randomBytes(dtype, length, 31 * s + 1));
      const expected = createStorage(dtype, length);
      reduce(dtype, opOf(op), expected, sources);
      const apart = createStorage(dtype, length);
      foldElements(dtype, opOf(op), apart, sources);
      expect(bits(apart)).toBe(bits(expected));
      // In place of the last one, and behind the begin of a buffer, as payload lies.
      const behind = createStorage(dtype, length + 4).subarray(4);
      behind.set(sources.at(-1)! as never);
      foldElements(dtype, opOf(op), behind, [...sources.slice(0, -1), behind]);
      expect(bits(behind)).toBe(bits(expected));
    }
  });

  it('also into arrays of a SharedArrayBuffer', () => {
    const shared = new Float32Array(new SharedArrayBuffer(4 * length)).fill(3);
    foldElements('f32', 'sum', shared, [shared, new Float32Array(length).fill(4)]);
    expect(shared.every((one) => one === 7)).toBe(true);
  });

  it('but for a mean of more ranks than there are arrays', () => {
    const sums = [new Float32Array(length).fill(3), new Float32Array(length).fill(5)];
    const mean = new Float32Array(length);
    foldElements('f32', 'avg', mean, sums, 4);
    expect(mean).toEqual(new Float32Array(length).fill(2));
  });
});
