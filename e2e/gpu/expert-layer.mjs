// What a rank does in the cases of experts that a GPU computes: against a plain computation in f64, on the same rounded inputs.
import assert from 'node:assert/strict';
import { decode, encode, viewStorage } from '@ep/core';
import { readTensor } from '@ep/cuda-kernels';
import { place } from './tensors.mjs';

/** One expert without a row, one with more than a block of threads has, and rows between the blocks that are nobody's. */
const counts = Int32Array.of(0, 301, 1, 66);
const blockStart = Int32Array.of(0, 8, 312, 320);
const rows = 400;

/** From -scale to scale. */
const drawn = (count, salt, scale) =>
  Float32Array.from({ length: count }, (_, i) => {
    const mixed = Math.sin(i * 12.9898 + salt * 78.233) * 43_758.5453;
    return scale * (2 * (mixed - Math.floor(mixed)) - 1);
  });

function product(matrix, first, x, length) {
  return Float64Array.from({ length }, (_, r) => {
    let sum = 0;
    for (let c = 0; c < x.length; c++) sum += matrix[first + r * x.length + c] * x[c];
    return sum;
  });
}

function expertRow({ gate, up, down }, expert, x, intermediate) {
  const first = expert * x.length * intermediate;
  const linear = product(up, first, x, intermediate);
  const inner = product(gate, first, x, intermediate).map((a, i) => (a / (1 + Math.exp(-a))) * linear[i]);
  return product(down, first, inner, x.length);
}

/** Rows that lie apart, in one dtype, with scales or without; results in another. Returns the error by norm. */
export async function expertLayer({ device, data: { dtype, results, scale, hidden, intermediate } }) {
  const experts = counts.length;
  const matrix = experts * hidden * intermediate;
  const values = {
    gate: drawn(matrix, 1, 2 / Math.sqrt(hidden)),
    up: drawn(matrix, 2, 2 / Math.sqrt(hidden)),
    down: drawn(matrix, 3, 2 / Math.sqrt(intermediate)),
  };
  const buffers = [];
  const put = async (dtypeOf, shape, from, gap = 0) => {
    const row = shape.slice(1).reduce((product, extent) => product * extent, 1);
    const { buffer, tensor } = await place(device, dtypeOf, shape[0], row, from, gap);
    buffers.push(buffer);
    return gap === 0 ? buffer.tensor(dtypeOf, shape) : tensor;
  };
  const layer = device.experts({
    gate: await put('f32', [experts, intermediate, hidden], values.gate),
    up: await put('f32', [experts, intermediate, hidden], values.up),
    down: await put('f32', [experts, hidden, intermediate], values.down),
  });
  const codes = encode(dtype, drawn(rows * hidden, 4, 2));
  const blocks = Math.ceil(hidden / 128);
  const factors = Float32Array.from({ length: blocks * rows }, (_, i) => 2 ** ((i % 5) - 2));
  const untouched = 3;
  const y = await put(results, [rows, hidden], encode(results, new Float32Array(rows * hidden).fill(untouched)));
  const stream = device.stream();
  await layer.forward(stream, {
    x: await put(dtype, [rows, hidden], codes, 16),
    ...(scale && { scales: await put(scale, [blocks, rows], encode(scale, factors)) }),
    ...{ y, counts, blockStart },
  });
  const bytes = await readTensor(y);
  const found = decode(results, viewStorage(results, bytes.buffer, 0, rows * hidden));
  const x = decode(dtype, codes);
  let [error, norm, row] = [0, 0, 0];
  const keeps = (end) => {
    for (; row < end; row++) {
      const kept = found.subarray(row * hidden, (row + 1) * hidden).every((value) => value === untouched);
      assert.ok(kept, `row ${row} is not as it was`);
    }
  };
  for (let expert = 0; expert < experts; expert++) {
    keeps(blockStart[expert]);
    for (; row < blockStart[expert] + counts[expert]; row++) {
      const from = Float64Array.from({ length: hidden }, (_, h) => {
        const factor = scale === undefined ? 1 : factors[Math.floor(h / 128) * rows + row];
        return x[row * hidden + h] * factor;
      });
      for (const [h, wanted] of expertRow(values, expert, from, intermediate).entries()) {
        error += (found[row * hidden + h] - wanted) ** 2;
        norm += wanted ** 2;
      }
    }
  }
  keeps(rows);
  await layer.close();
  for (const buffer of buffers) await buffer.close();
  await stream.close();
  return Math.sqrt(error / norm);
}
