import { decode, encode, isEpError, type Tensor, tensor } from '@ep/core';
import { allocateHost } from '@ep/native';
import { planAttention, serverLayout, shardsOfDocuments } from '@ep/plan';
import { attentionBackward as backwardReference, attentionForward as forwardReference } from '@ep/plan/reference';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import {
  type AttentionBackwardTensors,
  type AttentionDType,
  type AttentionGroups,
  attentionBackward,
  attentionForward,
  groupsOfServer,
} from '../src/core-attention.js';
import { HostStream } from '../src/host-stream.js';

const heads = 4;
const kvHeads = 2;
const headDim = 24;
const bounds: Readonly<Record<AttentionDType, number>> = { f32: 1e-5, bf16: 1e-2 };

let stream: HostStream;
beforeAll(() => {
  stream = new HostStream();
});
afterAll(() => stream.close());

function sequence(seed: number): () => number {
  let x = seed;
  return () => {
    x ^= x << 13;
    x ^= x >>> 17;
    x ^= x << 5;
    return (x >>> 0) / 2 ** 32 - 0.5;
  };
}

/** A tensor in native memory whose rows lie `gap` elements further apart than they are long. */
function onHost<D extends AttentionDType>(
  dtype: D,
  shape: readonly [number, ...number[]],
  gap = 0,
  fill = 0,
): Tensor<D> {
  const rowElements = shape.slice(1).reduce((a, b) => a * b, 1);
  const stride = rowElements + gap;
  const strides = shape.map((_, axis) => (axis === 0 ? stride : shape.slice(axis + 1).reduce((a, b) => a * b, 1)));
  const bytes = dtype === 'f32' ? 4 : 2;
  const buffer = allocateHost(shape[0] * stride * bytes);
  const data = dtype === 'f32' ? new Float32Array(buffer) : new Uint16Array(buffer);
  data.fill(dtype === 'f32' ? fill : encode('bf16', Float64Array.of(fill))[0]!);
  return tensor(dtype, shape, data as Tensor<D>['data'], strides);
}

const widen = (t: Tensor<AttentionDType>): Float64Array =>
  t.dtype === 'f32' ? Float64Array.from(t.data) : Float64Array.from(decode('bf16', t.data as Uint16Array));

function rowsAsNumbers(t: Tensor<AttentionDType>, first: number, count: number): Float64Array {
  const rowElements = t.shape.slice(1).reduce((a, b) => a * b, 1);
  const stride = t.strides?.[0] ?? rowElements;
  const all = widen(t);
  const out = new Float64Array(count * rowElements);
  for (let row = 0; row < count; row++) {
    out.set(all.subarray((first + row) * stride, (first + row) * stride + rowElements), row * rowElements);
  }
  return out;
}

function scatter(t: Tensor<AttentionDType>, next: () => number): void {
  const values = Float64Array.from({ length: t.data.length }, next);
  if (t.dtype === 'f32') (t.data as Float32Array).set(values);
  else (t.data as Uint16Array).set(encode('bf16', values));
}

function relativeError(found: Float64Array, expected: Float64Array): number {
  let difference = 0;
  let norm = 0;
  for (let i = 0; i < expected.length; i++) {
    difference += (found[i]! - expected[i]!) ** 2;
    norm += expected[i]! ** 2;
  }
  expect(found.length).toBe(expected.length);
  return Math.sqrt(difference / norm);
}

function tensorsOf(dtype: AttentionDType, qRows: number, kvRows: number, gap: number): AttentionBackwardTensors {
  const next = sequence(20261120);
  const q = onHost(dtype, [qRows, heads, headDim], gap);
  const k = onHost(dtype, [kvRows, kvHeads, headDim], gap);
  const v = onHost(dtype, [kvRows, kvHeads, headDim], 0);
  const dO = onHost(dtype, [qRows, heads, headDim], 0);
  for (const t of [q, k, v, dO]) scatter(t, () => next() * 2);
  return {
    q,
    k,
    v,
    dO,
    o: onHost(dtype, [qRows, heads, headDim], gap),
    lse: onHost('f32', [qRows, heads]),
    dQ: onHost(dtype, [qRows, heads, headDim], gap),
    dK: onHost(dtype, [kvRows, kvHeads, headDim], 0, 7),
    dV: onHost(dtype, [kvRows, kvHeads, headDim], gap, 7),
  };
}

