import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  createStorage,
  DTYPES,
  type DType,
  decode,
  elementBytes,
  encode,
  type FloatDType,
  isDType,
  isStorageOf,
  viewStorage,
} from '../src/dtype.js';
import { deadBytes, resizable } from './dead-bytes.js';

type Small = Exclude<FloatDType, 'f64' | 'f32'>;

/** What each format means, written as arithmetic instead of bit moves. */
const FORMATS: Record<
  Exclude<Small, 'ue8m0'>,
  { codes: number; mantissa: number; exponent: number; bias: number; infinity: boolean; saturates: boolean }
> = {
  f16: { codes: 65536, mantissa: 10, exponent: 5, bias: 15, infinity: true, saturates: false },
  bf16: { codes: 65536, mantissa: 7, exponent: 8, bias: 127, infinity: true, saturates: false },
  f8e5m2: { codes: 256, mantissa: 2, exponent: 5, bias: 15, infinity: true, saturates: true },
  f8e4m3: { codes: 256, mantissa: 3, exponent: 4, bias: 7, infinity: false, saturates: true },
};
const SIGNED = Object.keys(FORMATS) as (keyof typeof FORMATS)[];

function meaningOf(dtype: keyof typeof FORMATS, code: number): number {
  const f = FORMATS[dtype];
  const sign = code >= f.codes / 2 ? -1 : 1;
  const magnitude = code % (f.codes / 2);
  const exponent = Math.floor(magnitude / 2 ** f.mantissa);
  const mantissa = magnitude % 2 ** f.mantissa;
  const top = 2 ** f.exponent - 1;
  if (f.infinity && exponent === top) return mantissa === 0 ? sign * Number.POSITIVE_INFINITY : Number.NaN;
  if (!f.infinity && exponent === top && mantissa === 2 ** f.mantissa - 1) return Number.NaN;
  if (exponent === 0) return sign * (mantissa / 2 ** f.mantissa) * 2 ** (1 - f.bias);
  return sign * (1 + mantissa / 2 ** f.mantissa) * 2 ** (exponent - f.bias);
}

function allCodes<D extends Small>(dtype: D) {
  const storage = createStorage(dtype, 256 ** elementBytes(dtype));
  for (let i = 0; i < storage.length; i++) storage[i] = i;
  return storage;
}

const doubleBits = new BigInt64Array(1);
const doubleValue = new Float64Array(doubleBits.buffer);
/** The next double away from zero (`by` 1) or towards it (-1). */
function nudge(value: number, by: 1 | -1): number {
  doubleValue[0] = value;
  doubleBits[0] = doubleBits[0]! + BigInt(by);
  return doubleValue[0]!;
}

const encodeOne = (dtype: Small, value: number): number => encode(dtype, [value])[0] as number;

