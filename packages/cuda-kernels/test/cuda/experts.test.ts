// Over the stand-in for a GPU: everything above the kernel's launch is the product, and the kernel is the same source.
import { fileURLToPath } from 'node:url';
import {
  createStorage,
  type DeviceTensor,
  type DType,
  decode,
  elementCount,
  encode,
  type FloatDType,
  type Storage,
  tensor,
  viewStorage,
} from '@ep/core';
import { gpuPlaceOf } from '@ep/native';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { deviceTensor, readTensor, writeTensor } from '../../src/cuda/buffer.js';
import { CudaDevice } from '../../src/cuda/device.js';
import type { CudaExpertCapturedRows, CudaExpertRows, CudaExperts, CudaExpertWeights } from '../../src/cuda/experts.js';
import type { CudaStream } from '../../src/cuda/stream.js';
import { HostStream } from '../../src/host-stream.js';

process.env.EP_CUDA_PATH = fileURLToPath(
  new URL('../../../../native/build/Release/libep_cuda_host.so', import.meta.url),
);

let device: CudaDevice;
let stream: CudaStream;
beforeAll(() => {
  device = new CudaDevice();
  stream = device.stream();
});
afterAll(() => device.close());

const EXPERTS = 3;

function sequence(seed: number): () => number {
  let x = seed;
  return () => {
    x ^= x << 13;
    x ^= x >>> 17;
    x ^= x << 5;
    return (x >>> 0) / 2 ** 32 - 0.5;
  };
}

const numbers = (count: number, next: () => number, scale = 1): Float32Array =>
  Float32Array.from({ length: count }, () => next() * scale);

async function place(dtype: DType, shape: readonly number[], values: Storage[DType]): Promise<DeviceTensor> {
  const made = device.allocate(values.byteLength).tensor(dtype, shape);
  await writeTensor(values, made);
  return made;
}

/** Rows `rowElements` apart in memory that is all there is in `image`; by blocks where the shape has three axes. */
async function placeRows(dtype: DType, shape: readonly number[], rowElements: number, image: Storage[DType]) {
  const whole = await place(dtype, [image.length], image);
  const at = { device: whole.device, address: whole.address, place: gpuPlaceOf(whole)! };
  const apart = rowElements === shape.at(-1) ? {} : { rowElements };
  return { whole, rows: deviceTensor(dtype, shape, { ...at, ...apart }) };
}

interface Shape {
  readonly hidden: number;
  readonly intermediate: number;
}

interface Layer extends Shape {
  readonly gate: Float32Array;
  readonly up: Float32Array;
  readonly down: Float32Array;
}

function drawLayer({ hidden, intermediate }: Shape, experts: number, next: () => number): Layer {
  const count = experts * hidden * intermediate;
  const fromHidden = 2 / Math.sqrt(hidden);
  return {
    ...{ hidden, intermediate },
    ...{ gate: numbers(count, next, 2 * fromHidden), up: numbers(count, next, 2 * fromHidden) },
    down: numbers(count, next, 4 / Math.sqrt(intermediate)),
  };
}

async function placeLayer({ hidden, intermediate, gate, up, down }: Layer, experts: number) {
  return {
    gate: await place('f32', [experts, intermediate, hidden], gate),
    up: await place('f32', [experts, intermediate, hidden], up),
    down: await place('f32', [experts, hidden, intermediate], down),
  };
}

/** out[r] = sum over c of the expert's matrix[r, c] * x[c]. */
function product(matrix: Float32Array, expert: number, x: Float64Array, rows: number): Float64Array {
  const columns = x.length;
  const first = expert * rows * columns;
  return Float64Array.from({ length: rows }, (_, r) =>
    x.reduce((sum, value, c) => sum + matrix[first + r * columns + c]! * value, 0),
  );
}

function expertRow({ hidden, intermediate, gate, up, down }: Layer, expert: number, x: Float64Array): Float64Array {
  const linear = product(up, expert, x, intermediate);
  const inner = product(gate, expert, x, intermediate).map((a, i) => (a / (1 + Math.exp(-a))) * linear[i]!);
  return product(down, expert, inner, hidden);
}

const SENTINEL = 7;

/** A rank's view of one call: where rows lie, and how far they are apart. */
interface Form {
  readonly name: string;
  /** Without the channels. */
  readonly shape: readonly number[];
  readonly counts: readonly number[];
  readonly blockStart: readonly number[];
  /** Elements between rows of x, and of y. */
  readonly gaps: readonly [number, number];
}