const groups: AttentionGroups = {
  qRow: Int32Array.of(0, 33, 70),
  qLength: Int32Array.of(33, 37, 1),
  kvRow: Int32Array.of(0, 0, 90),
  kvLength: Int32Array.of(33, 80, 5),
};
const qRows = 71;
const kvRows = 100;

function checkAgainstReference(dtype: AttentionDType, list: AttentionGroups, t: AttentionBackwardTensors): void {
  const dK = new Float64Array(t.k.shape[0]! * kvHeads * headDim);
  const dV = new Float64Array(dK.length);
  for (let g = 0; g < list.qRow.length; g++) {
    const [row, queries, from, keys] = [list.qRow[g]!, list.qLength[g]!, list.kvRow[g]!, list.kvLength[g]!];
    const shape = { queries, keys, heads, kvHeads, headDim };
    const q = rowsAsNumbers(t.q, row, queries);
    const k = rowsAsNumbers(t.k, from, keys);
    const v = rowsAsNumbers(t.v, from, keys);
    const dO = rowsAsNumbers(t.dO, row, queries);
    const forward = forwardReference(shape, q, k, v);
    const backward = backwardReference(shape, q, k, v, dO);
    expect(relativeError(rowsAsNumbers(t.o, row, queries), forward.out)).toBeLessThan(bounds[dtype]);
    expect(relativeError(rowsAsNumbers(t.lse, row, queries), forward.logSumExp)).toBeLessThan(1e-5);
    expect(relativeError(rowsAsNumbers(t.dQ, row, queries), backward.dq)).toBeLessThan(bounds[dtype]);
    for (let i = 0; i < backward.dk.length; i++) {
      dK[from * kvHeads * headDim + i]! += backward.dk[i]!;
      dV[from * kvHeads * headDim + i]! += backward.dv[i]!;
    }
  }
  expect(relativeError(rowsAsNumbers(t.dK, 0, t.k.shape[0]!), dK)).toBeLessThan(bounds[dtype]);
  expect(relativeError(rowsAsNumbers(t.dV, 0, t.k.shape[0]!), dV)).toBeLessThan(bounds[dtype]);
}