describe.each(SIGNED)('%s', (dtype) => {
  const codes = allCodes(dtype);
  const decoded = decode(dtype, codes);
  const finite = [...codes].filter((code) => code < codes.length / 2 && Number.isFinite(meaningOf(dtype, code)));
  const largest = finite.at(-1)!;

  it('decodes every code to the value that its fields mean', () => {
    for (let code = 0; code < codes.length; code++) {
      if (!Object.is(decoded[code], meaningOf(dtype, code))) {
        expect.fail(`code ${code} decoded to ${decoded[code]}, means ${meaningOf(dtype, code)}`);
      }
    }
  });

  it('round-trips every code that is not a NaN or a saturated infinity, from singles and from doubles', () => {
    const again = encode(dtype, decoded);
    const fromDoubles = encode(dtype, Float64Array.from(decoded));
    for (let code = 0; code < codes.length; code++) {
      const value = meaningOf(dtype, code);
      if (Number.isNaN(value)) continue;
      const expected = Number.isFinite(value) || !FORMATS[dtype].saturates ? code : code - 1;
      if (again[code] !== expected || fromDoubles[code] !== expected) {
        expect.fail(`code ${code} became ${again[code]} and ${fromDoubles[code]}, expected ${expected}`);
      }
    }
  });

  it('keeps NaN a quiet NaN with its sign and the payload that fits', () => {
    const quietBit = dtype === 'f8e4m3' ? 0 : 2 ** (FORMATS[dtype].mantissa - 1);
    const bits = new Uint32Array(decoded.buffer);
    const again = encode(dtype, decoded);
    let seen = 0;
    for (let code = 0; code < codes.length; code++) {
      if (!Number.isNaN(meaningOf(dtype, code))) continue;
      seen++;
      expect(bits[code]! & 0x00400000, `code ${code} decodes quiet`).not.toBe(0);
      expect(again[code], `code ${code}`).toBe(code | quietBit);
    }
    expect(seen).toBe({ f16: 2 * 1023, bf16: 2 * 127, f8e5m2: 6, f8e4m3: 2 }[dtype]);
    expect(Number.isNaN(decode(dtype, encode(dtype, [Number.NaN]))[0])).toBe(true);
  });

  it('keeps a signalling NaN whose payload does not fit a NaN', () => {
    const signalling = new Float32Array(new Uint32Array([0x7f800001, 0xff800001]).buffer);
    expect([...decode(dtype, encode(dtype, signalling))].every(Number.isNaN)).toBe(true);
  });

  it('rounds to nearest, ties to even, once: at, just below and just above every midpoint', () => {
    for (let i = 0; i + 1 < finite.length; i++) {
      const [low, high] = [finite[i]!, finite[i + 1]!];
      const middle = (meaningOf(dtype, low) + meaningOf(dtype, high)) / 2;
      const even = low % 2 === 0 ? low : high;
      const half = codes.length / 2;
      const found = encode(dtype, [
        middle,
        nudge(middle, -1),
        nudge(middle, 1),
        -middle,
        -nudge(middle, -1),
        -nudge(middle, 1),
      ]);
      const expected = [even, low, high, even + half, low + half, high + half];
      if (expected.some((code, k) => found[k] !== code)) {
        expect.fail(`around ${middle}: found ${found.join()}, expected ${expected.join()}`);
      }
    }
  });

  it('keeps signed zeros and flushes nothing above half of the smallest subnormal', () => {
    const smallest = meaningOf(dtype, 1);
    expect([...encode(dtype, [0, -0, smallest, smallest / 2, nudge(smallest / 2, 1), 5e-324, -5e-324])]).toEqual([
      0,
      codes.length / 2,
      1,
      0,
      1,
      0,
      codes.length / 2,
    ]);
  });

  it('overflows as documented', () => {
    const top = meaningOf(dtype, largest);
    const step = top - meaningOf(dtype, largest - 1);
    const beyond = FORMATS[dtype].saturates ? largest : largest + 1;
    const half = codes.length / 2;
    expect([...encode(dtype, [nudge(top + step / 2, -1), top + step / 2, 1e300])]).toEqual([largest, beyond, beyond]);
    expect([...encode(dtype, [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, Number.MAX_VALUE])]).toEqual([
      beyond,
      beyond + half,
      beyond,
    ]);
  });

  it('finds the nearest code of any double', () => {
    const values = finite.map((code) => meaningOf(dtype, code));
    fc.assert(
      fc.property(fc.double({ noNaN: true, min: -values.at(-1)!, max: values.at(-1)! }), (x) => {
        const got = Math.abs(decode(dtype, encode(dtype, [x]))[0]!);
        const upper = values.findIndex((v) => v >= Math.abs(x));
        const best = Math.min(
          Math.abs(values[upper]! - Math.abs(x)),
          Math.abs(values[Math.max(0, upper - 1)]! - Math.abs(x)),
        );
        expect(Math.abs(got - Math.abs(x))).toBe(best);
      }),
      { numRuns: 300 },
    );
  });
});

describe('ue8m0', () => {
  const codes = allCodes('ue8m0');
  it('decodes every code to its power of two and back', () => {
    const decoded = decode('ue8m0', codes);
    for (let code = 0; code < 255; code++) expect(decoded[code]).toBe(2 ** (code - 127));
    expect(decoded[255]).toBeNaN();
    expect([...encode('ue8m0', decoded)]).toEqual([...codes]);
    expect([...encode('ue8m0', Float64Array.from(decoded))]).toEqual([...codes]);
  });

  it('rounds to the nearest power, ties up', () => {
    for (let code = 0; code < 254; code++) {
      const tie = 1.5 * 2 ** (code - 127);
      expect([...encode('ue8m0', [tie, nudge(tie, -1), nudge(tie, 1)])], `tie ${code}`).toEqual([
        code + 1,
        code,
        code + 1,
      ]);
    }
  });

  it('saturates at both ends and has no sign', () => {
    expect([...encode('ue8m0', [0, -0, 1e-300, 1e300, Number.POSITIVE_INFINITY, 1.9 * 2 ** 127])]).toEqual([
      0, 0, 0, 254, 254, 254,
    ]);
    expect([...encode('ue8m0', [-1, Number.NEGATIVE_INFINITY, -5e-324, Number.NaN])]).toEqual([255, 255, 255, 255]);
  });
});

describe('f32 and f64', () => {
  it('copy, never alias', () => {
    const source = new Float32Array([1.5, -0]);
    const copy = decode('f32', source);
    expect(copy).toEqual(source);
    copy[0] = 9;
    expect(source[0]).toBe(1.5);
    expect(encode('f32', [0.1])).toEqual(new Float32Array([0.1]));
    expect(decode('f64', encode('f64', [0.1]))).toEqual(new Float64Array([0.1]));
  });
});

