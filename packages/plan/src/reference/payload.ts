import { checkBoolean, checkInteger, checkNumbers, checkObject, wrongKind } from '../check.js';
import { invalidArgument, shown } from '../error.js';
import { maxHidden, type Payload, payloadBytes, scaledChannels } from '../moe/payload.js';

/** Payloads that are cast from numbers, 128 channels to a scale. */
export type CastPayload = Extract<Payload, 'f8e4m3+f32' | 'f8e4m3+ue8m0' | 'logfmt10'>;

export interface CastOptions {
  /** `f8e4m3+f32` only: round scales up to a power of two, as `f8e4m3+ue8m0` always does. */
  readonly roundScales?: boolean;
}

const f = Math.fround;
const single = new Float32Array(1);
const bits = new Uint32Array(single.buffer);
const bitsOf = (x: number): number => {
  single[0] = x;
  return bits[0]!;
};
const ofBits = (b: number): number => {
  bits[0] = b;
  return single[0]!;
};

/**
 * A token's channels as they travel: codes, then the scales of its blocks of 128 channels, `payloadBytes(payload, row.length)` bytes. Numbers are rounded to
 * fp32 first. The bits are those of the kernels; every step below is one operation in fp32.
 *
 * `f8e4m3+…`: with amax the largest magnitude of the block, but at least 1e-4, code = e4m3(x * (448 / amax)), scale = amax / 448; or scale = the least power of two
 * that keeps amax / scale within 448, code = e4m3(x / scale). `logfmt10`: docs/moe.md, "LogFMT-10"; of numbers rounded to bf16.
 *
 * A block that holds an infinity or a NaN is NaN in all of its channels.
 */
export function castRow(payload: CastPayload, row: ArrayLike<number>, options: CastOptions = {}): Uint8Array {
  checkCast(payload);
  checkObject(row, 'row');
  const hidden = checkInteger(row.length, 'row.length', 1, maxHidden);
  checkNumbers(row, 'row', hidden);
  checkObject(options, 'options');
  const roundScales = checkBoolean(options.roundScales ?? false, 'roundScales');
  const bytes = new Uint8Array(payloadBytes(payload, hidden));
  const view = new DataView(bytes.buffer);
  const scales = scalesOffset(payload, hidden);
  for (let first = 0, block = 0; first < hidden; first += scaledChannels, block++) {
    const values = Array.from({ length: Math.min(scaledChannels, hidden - first) }, (_, c) => f(row[first + c]!));
    if (payload === 'logfmt10') {
      const { codes, largest, smallest } = castLogfmt(values);
      for (const [c, code] of codes.entries()) writeBits(bytes, 10 * (first + c), code);
      view.setUint16(scales + 4 * block, largest, true);
      view.setUint16(scales + 4 * block + 2, smallest, true);
      continue;
    }
    const { codes, scale } = castE4m3(values, payload === 'f8e4m3+ue8m0' || roundScales);
    bytes.set(codes, first);
    if (payload === 'f8e4m3+f32')
      view.setUint32(scales + 4 * block, Number.isNaN(scale) ? 0x7fc00000 : bitsOf(scale), true);
    else bytes[scales + block] = Number.isNaN(scale) ? 0xff : bitsOf(scale) >>> 23;
  }
  return bytes;
}

/** The numbers that a cast row stands for: what a sum of mixtures adds up. */
export function uncastRow(payload: CastPayload, hidden: number, bytes: Uint8Array): Float32Array {
  checkCast(payload);
  const expected = payloadBytes(payload, hidden);
  if (!(bytes instanceof Uint8Array)) throw wrongKind('bytes', 'a Uint8Array', bytes);
  if (bytes.length !== expected) {
    throw invalidArgument(`bytes must hold ${expected} bytes, a row of ${hidden} channels, found ${bytes.length}`, {
      name: 'bytes',
      expected,
      found: bytes.length,
    });
  }
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const scales = scalesOffset(payload, hidden);
  return Float32Array.from({ length: hidden }, (_, c) => {
    const block = Math.floor(c / scaledChannels);
    if (payload === 'logfmt10') {
      const largest = view.getUint16(scales + 4 * block, true);
      const smallest = view.getUint16(scales + 4 * block + 2, true);
      return largest >= 0x7f80 ? Number.NaN : logfmtNumber(logfmtBlock(largest, smallest), readBits(bytes, 10 * c));
    }
    const scale =
      payload === 'f8e4m3+f32' ? view.getFloat32(scales + 4 * block, true) : ue8m0Number(bytes[scales + block]!);
    return f(e4m3Number(bytes[c]!) * scale);
  });
}

function checkCast(payload: CastPayload): void {
  if (payload === 'f8e4m3+f32' || payload === 'f8e4m3+ue8m0' || payload === 'logfmt10') return;
  throw invalidArgument(
    `a payload that is cast must be f8e4m3+f32, f8e4m3+ue8m0 or logfmt10, found ${shown(payload)}`,
    {
      name: 'payload',
      found: payload,
    },
  );
}

const scalesOffset = (payload: CastPayload, hidden: number): number =>
  payload === 'logfmt10' ? Math.ceil((10 * hidden) / 8) : hidden;

/** Numbers of the codes 0 .. 126 in ascending order: 2^-9 * mantissa below 8, (8 + mantissa) * 2^(exponent - 10) above. */
const e4m3Magnitudes = Array.from({ length: 127 }, (_, code) =>
  code < 8 ? code * 2 ** -9 : (8 + (code & 7)) * 2 ** ((code >> 3) - 10),
);