const LOW: Form = {
  ...{ name: 'low latency', shape: [EXPERTS, 70], counts: [5, 0, 67], blockStart: [0, 70, 140] },
  gaps: [0, 0],
};
const HIGH: Form = {
  // One element more than there are experts, as on the device; rows before, between and behind the blocks are nobody's.
  ...{ name: 'high throughput', shape: [90], counts: [5, 0, 67], blockStart: [2, 8, 16, 88] },
  gaps: [16, 8],
};

interface Payload {
  readonly x: FloatDType;
  readonly scale?: 'f32' | 'ue8m0';
  readonly y: 'f32' | 'f16' | 'bf16';
}

const bounds = { f32: 1e-5, f16: 1e-3, bf16: 5e-3 } as const;

/** One call in native memory, and what it leaves in y: all of the memory, with rows in f64 where experts write. */
async function makeCall(form: Form, payload: Payload, layer: Layer) {
  const next = sequence(elementCount(form.shape) + layer.hidden);
  const { hidden } = layer;
  const rows = elementCount(form.shape);
  const ofBlock = new Int32Array(rows).fill(-1);
  for (const [expert, count] of form.counts.entries()) {
    ofBlock.fill(expert, form.blockStart[expert]!, form.blockStart[expert]! + count);
  }
  const strides = form.gaps.map((gap) => hidden + gap) as [number, number];
  const blocks = Math.ceil(hidden / 128);
  const room = rows + 3;
  // What nobody owns is NaN: a kernel that reads it shows.
  const image = new Float32Array(rows * strides[0]).fill(Number.NaN);
  const factors = new Float32Array(blocks * room).fill(Number.NaN);
  for (let row = 0; row < rows; row++) {
    if (ofBlock[row]! < 0) continue;
    image.set(numbers(hidden, next, 4), row * strides[0]);
    for (let b = 0; b < blocks; b++) {
      factors[b * room + row] = payload.scale === 'f32' ? 1 + next() : 2 ** Math.round(3 * next());
    }
  }
  const codes = encode(payload.x, image);
  const values = decode(payload.x, codes);
  const y = encode(payload.y, new Float32Array(rows * strides[1]).fill(SENTINEL));
  const from = await placeRows(payload.x, [...form.shape, hidden], strides[0], codes);
  const to = await placeRows(payload.y, [...form.shape, hidden], strides[1], y);
  const { scale } = payload;
  const call: CudaExpertRows = {
    ...{ x: from.rows, y: to.rows },
    ...(scale && { scales: await place(scale, [blocks, room], encode(scale, factors)) }),
    ...{ counts: Int32Array.from(form.counts), blockStart: Int32Array.from(form.blockStart) },
  };
  const check = async (): Promise<void> => {
    const bytes = await readTensor(to.whole);
    const found = decode(payload.y, viewStorage(payload.y, bytes.buffer, 0, y.length));
    let [error, norm] = [0, 0];
    for (let row = 0; row < rows; row++) {
      const got = found.subarray(row * strides[1], (row + 1) * strides[1]);
      const expert = ofBlock[row]!;
      const kept = expert < 0 ? got : got.subarray(hidden);
      expect(
        kept.every((value) => value === SENTINEL),
        `row ${row} is not as it was`,
      ).toBe(true);
      if (expert < 0) continue;
      const x = Float64Array.from({ length: hidden }, (_, h) => {
        const code = values[row * strides[0] + h]!;
        return scale === undefined ? code : code * factors[Math.floor(h / 128) * room + row]!;
      });
      for (const [h, wanted] of expertRow(layer, expert, x).entries()) {
        error += (got[h]! - wanted) ** 2;
        norm += wanted ** 2;
      }
    }
    expect(norm).toBeGreaterThan(0);
    // A NaN fails the comparison.
    expect(Math.sqrt(error / norm)).toBeLessThan(bounds[payload.y]);
  };
  return { call, check };
}