describe('storage', () => {
  it('knows the bytes of every element', () => {
    expect(Object.fromEntries(DTYPES.map((dtype) => [dtype, elementBytes(dtype)]))).toEqual({
      f64: 8,
      f32: 4,
      f16: 2,
      bf16: 2,
      f8e4m3: 1,
      f8e5m2: 1,
      ue8m0: 1,
      i64: 8,
      u64: 8,
      i32: 4,
      u32: 4,
      i16: 2,
      u16: 2,
      i8: 1,
      u8: 1,
    });
  });

  it('makes, views and recognises carriers', () => {
    const storage = createStorage('bf16', 4);
    expect(storage).toBeInstanceOf(Uint16Array);
    viewStorage('u8', storage.buffer, 2, 2)[0] = 0x80;
    expect(storage[1]).toBe(0x80);
    expect(isStorageOf('bf16', storage)).toBe(true);
    expect(isStorageOf('f32', storage)).toBe(false);
    expect(isStorageOf('u8', Buffer.alloc(1))).toBe(true);
    expect(isDType('toString')).toBe(false);
  });

  it('refuses unknown dtypes, integers and wrong carriers', () => {
    const bad = (run: () => unknown) => expect(run).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
    bad(() => elementBytes('f4' as 'f32'));
    bad(() => encode('i32' as 'f32', [1]));
    bad(() => decode('i32' as 'f32', new Int32Array(1) as unknown as Float32Array));
    bad(() => decode('bf16', new Uint8Array(2) as unknown as Uint16Array));
    bad(() => decode('f32', new Float64Array(2) as unknown as Float32Array));
  });

  it('encodes one value of every float dtype', () => {
    expect(encodeOne('bf16', 1)).toBe(0x3f80);
    expect(encodeOne('f16', 1)).toBe(0x3c00);
    expect(encodeOne('f8e4m3', 1)).toBe(0x38);
    expect(encodeOne('f8e5m2', 1)).toBe(0x3c);
    expect(encodeOne('ue8m0', 1)).toBe(127);
  });
});

describe('windows on memory', () => {
  const buffer = new ArrayBuffer(16);
  const resized = resizable(16, 16);
  resized.resize(6);

  it('lie where they were asked for', () => {
    const window = viewStorage('f16', buffer, 6, 5);
    expect([window.buffer === buffer, window.byteOffset, window.length]).toEqual([true, 6, 5]);
    expect(viewStorage('f64', buffer, 16, 0).length).toBe(0);
    expect(viewStorage('u8', new SharedArrayBuffer(3), 1, 2).length).toBe(2);
  });

  it.each<readonly [string, DType, unknown, unknown, unknown, RegExp]>([
    ['behind the end', 'f32', buffer, 8, 3, /length must be an integer from 0 to 2, found 3/],
    ['that begins behind the end', 'u8', buffer, 17, 0, /byteOffset must be an integer from 0 to 16, found 17/],
    ['below the start', 'u8', buffer, -1, 1, /byteOffset must be .* found -1/],
    ['of less than nothing', 'u8', buffer, 0, -1, /length must be .* found -1/],
    ['of half an element', 'f32', buffer, 0, 1.5, /length must be .* found 1.5/],
    ['between elements', 'f32', buffer, 2, 1, /byteOffset must be a multiple of the 4 bytes of f32, found 2/],
    ['behind what a buffer was shrunk to', 'f32', resized, 4, 1, /length must be an integer from 0 to 0, found 1/],
    ['on a typed array', 'u8', new Uint8Array(4), 0, 1, /buffer must be an ArrayBuffer/],
    ['of nothing said', 'u8', buffer, undefined, undefined, /byteOffset must be .* found undefined/],
  ])('%s are refused', (_, dtype, given, byteOffset, length, message) => {
    expect(() => viewStorage(dtype, given as ArrayBuffer, byteOffset as number, length as number)).toThrow(
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(message) }),
    );
  });

  it('on a detached buffer are refused, also empty ones', () => {
    expect(() => viewStorage('u8', deadBytes().detached.buffer, 0, 0)).toThrow(
      expect.objectContaining({ code: 'EP_DETACHED' }),
    );
  });
});

it.each(['f64', 'f32', 'bf16', 'f16', 'f8e4m3', 'f8e5m2', 'ue8m0'] as const)('encodes only numbers as %s', (dtype) => {
  for (const values of [null, undefined, 5, '12', {}, { length: -1 }, new DataView(new ArrayBuffer(8))])
    expect(() => encode(dtype, values as never)).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
  for (const values of [
    BigInt64Array.of(1n),
    BigUint64Array.of(1n),
    [1n],
    [0, '1'],
    [1, undefined],
    { length: 2 ** 40 },
  ])
    expect(() => encode(dtype, values as never)).toThrow(
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(/^encode \w+: values/) }),
    );
  expect([...decode(dtype, encode(dtype, { length: 2, 0: 1, 1: 2 }))]).toEqual([1, 2]);
});