function e4m3Number(code: number): number {
  const magnitude = (code & 0x7f) === 0x7f ? Number.NaN : e4m3Magnitudes[code & 0x7f]!;
  return code >= 128 ? -magnitude : magnitude;
}

/** The nearest code, the even one of two that are as near; beyond 448 it is 448's. */
function e4m3Code(x: number): number {
  const sign = Object.is(Math.sign(x), -0) || x < 0 ? 0x80 : 0;
  const magnitude = Math.abs(x);
  let code = 0;
  while (code < 126 && e4m3Magnitudes[code + 1]! <= magnitude) code++;
  if (code < 126) {
    const below = magnitude - e4m3Magnitudes[code]!;
    const above = e4m3Magnitudes[code + 1]! - magnitude;
    if (above < below || (above === below && code % 2 === 1)) code++;
  }
  return sign | code;
}

const ue8m0Number = (code: number): number => (code === 0xff ? Number.NaN : 2 ** (code - 127));

function castE4m3(values: readonly number[], power: boolean): { codes: number[]; scale: number } {
  if (!values.every(Number.isFinite)) return { codes: values.map(() => 0x7f), scale: Number.NaN };
  const amax = values.reduce((most, x) => Math.max(most, Math.abs(x)), f(1e-4));
  if (!power) {
    const inverse = f(448 / amax);
    return { codes: values.map((x) => e4m3Code(f(x * inverse))), scale: f(amax / 448) };
  }
  let scale = 2 ** -127;
  while (amax > 448 * scale) scale *= 2;
  return { codes: values.map((x) => e4m3Code(f(x / scale))), scale };
}

/** bf16 codes: nearest, ties to even. */
function bf16Code(x: number): number {
  const b = bitsOf(x);
  return Number.isNaN(x) ? 0x7fc0 : (b + 0x7fff + ((b >>> 16) & 1)) >>> 16;
}
const bf16Number = (code: number): number => ofBits((code << 16) >>> 0);

interface LogfmtBlock {
  readonly low: number;
  readonly step: number;
  readonly inverse: number;
  readonly rise: number;
  readonly least: number;
}

function castLogfmt(values: readonly number[]): { codes: number[]; largest: number; smallest: number } {
  const halves = values.map(bf16Code);
  const magnitudes = halves.map((half) => half & 0x7fff);
  const largest = Math.max(...magnitudes);
  if (largest >= 0x7f80) return { codes: values.map(() => 0), largest: 0x7fc0, smallest: 0x7fc0 };
  const others = magnitudes.filter((magnitude) => magnitude !== 0);
  const smallest = others.length === 0 ? 0 : Math.min(...others);
  const block = logfmtBlock(largest, smallest);
  const codes = halves.map((half) => {
    const sign = (half & 0x8000) >> 6;
    if ((half & 0x7fff) === 0) return sign;
    const log = log2(bf16Number(half & 0x7fff));
    const place = f(f(f(log - block.low) * block.inverse) + block.rise);
    return sign | Math.max(block.least, Math.trunc(Math.min(511, Math.max(0, place))));
  });
  return { codes, largest, smallest };
}

function logfmtBlock(largest: number, smallest: number): LogfmtBlock {
  if (largest === 0) return { low: 0, step: 0, inverse: 0, rise: 0, least: 0 };
  const high = log2(bf16Number(largest));
  const lowest = log2(bf16Number(smallest));
  const bound = f(high - 32);
  const low = Math.max(lowest, bound);
  const step = f(f(high - low) / 510);
  if (!(step > 0)) return { low, step: 0, inverse: 0, rise: 1, least: 1 };
  const inverse = f(1 / step);
  const middle = log2(f(f(1 + exp2(step)) * 0.5));
  return { low, step, inverse, rise: f(2 - f(middle * inverse)), least: lowest < bound ? 0 : 1 };
}

function logfmtNumber({ low, step }: LogfmtBlock, code: number): number {
  const magnitude = code & 0x1ff;
  const value = magnitude === 0 ? 0 : exp2(f(f((magnitude - 1) * step) + low));
  return (code & 0x200) === 0 ? value : -value;
}

/** Logarithm and power of the format: the series that kernels compute, since no two libraries agree on the last bit of theirs. Both to 3e-7. */
function log2(x: number): number {
  let mantissa = x;
  let exponent = 0;
  for (; mantissa >= ofBits(0x3fb504f3); mantissa /= 2) exponent++;
  for (; mantissa < ofBits(0x3f3504f3); mantissa *= 2) exponent--;
  const s = f(f(mantissa - 1) / f(mantissa + 1));
  const z = f(s * s);
  const series = [9, 7, 5, 3, 1].map((k) => f(2 / (k * Math.LN2)));
  const sum = series.slice(1).reduce((all, term) => f(f(all * z) + term), series[0]!);
  return f(exponent + f(sum * s));
}

function exp2(x: number): number {
  const n = f(f(x + 12582912) - 12582912);
  const rest = f(x - n);
  const series = [1.540353e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 0.24022651, Math.LN2, 1].map(f);
  const sum = series.slice(1).reduce((all, term) => f(f(all * rest) + term), series[0]!);
  const half = Math.trunc(n / 2);
  return f(f(sum * 2 ** half) * 2 ** (n - half));
}

function writeBits(bytes: Uint8Array, at: number, code: number): void {
  for (let i = 0; i < 10; i++) if ((code >> i) & 1) bytes[(at + i) >> 3]! |= 1 << ((at + i) & 7);
}

function readBits(bytes: Uint8Array, at: number): number {
  let code = 0;
  for (let i = 0; i < 10; i++) code |= ((bytes[(at + i) >> 3]! >> ((at + i) & 7)) & 1) << i;
  return code;
}
