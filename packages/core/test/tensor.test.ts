import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { checkAttached, pinBuffer } from '../src/buffers.js';
import { createStorage, DTYPES } from '../src/dtype.js';
import {
  asTensor,
  byteRange,
  elementCount,
  isContiguous,
  type PlainArray,
  rowLayout,
  rowsOf,
  tensor,
  toContiguous,
} from '../src/tensor.js';
import { detach, resizable } from './dead-bytes.js';

const throwsCode = (run: () => unknown, code: string, text?: RegExp) => {
  expect(run).toThrow(expect.objectContaining({ code, ...(text && { message: expect.stringMatching(text) }) }));
};
const iota = (n: number) => Int32Array.from({ length: n }, (_, i) => i);

describe('tensor', () => {
  it('makes zeroed storage of every dtype', () => {
    for (const dtype of DTYPES) {
      const t = tensor(dtype, [2, 3]);
      expect(t.data.length).toBe(6);
      expect(Object.isFrozen(t) && Object.isFrozen(t.shape)).toBe(true);
    }
  });

  it('accepts scalars, empty tensors and longer data', () => {
    expect(elementCount(tensor('f32', []).shape)).toBe(1);
    expect(tensor('f32', [0, 7], new Float32Array(0)).shape).toEqual([0, 7]);
    expect(tensor('i32', [2], iota(9)).data.length).toBe(9);
  });

  it.each<[string, () => unknown, RegExp]>([
    ['a negative extent', () => tensor('f32', [2, -1]), /shape\[1\] must be a safe integer of at least 0, found -1/],
    ['a fractional extent', () => tensor('f32', [1.5]), /shape\[0\].*found 1.5/],
    ['extents whose product is not a safe integer', () => tensor('f32', [2 ** 30, 2 ** 30]), /byte length/],
    ['a shape that is not an array', () => tensor('f32', 4 as unknown as number[]), /shape must be an array/],
    ['strides of another rank', () => tensor('f32', [2, 2], new Float32Array(4), [1]), /an array of 2 strides/],
    ['a negative stride', () => tensor('f32', [2], new Float32Array(4), [-1]), /strides\[0\]/],
    [
      'data that is too short',
      () => tensor('f32', [2, 3], new Float32Array(5)),
      /at least 6 elements for shape \[2, 3\], found 5/,
    ],
    [
      'strides that reach behind the data',
      () => tensor('i32', [2, 2], iota(6), [5, 1]),
      /at least 7 elements for shape \[2, 2\] and strides \[5, 1\], found 6/,
    ],
    ['the wrong carrier', () => tensor('bf16', [1], new Float32Array(1) as unknown as Uint16Array), /Uint16Array/],
    ['an unknown dtype', () => tensor('f7' as 'f32', [1]), /dtype must be one of/],
  ])('refuses %s', (_, run, text) => throwsCode(run, 'EP_INVALID_ARGUMENT', text));
});

describe('asTensor', () => {
  it('takes plain arrays whose dtype is plain', () => {
    const arrays: [PlainArray, string][] = [
      [new Float64Array(1), 'f64'],
      [new Float32Array(1), 'f32'],
      [new BigInt64Array(1), 'i64'],
      [new BigUint64Array(1), 'u64'],
      [new Int32Array(1), 'i32'],
      [new Uint32Array(1), 'u32'],
      [new Int16Array(1), 'i16'],
      [new Int8Array(1), 'i8'],
    ];
    for (const [array, dtype] of arrays) {
      const t = asTensor(array, 'test');
      expect([t.dtype, t.shape, t.data]).toEqual([dtype, [1], array]);
      expect(t.data).toBe(array);
    }
  });

  it('asks which dtype a Uint8Array, a Buffer or a Uint16Array carries', () => {
    for (const array of [new Uint8Array(1), Buffer.alloc(1), new Uint16Array(1)]) {
      throwsCode(
        () => asTensor(array as unknown as PlainArray, 'send'),
        'EP_INVALID_ARGUMENT',
        /^send: array.*tensor\(dtype, shape, data\)/,
      );
    }
  });

  it('checks tensors written by hand and other things', () => {
    throwsCode(() => asTensor({ dtype: 'f32', shape: [4], data: new Float32Array(3) }, 'send'), 'EP_INVALID_ARGUMENT');
    throwsCode(() => asTensor(null as never, 'send'), 'EP_INVALID_ARGUMENT');
    throwsCode(() => asTensor({} as never, 'send'), 'EP_INVALID_ARGUMENT');
    throwsCode(() => asTensor(new DataView(new ArrayBuffer(1)) as never, 'send'), 'EP_INVALID_ARGUMENT');
  });
});