describe('core attention on a host stream', () => {
  for (const dtype of ['f32', 'bf16'] as const) {
    for (const gap of [0, 16]) {
      it(`equals the fp64 reference, ${dtype}, rows ${gap} elements apart`, async () => {
        const t = tensorsOf(dtype, qRows, kvRows, gap);
        await attentionForward(stream, groups, t, { threads: 2 });
        await attentionBackward(stream, groups, t);
        checkAgainstReference(dtype, groups, t);
      });
    }
  }

  it('computes what a plan lays out for a server', async () => {
    const { shards } = shardsOfDocuments({
      worldSize: 2,
      documentOffsets: Int32Array.of(0, 2, 3),
      homeRank: Int32Array.of(0, 1, 1),
      lengths: Int32Array.of(9, 14, 11),
    });
    const plan = planAttention(shards, Int32Array.of(1, 1, 1), { sharing: 'each-server' });
    const layout = serverLayout(plan.layout, 1);
    const list = groupsOfServer(layout);
    const t = tensorsOf('f32', plan.fwdQ.recvTokens[1]!, plan.fwdKv.recvTokens[1]!, 0);
    await attentionForward(stream, list, t);
    await attentionBackward(stream, list, t);
    checkAgainstReference('f32', list, t);
    expect([...list.qLength].sort((a, b) => a - b)).toEqual([9, 11, 14]);
    await attentionForward(stream, groupsOfServer(serverLayout(plan.layout, 0)), tensorsOf('f32', 0, 0, 0));
  });

  it('writes only the query rows that a group owns', async () => {
    const t = tensorsOf('f32', qRows, kvRows, 0);
    (t.o.data as Float32Array).fill(3);
    await attentionForward(stream, { ...groups, qLength: Int32Array.of(33, 30, 1) }, t);
    expect(rowsAsNumbers(t.o, 63, 7).every((value) => value === 3)).toBe(true);
    expect(rowsAsNumbers(t.o, 62, 1).every((value) => value === 3)).toBe(false);
  });

  const refusals: readonly [
    string,
    (t: AttentionBackwardTensors) => readonly [AttentionGroups, AttentionBackwardTensors],
    RegExp,
  ][] = [
    [
      'a group beyond the queries',
      (t) => [{ ...groups, qLength: Int32Array.of(33, 37, 2) }, t],
      /groups\.qLength\[2\] must be an integer from 0 to 1, found 2/,
    ],
    [
      'a group beyond the keys',
      (t) => [{ ...groups, kvRow: Int32Array.of(0, 0, 96) }, t],
      /groups\.kvLength\[2\] must be an integer from 0 to 4/,
    ],
    [
      'lists of different lengths',
      (t) => [{ ...groups, kvRow: Int32Array.of(0) }, t],
      /groups\.kvRow must be 3 elements/,
    ],
    ['two owners of a query row', (t) => [{ ...groups, qRow: Int32Array.of(0, 32, 70) }, t], /both own query row 32/],
    [
      'ordinary memory',
      (t) => [groups, { ...t, k: tensor('f32', [kvRows, kvHeads, headDim]) }],
      /k\.data must be in native memory/,
    ],
    [
      'another dtype',
      (t) => [groups, { ...t, v: onHost('bf16', [kvRows, kvHeads, headDim]) }],
      /v\.dtype must be "?f32"?, found "bf16"/,
    ],
    [
      'another shape',
      (t) => [groups, { ...t, o: onHost('f32', [qRows, heads, headDim + 1]) }],
      /o\.shape must be \[71, 4, 24\]/,
    ],
    ['an output over an input', (t) => [groups, { ...t, o: t.q }], /output o overlaps input q/],
  ];
  for (const [name, spoil, text] of refusals) {
    it(`refuses ${name} and writes nothing`, async () => {
      const good = tensorsOf('f32', qRows, kvRows, 0);
      (good.o.data as Float32Array).fill(3);
      const [list, t] = spoil(good);
      const before = widen(t.o);
      await expect(attentionForward(stream, list, t)).rejects.toSatisfy(
        (error) => isEpError(error) && error.code === 'EP_INVALID_ARGUMENT' && text.test(error.message),
      );
      expect(widen(t.o)).toEqual(before);
    });
  }

  it('accepts q, k and v as columns of one matrix, and dQ, dK, dV of another', async () => {
    const width = (heads + 2 * kvHeads) * headDim;
    const rows = 50;
    const columns = (matrix: ArrayBuffer, first: number, count: number) =>
      tensor('f32', [rows, count, headDim], new Float32Array(matrix).subarray(first * headDim), [width, headDim, 1]);
    const input = allocateHost(rows * width * 4);
    const next = sequence(7);
    new Float32Array(input).forEach((_, i, all) => {
      all[i] = next();
    });
    const output = allocateHost(rows * width * 4);
    const t: AttentionBackwardTensors = {
      ...tensorsOf('f32', rows, rows, 0),
      q: columns(input, 0, heads),
      k: columns(input, heads, kvHeads),
      v: columns(input, heads + kvHeads, kvHeads),
      dQ: columns(output, 0, heads),
      dK: columns(output, heads, kvHeads),
      dV: columns(output, heads + kvHeads, kvHeads),
    };
    const whole = {
      qRow: Int32Array.of(0),
      qLength: Int32Array.of(rows),
      kvRow: Int32Array.of(0),
      kvLength: Int32Array.of(rows),
    };
    await attentionForward(stream, whole, t);
    await attentionBackward(stream, whole, t);
    checkAgainstReference('f32', whole, t);
    await expect(attentionBackward(stream, whole, { ...t, dV: columns(output, heads, kvHeads) })).rejects.toThrow(
      'outputs dK and dV overlap',
    );
  });

  it('ends with the reason of an abort', async () => {
    const rows = 6000;
    const t = tensorsOf('f32', rows, rows, 0);
    const whole = {
      qRow: Int32Array.of(0),
      qLength: Int32Array.of(rows),
      kvRow: Int32Array.of(0),
      kvLength: Int32Array.of(rows),
    };
    const abort = new AbortController();
    const reason = new Error('enough');
    const call = attentionForward(stream, whole, t, { signal: abort.signal });
    abort.abort(reason);
    await expect(call).rejects.toBe(reason);
  });
});
