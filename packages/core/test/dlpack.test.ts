import { describe, expect, it } from 'vitest';
import { type DlpackTensor, dlpackTensor } from '../src/index.js';

const GOOD: DlpackTensor = {
  data: 0x7f00_0000_0000n,
  byte_offset: 256,
  device: { type: 2, id: 1 },
  dtype: { code: 4, bits: 16, lanes: 1 },
  shape: [3, 5],
  strides: [5, 1],
};
const withFields = (fields: object): DlpackTensor => ({ ...GOOD, ...fields });
const refused = (fields: object, code: string, message: RegExp): void =>
  expect(() => dlpackTensor(withFields(fields))).toThrow(
    expect.objectContaining({ code, message: expect.stringMatching(message) }),
  );

describe('dlpackTensor', () => {
  it('gives what adopt takes', () => {
    expect(dlpackTensor(GOOD)).toEqual({
      dtype: 'bf16',
      shape: [3, 5],
      address: 0x7f00_0000_0100n,
      byteLength: 30,
      device: { kind: 'cuda', index: 1 },
      readOnly: false,
    });
    // As it comes out of JSON: numbers, null, no offset.
    const { data, byte_offset, ...rest } = GOOD;
    const plain = JSON.parse(JSON.stringify({ ...rest, strides: null, data: Number(data) }));
    expect(dlpackTensor(plain).address).toBe(data);
  });

  it.each([
    [1, 'host', 0],
    [2, 'cuda', 3],
    [3, 'host', 0],
    [13, 'cuda', 3],
  ])('device type %i is of the %s', (type, kind, index) => {
    expect(dlpackTensor(withFields({ device: { type, id: 3 } })).device).toEqual({ kind, index });
  });

  it.each([
    ['0/8', 'i8'],
    ['0/16', 'i16'],
    ['0/32', 'i32'],
    ['0/64', 'i64'],
    ['1/8', 'u8'],
    ['1/16', 'u16'],
    ['1/32', 'u32'],
    ['1/64', 'u64'],
    ['2/16', 'f16'],
    ['2/32', 'f32'],
    ['2/64', 'f64'],
    ['4/16', 'bf16'],
    ['6/8', 'u8'],
    ['10/8', 'f8e4m3'],
    ['12/8', 'f8e5m2'],
    ['14/8', 'ue8m0'],
  ])('code and bits %s are %s', (name, dtype) => {
    const [code, bits] = name.split('/').map(Number);
    expect(dlpackTensor(withFields({ dtype: { code, bits, lanes: 1 } })).dtype).toBe(dtype);
  });

  it.each([
    [2, 8, 1],
    [3, 64, 1],
    [4, 8, 1],
    [5, 64, 1],
    [6, 1, 1],
    [8, 8, 1], // has infinities, which f8e4m3 has not
    [9, 8, 1],
    [11, 8, 1],
    [13, 8, 1],
    [15, 6, 1],
    [17, 4, 1],
    [2, 32, 4],
    [99, 8, 1],
  ])('code %i of %i bits and %i lanes is no dtype', (code, bits, lanes) => {
    refused({ dtype: { code, bits, lanes } }, 'EP_UNSUPPORTED', /elements of code \d+ \(\w+\).* no dtype here/);
  });

  it('takes contiguous tensors only', () => {
    for (const [shape, strides] of [
      [[], []],
      [
        [4, 1, 6],
        [6, 77, 1],
      ],
      [
        [0, 6],
        [1, 0],
      ],
      [[1], [-3]],
    ]) {
      expect(dlpackTensor(withFields({ shape, strides })).shape).toEqual(shape);
    }
    for (const strides of [
      [6, 1],
      [1, 3],
      [0, 1],
      [-5, 1],
    ]) {
      refused({ strides }, 'EP_UNSUPPORTED', /not contiguous: strides .* of shape \[3, 5\]/);
    }
    refused({ strides: [1] }, 'EP_INVALID_ARGUMENT', /strides must be an array of 2/);
    refused({ strides: [5, 1.5] }, 'EP_INVALID_ARGUMENT', /strides\[1\]/);
  });

  it('refuses bytes that no memory has', () => {
    const strides = undefined;
    refused({ shape: [2 ** 30, 2 ** 30], strides }, 'EP_INVALID_ARGUMENT', /byte length must be a safe integer/);
    refused({ shape: [2 ** 53], strides }, 'EP_INVALID_ARGUMENT', /shape\[0\]/);
    refused({ shape: [-1], strides }, 'EP_INVALID_ARGUMENT', /shape\[0\]/);
    refused({ data: (1n << 64n) - 16n, byte_offset: 0 }, 'EP_INVALID_ARGUMENT', /30 bytes end within 64 bits/);
    refused({ data: (1n << 64n) - 2n, byte_offset: 1n << 63n }, 'EP_INVALID_ARGUMENT', /end within 64 bits/);
    refused({ data: 0n, byte_offset: 0 }, 'EP_INVALID_ARGUMENT', /data must be an address/);
    refused({ byte_offset: 3 }, 'EP_INVALID_ARGUMENT', /address must be a multiple of 2/);
    const none = dlpackTensor(withFields({ data: 0, byte_offset: 0, shape: [0], strides }));
    expect([none.address, none.byteLength]).toEqual([0n, 0]);
  });

  it('refuses devices that are none of ours', () => {
    refused({ device: { type: 10, id: 0 } }, 'EP_UNSUPPORTED', /type 10 \(kDLROCM\); known are kDLCPU \(1\)/);
    refused({ device: { type: 99, id: 0 } }, 'EP_UNSUPPORTED', /type 99; known are/);
    refused({ device: { type: 2, id: -1 } }, 'EP_INVALID_ARGUMENT', /device\.id/);
  });

  it('knows versions and flags', () => {
    const { readOnly } = dlpackTensor(withFields({ version: { major: 1, minor: 9 }, flags: 1n }));
    expect(readOnly).toBe(true);
    expect(dlpackTensor(withFields({ flags: 2 })).readOnly).toBe(false);
    refused({ version: { major: 2, minor: 0 } }, 'EP_UNSUPPORTED', /DLPack 2 is not known here, 1 is/);
  });

  it.each([
    { data: '0x10' },
    { data: -1 },
    { data: 1n << 64n },
    { data: undefined },
    { byte_offset: -1n },
    { device: 'cuda' },
    { device: { type: 2 } },
    { dtype: 'f32' },
    { dtype: { code: 2, bits: 32 } },
    { shape: 3 },
    { shape: [3n] },
    { strides: 'none' },
    { flags: 0.5 },
    { version: 1 },
  ])('refuses %o', (fields) => {
    refused(fields, 'EP_INVALID_ARGUMENT', /^dlpackTensor: /);
  });

  it.each([undefined, null, 7, []])('refuses %o for a tensor', (source) => {
    expect(() => dlpackTensor(source as never)).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
  });
});