describe('experts on a GPU give what a plain computation gives, and leave other rows alone', () => {
  it.each(
    [LOW, HIGH].flatMap((form) =>
      (
        [
          [{ x: 'f32', y: 'f32' }, 33, 7],
          [{ x: 'bf16', y: 'bf16' }, 136, 72],
          [{ x: 'f16', y: 'f16' }, 64, 24],
          [{ x: 'f8e4m3', scale: 'f32', y: 'bf16' }, 200, 40],
          [{ x: 'f8e4m3', scale: 'ue8m0', y: 'f32' }, 256, 40],
        ] as const
      ).map(([payload, hidden, intermediate]) => ({ form, payload, hidden, intermediate })),
    ),
  )('$form.name, $payload.x to $payload.y, $hidden channels', async ({ form, payload, hidden, intermediate }) => {
    const layer = drawLayer({ hidden, intermediate }, EXPERTS, sequence(hidden));
    const experts = device.experts(await placeLayer(layer, EXPERTS));
    const { call, check } = await makeCall(form, payload, layer);
    await experts.forward(stream, call);
    await check();
    // Shaped as rows where x is by blocks.
    if (form === LOW) {
      const flat = { ...call.y, shape: [elementCount(form.shape), hidden] };
      await experts.forward(stream, { ...call, y: flat });
      await check();
    }
    await experts.close();
  });

  it('of 256 experts, most of them without a row', async () => {
    const most = 256;
    const layer = drawLayer({ hidden: 8, intermediate: 4 }, most, sequence(5));
    const experts = device.experts(await placeLayer(layer, most));
    const counts = Array.from({ length: most }, (_, expert) => (expert % 50 === 5 ? expert % 3 : 0));
    const blockStart = counts.map((_, expert) => 2 * expert);
    const form: Form = { name: 'many', shape: [2 * most], counts, blockStart, gaps: [0, 0] };
    const { call, check } = await makeCall(form, { x: 'f32', y: 'f32' }, layer);
    await experts.forward(stream, call);
    await check();
    await experts.close();
  });

  it.each([LOW, HIGH])('in a graph, $name: rows counted on the device at each replay', async (form) => {
    const layer = drawLayer({ hidden: 136, intermediate: 24 }, EXPERTS, sequence(11));
    const experts = device.experts(await placeLayer(layer, EXPERTS));
    const start = Int32Array.from(form.blockStart);
    const counts = await place('i32', [EXPERTS], new Int32Array(EXPERTS));
    const blockStart = await place('i32', [start.length], start);
    const payload: Payload = { x: 'bf16', y: 'f32' };
    const { call } = await makeCall(form, payload, layer);
    const graph = stream.capture(() => experts.captureForward(stream, { ...call, counts, blockStart }));
    const untouched = encode('f32', new Float32Array(elementCount(call.y.shape)).fill(SENTINEL));
    const written = async (run: () => Promise<void>): Promise<Uint8Array> => {
      await writeTensor(untouched, call.y);
      await run();
      return readTensor(call.y);
    };
    for (const given of [form.counts, [1, 0, 2], [0, 0, 0], form.counts]) {
      await writeTensor(Int32Array.from(given), counts);
      const found = await written(() => stream.launch(graph));
      const wanted = await written(() => experts.forward(stream, { ...call, counts: Int32Array.from(given) }));
      expect(found).toEqual(wanted);
    }
    // Of what is counted beyond the rows of x nothing is read or written; of blocks of no rows neither.
    const rows = elementCount(form.shape);
    const wanted = await written(() =>
      experts.forward(stream, { ...call, counts: Int32Array.of(0, 0, rows - start[2]!), blockStart: start }),
    );
    for (const [given, from] of [
      [Int32Array.of(5, -2, 2 ** 31 - 1), Int32Array.of(rows, 0, start[2]!)],
      [Int32Array.of(2 ** 31 - 1, 3, rows), Int32Array.of(-1, 2 ** 31 - 1, start[2]!)],
    ] as const) {
      await writeTensor(given, counts);
      await writeTensor(
        Int32Array.from(start, (one, i) => from[i] ?? one),
        blockStart,
      );
      expect(await written(() => stream.launch(graph))).toEqual(wanted);
    }
    await graph.close();
    await experts.close();
  });

  it('of a rank to which no row came', async () => {
    const layer = drawLayer({ hidden: 8, intermediate: 4 }, EXPERTS, sequence(6));
    const experts = device.experts(await placeLayer(layer, EXPERTS));
    const x = device.allocate(64).tensor('bf16', [0, 8]);
    const y = device.allocate(64).tensor('bf16', [0, 8]);
    const none = new Int32Array(EXPERTS);
    await experts.forward(stream, { x, y, counts: none, blockStart: none });
    await experts.close();
  });
});