describe('rowsOf', () => {
  const projection = tensor('i32', [3, 10], iota(30));

  it('cuts Q, K and V out of one projection without a copy', () => {
    const [q, k, v] = [
      rowsOf(projection, { columns: 6 }),
      rowsOf(projection, { firstColumn: 6, columns: 2 }),
      rowsOf(projection, { firstColumn: 8, columns: 2 }),
    ];
    for (const part of [q, k, v]) expect(part.data.buffer).toBe(projection.data.buffer);
    expect([...toContiguous(k).data]).toEqual([6, 7, 16, 17, 26, 27]);
    expect([...toContiguous(v).data]).toEqual([8, 9, 18, 19, 28, 29]);
    expect(rowLayout(q)).toEqual({ rows: 3, rowBytes: 24, strideBytes: 40 });
    expect(byteRange(v)).toEqual({ byteOffset: 32, byteLength: 4 * 22 });
    v.data[0] = -1;
    expect(projection.data[8]).toBe(-1);
    v.data[0] = 8;
  });

  it('takes rows too, and windows of windows', () => {
    const part = rowsOf(projection, { firstRow: 1, rows: 2, firstColumn: 5, columns: 5 });
    expect([...toContiguous(rowsOf(part, { firstRow: 1, firstColumn: 3, columns: 2 })).data]).toEqual([28, 29]);
    expect(rowsOf(projection, { firstColumn: 10, columns: 0 }).shape).toEqual([3, 0]);
    expect(rowsOf(projection, { firstRow: 3, firstColumn: 10, columns: 0 }).shape).toEqual([0, 0]);
  });

  it('refuses what lies outside', () => {
    throwsCode(
      () => rowsOf(projection, { firstColumn: 6, columns: 5 }),
      'EP_INVALID_ARGUMENT',
      /columns must be an integer from 0 to 4, found 5/,
    );
    throwsCode(() => rowsOf(projection, { firstRow: 2, rows: 2, columns: 1 }), 'EP_INVALID_ARGUMENT', /rows/);
    throwsCode(() => rowsOf(tensor('f32', [4]), { columns: 1 }), 'EP_INVALID_ARGUMENT', /2 axes/);
  });
});

describe('layout', () => {
  it('knows what is contiguous', () => {
    expect(isContiguous(tensor('f32', [2, 3]))).toBe(true);
    expect(isContiguous(tensor('i32', [2, 3], iota(6), [3, 1]))).toBe(true);
    expect(isContiguous(tensor('i32', [3, 2], iota(6), [1, 3]))).toBe(false);
    expect(isContiguous(tensor('i32', [1, 3], iota(99), [77, 1]))).toBe(true);
    expect(isContiguous(tensor('i32', [0, 3], iota(0), [77, 5]))).toBe(true);
  });

  it('gives no row layout where rows are scattered or overlap', () => {
    expect(rowLayout(tensor('i32', [3, 2], iota(6), [1, 3]))).toBeUndefined();
    expect(rowLayout(tensor('i32', [3, 2], iota(6), [1, 1]))).toBeUndefined();
    expect(rowLayout(tensor('i32', [3, 2], iota(6), [0, 1]))).toBeUndefined();
    expect(rowLayout(tensor('bf16', [3, 2, 4]))).toEqual({ rows: 3, rowBytes: 16, strideBytes: 16 });
    expect(rowLayout(tensor('i32', [1, 2], iota(6), [0, 1]))).toEqual({ rows: 1, rowBytes: 8, strideBytes: 8 });
    expect(rowLayout(tensor('f64', []))).toEqual({ rows: 1, rowBytes: 8, strideBytes: 8 });
  });

  it('copies any strides into row-major order and stays within the byte range', () => {
    const dims = fc.array(fc.tuple(fc.integer({ min: 0, max: 4 }), fc.integer({ min: 0, max: 9 })), { maxLength: 4 });
    fc.assert(
      fc.property(dims, (axes) => {
        const shape = axes.map(([extent]) => extent);
        const strides = axes.map(([, stride]) => stride);
        const data = iota(200);
        const t = tensor('i32', shape, data, strides);
        const expected: number[] = [];
        const walk = (axis: number, at: number): void => {
          if (axis === shape.length) expected.push(at);
          else for (let i = 0; i < shape[axis]!; i++) walk(axis + 1, at + i * strides[axis]!);
        };
        walk(0, 0);
        expect([...toContiguous(t).data]).toEqual(expected);
        expect(byteRange(t).byteLength).toBe(expected.length === 0 ? 0 : 4 * (Math.max(...expected) + 1));
        if (isContiguous(t)) expect(expected).toEqual(expected.map((_, i) => i));
      }),
      { numRuns: 500 },
    );
  });

  it('does not alias when it copies', () => {
    const data = iota(4);
    const copy = toContiguous(tensor('i32', [2], data));
    expect(copy.data.length).toBe(2);
    copy.data[0] = 9;
    expect(data[0]).toBe(0);
  });
});

