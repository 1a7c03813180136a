import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { payloadBytes } from '../../src/moe/index.js';
import { type CastPayload, castRow, uncastRow } from '../../src/reference/index.js';

const payloads = ['f8e4m3+f32', 'f8e4m3+ue8m0', 'logfmt10'] as const;

/** The same row as in native/tests/device/moe_cast_test.cpp: exponents 2^-20 .. 2^11, every 17th channel 0. */
function goldenRow(): Float32Array {
  const bits = new Uint32Array(300);
  let state = 1;
  for (let c = 0; c < bits.length; c++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    bits[c] = c % 17 === 0 ? 0 : (state & 0x807fffff) | ((107 + ((state >>> 23) % 32)) << 23);
  }
  return new Float32Array(bits.buffer);
}

/** FNV-1a of the payload and of the bits that it stands for. */
function hash(payload: CastPayload, bytes: Uint8Array): number {
  let sum = 2166136261;
  const add = (byte: number) => {
    sum = Math.imul(sum ^ byte, 16777619) >>> 0;
  };
  bytes.forEach(add);
  new Uint8Array(uncastRow(payload, 300, bytes).buffer).forEach(add);
  return sum;
}

describe('casts of the reference', () => {
  it('have the bits of the kernels (moe_cast_test.cpp has the same numbers)', () => {
    const row = goldenRow();
    expect([
      hash('f8e4m3+f32', castRow('f8e4m3+f32', row)),
      hash('f8e4m3+f32', castRow('f8e4m3+f32', row, { roundScales: true })),
      hash('f8e4m3+ue8m0', castRow('f8e4m3+ue8m0', row)),
      hash('logfmt10', castRow('logfmt10', row)),
    ]).toEqual([4265769606, 229374468, 3927291269, 63459384]);
  });

  it('stand for what was cast, as near as their formats are', () => {
    const row = fc.array(fc.float({ noNaN: true, min: -(2 ** 100), max: 2 ** 100 }), {
      minLength: 1,
      maxLength: 300,
    });
    fc.assert(
      fc.property(row, fc.constantFrom(...payloads), fc.boolean(), (numbers, payload, roundScales) => {
        const bytes = castRow(payload, numbers, { roundScales });
        expect(bytes.length).toBe(payloadBytes(payload, numbers.length));
        const found = uncastRow(payload, numbers.length, bytes);
        for (let first = 0; first < numbers.length; first += 128) {
          const block = numbers.slice(first, first + 128);
          const amax = Math.max(1e-4, ...block.map(Math.abs));
          for (const [c, x] of block.entries()) {
            // e4m3: half of the last of 4 bits, or of the last place of its subnormals. LogFMT: half a step of at most 32 / 510 binades, and bf16's rounding.
            const bound =
              payload === 'logfmt10'
                ? Math.abs(x) * ((2 ** (32 / 510) - 1) / 2 + 2 ** -8) + amax * 2 ** -32 + 2 ** -133
                : Math.max(Math.abs(x) * 2 ** -4 * 1.0001, ((amax / 448) * 2) / 2 ** 10);
            expect(Math.abs(found[first + c]! - x)).toBeLessThanOrEqual(bound);
            expect(Object.is(Math.sign(found[first + c]!), Math.sign(x)) || found[first + c] === 0).toBe(true);
          }
        }
      }),
    );
  });

  it('keep exact what their formats have: 448 codes of a block whose largest is 448, powers of two in LogFMT', () => {
    const exact = [448, -240, 0.015625, 0, -0.001953125, 17 * 2 ** -4, 1];
    for (const payload of ['f8e4m3+f32', 'f8e4m3+ue8m0'] as const) {
      expect([...uncastRow(payload, 7, castRow(payload, exact))]).toEqual([448, -240, 0.015625, 0, -0.001953125, 1, 1]);
    }
    const powers = [2, -2, 0, 2];
    expect([...uncastRow('logfmt10', 4, castRow('logfmt10', powers))]).toEqual(powers);
  });

  it('make a block with an infinity or a NaN NaN all over, and no other', () => {
    for (const payload of payloads) {
      for (const bad of [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, Number.NaN]) {
        const row = Array.from({ length: 200 }, (_, c) => (c === 150 ? bad : 1));
        const found = uncastRow(payload, 200, castRow(payload, row));
        expect(found.subarray(0, 128).every((x) => Math.abs(x - 1) < 1e-6)).toBe(true);
        expect(found.subarray(128).every(Number.isNaN)).toBe(true);
      }
    }
  });

  it('refuse what is no cast and rows of another size', () => {
    expect(() => castRow('bf16' as CastPayload, [1])).toThrow('a payload that is cast must be f8e4m3+f32');
    expect(() => uncastRow('logfmt10', 4, new Uint8Array(8))).toThrow(
      'bytes must hold 9 bytes, a row of 4 channels, found 8',
    );
    expect(() => castRow('logfmt10', [])).toThrow('row.length');
  });
});