describe('experts on a GPU refuse', () => {
  const shape = { hidden: 16, intermediate: 4 };
  let weights: CudaExpertWeights;
  let experts: CudaExperts;
  let good: CudaExpertRows;
  let scales: DeviceTensor;
  let codes: DeviceTensor;

  beforeAll(async () => {
    const layer = drawLayer(shape, EXPERTS, sequence(9));
    weights = await placeLayer(layer, EXPERTS);
    experts = device.experts(weights);
    const rows = 12;
    good = {
      x: await place('f32', [rows, 16], numbers(rows * 16, sequence(10))),
      y: await place('bf16', [rows, 16], createStorage('bf16', rows * 16)),
      counts: Int32Array.of(3, 0, 4),
      blockStart: Int32Array.of(0, 4, 8),
    };
    codes = await place('f8e4m3', [rows, 16], createStorage('f8e4m3', rows * 16));
    scales = await place('f32', [1, rows], new Float32Array(rows).fill(1));
  });

  const apart = (from: DeviceTensor, strides: readonly number[]): DeviceTensor => ({ ...from, strides });
  const elsewhere = (from: DeviceTensor): DeviceTensor => ({ ...from, device: { kind: 'cuda', index: 1 } });
  const reshaped = (from: DeviceTensor, ...extents: number[]): DeviceTensor => ({ ...from, shape: extents });
  const retyped = (from: DeviceTensor, dtype: DType): DeviceTensor => ({ ...from, dtype });

  it.each<[string, () => unknown, RegExp]>([
    ['nothing', () => undefined, /weights must be an object with gate, up and down/],
    ['a missing tensor', () => ({ gate: weights.gate, up: weights.up }), /down: source must be a tensor of a device/],
    ['a matrix', () => ({ ...weights, gate: reshaped(weights.gate, 12, 16) }), /gate: shape must be \[experts, /],
    ['down shaped as up', () => ({ ...weights, down: weights.up }), /down: shape must be \[3, 16, 4\]/],
    ['bf16', () => ({ ...weights, up: retyped(weights.up, 'bf16') }), /up: dtype must be "?f32/],
    ['another GPU', () => ({ ...weights, up: elsewhere(weights.up) }), /up: device must be "?GPU 0/],
    [
      'experts that lie apart',
      () => ({ ...weights, gate: apart(weights.gate, [80, 16, 1]) }),
      /gate: strides must be packed rows/,
    ],
    ['no expert', () => ({ ...weights, gate: reshaped(weights.gate, 0, 4, 16) }), /experts must be an integer from 1/],
    ['257', () => ({ ...weights, gate: reshaped(weights.gate, 257, 4, 16) }), /experts must be an integer .* to 256/],
  ])('weights: %s', (_, made, message) => {
    let thrown: unknown;
    try {
      device.experts(made() as CudaExpertWeights);
    } catch (error) {
      thrown = error;
    }
    expect(thrown).toMatchObject({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(message) });
  });

  it.each<[string, () => unknown, RegExp]>([
    ['nothing', () => undefined, /rows must be an object with x, y, counts and blockStart/],
    ['no x', () => ({ ...good, x: undefined }), /x: shape must be/],
    ['an x of the host', () => ({ ...good, x: tensor('f32', [12, 16]) }), /x: source must be a tensor of a device/],
    ['other channels', () => ({ ...good, x: reshaped(good.x, 24, 8) }), /x: shape must be .*16/],
    ['an x of integers', () => ({ ...good, x: retyped(good.x, 'i32') }), /x: dtype must be/],
    ['an x of another GPU', () => ({ ...good, x: elsewhere(good.x) }), /x: device must be/],
    ['an x of loose channels', () => ({ ...good, x: apart(good.x, [32, 2]) }), /x: strides must be rows that are/],
    ['no y', () => ({ ...good, y: undefined }), /y: dtype must be/],
    ['a y of e4m3', () => ({ ...good, y: codes }), /y: dtype must be/],
    ['a y of fewer rows', () => ({ ...good, y: reshaped(good.y, 11, 16) }), /y: shape must be \[12, 16\]/],
    ['a y of another GPU', () => ({ ...good, y: elsewhere(good.y) }), /y: device must be/],
    ['results over x', () => ({ ...good, y: good.x }), /./],
    ['e4m3 without scales', () => ({ ...good, x: codes }), /scales must be .*f32 or ue8m0 beside rows of f8e4m3/],
    ['f32 with scales', () => ({ ...good, scales }), /scales must be .*none beside rows of f32/],
    [
      'scales of integers',
      () => ({ ...good, x: codes, scales: retyped(scales, 'i32') }),
      /scales must be .*f32 or ue8m0/,
    ],
    [
      'scales of fewer rows',
      () => ({ ...good, x: codes, scales: reshaped(scales, 1, 11) }),
      /scales: shape\[1\] must be a safe integer of at least 12/,
    ],
    [
      'scales of more channels',
      () => ({ ...good, x: codes, scales: reshaped(scales, 2, 12) }),
      /scales: shape must be \[1, 12\]/,
    ],
    ['scales of another GPU', () => ({ ...good, x: codes, scales: elsewhere(scales) }), /scales: device must be/],
    ['counts of fewer experts', () => ({ ...good, counts: Int32Array.of(3, 0) }), /counts must be .* of 3 experts/],
    ['counts of another kind', () => ({ ...good, counts: [3, 0, 4] }), /counts must be an Int32Array/],
    ['fewer first rows', () => ({ ...good, blockStart: Int32Array.of(0, 4) }), /blockStart must be .* at least 3/],
    ['a negative count', () => ({ ...good, counts: Int32Array.of(3, -1, 4) }), /counts\[1\] must be an integer from 0/],
    ['a negative row', () => ({ ...good, blockStart: Int32Array.of(0, 4, -1) }), /blockStart\[2\] must be an integer/],
    [
      'rows behind x',
      () => ({ ...good, counts: Int32Array.of(3, 0, 5) }),
      /counts\[2\] must be an integer from 0 to 4/,
    ],
  ])('rows: %s', async (_, made, message) => {
    await expect(experts.forward(stream, made() as CudaExpertRows)).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(message),
    });
  });

  it.each<[string, (counted: CudaExpertCapturedRows) => unknown, RegExp]>([
    ['nothing', () => undefined, /rows must be an object with x, y, counts and blockStart/],
    ['counts of the host', (rows) => ({ ...rows, counts: good.counts }), /counts: source must be a tensor of a device/],
    [
      'counts of fewer experts',
      (rows) => ({ ...rows, counts: reshaped(rows.counts, 2) }),
      /counts: shape must be \[3\]/,
    ],
    ['counts of another kind', (rows) => ({ ...rows, counts: retyped(rows.counts, 'f32') }), /counts: dtype must be/],
    ['counts of another GPU', (rows) => ({ ...rows, counts: elsewhere(rows.counts) }), /counts: device must be/],
    [
      'fewer first rows',
      (rows) => ({ ...rows, blockStart: reshaped(rows.blockStart, 2) }),
      /blockStart must be .* at least 3/,
    ],
    ['an x of integers', (rows) => ({ ...rows, x: retyped(rows.x, 'i32') }), /x: dtype must be/],
  ])('rows of a capture: %s', async (_, made, message) => {
    const counts = await place('i32', [3], good.counts);
    const blockStart = await place('i32', [3], good.blockStart);
    let thrown: unknown;
    try {
      const rows = made({ ...good, counts, blockStart }) as CudaExpertCapturedRows;
      await stream.capture(() => experts.captureForward(stream, rows)).close();
    } catch (error) {
      thrown = error;
    }
    expect(thrown).toMatchObject({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(message) });
  });

  it('to be captured by a stream that is not', async () => {
    const counts = await place('i32', [3], good.counts);
    const blockStart = await place('i32', [3], good.blockStart);
    expect(() => experts.captureForward(stream, { ...good, counts, blockStart })).toThrow(
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT', message: expect.stringMatching(/not being captured/) }),
    );
  });

  it('a stream of the host, one that is being captured, and to begin once they are closed or were aborted', async () => {
    const code = 'EP_INVALID_ARGUMENT';
    const host = new HostStream();
    await expect(experts.forward(host as unknown as CudaStream, good)).rejects.toMatchObject({ code });
    await host.close();
    let put: Promise<void> | undefined;
    const graph = stream.capture(() => {
      put = experts.forward(stream, good);
      put.catch(() => {});
    });
    await expect(put).rejects.toMatchObject({ code });
    await graph.close();
    const reason = new Error('enough');
    await expect(experts.forward(stream, good, { signal: AbortSignal.abort(reason) })).rejects.toBe(reason);
    await experts.forward(stream, good);
    const others = device.experts(weights);
    await others.close();
    await expect(others.forward(stream, good)).rejects.toMatchObject({ code: 'EP_CLOSED' });
    await experts.close();
  });

  it('what was made on a device that is closed', async () => {
    const other = new CudaDevice();
    const late = other.stream();
    const made = other.experts(weights);
    await other.close();
    expect(() => other.experts(weights)).toThrow(expect.objectContaining({ code: 'EP_CLOSED' }));
    await expect(made.forward(late, good)).rejects.toMatchObject({ code: 'EP_CLOSED' });
  });
});