describe('tensors written by hand', () => {
  const data = iota(6);
  const by = (change: object) => ({ dtype: 'i32', shape: [2, 3], data, ...change }) as never;
  it.each<readonly [string, object, RegExp]>([
    ['strides that reach beyond the data', { strides: [4, 1] }, /at least 7 elements .* strides \[4, 1\], found 6/],
    ['rows that lie too far apart', { shape: [2, 1], strides: [2 ** 40, 1] }, /at least 1099511627777 elements/],
    ['a shape beyond the data', { shape: [7] }, /at least 7 elements for shape \[7\], found 6/],
    ['strides that go back', { strides: [-3, 1] }, /strides\[0\] must be .* found -3/],
    ['half a row', { shape: [1.5, 2] }, /shape\[0\] must be .* found 1.5/],
    ['too few strides', { strides: [1] }, /strides must be an array of 2 strides/],
    ['another carrier', { data: new Float32Array(6) }, /data must be the carrier of i32/],
    ['no data', { data: undefined }, /data must be a typed array, found undefined/],
  ])('with %s are refused, not read', (_, change, message) => {
    throwsCode(() => toContiguous(by(change)), 'EP_INVALID_ARGUMENT', message);
    throwsCode(() => asTensor(by(change), 'here'), 'EP_INVALID_ARGUMENT', message);
  });

  it('are read where they are whole', () => {
    expect([...toContiguous(by({ shape: [3, 2], strides: [1, 3] })).data]).toEqual([0, 3, 1, 4, 2, 5]);
  });
});

describe('buffers that change', () => {
  it('names a detached buffer', () => {
    for (const dtype of DTYPES) {
      const data = createStorage(dtype, 4);
      const t = tensor(dtype, [4], data);
      detach(data.buffer);
      throwsCode(
        () => asTensor(t, 'all-reduce'),
        'EP_DETACHED',
        /^all-reduce: the buffer of the \w+Array was detached or transferred/,
      );
      throwsCode(() => toContiguous(t), 'EP_DETACHED');
    }
    const matrix = tensor('f32', [2, 2]);
    detach(matrix.data.buffer);
    throwsCode(() => rowsOf(matrix, { columns: 1 }), 'EP_DETACHED');
  });

  it('names a buffer that was resized below the view', () => {
    const buffer = resizable(16, 32);
    const view = new Float32Array(buffer, 8, 2);
    checkAttached(view, 'test');
    buffer.resize(4);
    throwsCode(() => checkAttached(view, 'test'), 'EP_DETACHED', /resized below the view/);
  });

  it('does not take empty views for dead ones', () => {
    checkAttached(new Float32Array(0), 'test');
    checkAttached(new BigInt64Array(new ArrayBuffer(8), 8, 0), 'test');
    checkAttached(new Uint8Array(new SharedArrayBuffer(0)), 'test');
  });

  it('pins: a detach or a resize during use is seen, a resizable buffer is refused, a shared one accepted', () => {
    const view = new Uint16Array(8);
    const pin = pinBuffer(view, 'put');
    pin.check();
    detach(view.buffer);
    throwsCode(() => pin.check(), 'EP_DETACHED', /16 bytes before, 0 now/);
    throwsCode(() => pinBuffer(view, 'put'), 'EP_DETACHED');
    throwsCode(() => pinBuffer(new Uint8Array(resizable(4, 8)), 'put'), 'EP_DETACHED', /fixed length/);
    pinBuffer(new Uint8Array(new SharedArrayBuffer(4)), 'put').check();
    const empty = new Uint8Array(0);
    const emptyPin = pinBuffer(empty, 'put');
    detach(empty.buffer);
    throwsCode(() => emptyPin.check(), 'EP_DETACHED');
  });
});
