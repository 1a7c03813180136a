// Values on the device, and what they are compared with.
import assert from 'node:assert/strict';
import { createStorage, encode, viewStorage } from '@ep/core';
import { readTensor, writeTensor } from '@ep/cuda-kernels';
import { fillRows } from '../attention/plans.mjs';

/** Values as the dtype's carrier. */
export function storageOf(dtype, values) {
  if (dtype === 'f16' || dtype === 'bf16') return encode(dtype, values);
  const out = createStorage(dtype, values.length);
  out.set(values);
  return out;
}

/** All ranks' tensors of one side, computed everywhere, so that the oracle needs no communication. */
export const allRows = (rowsOfRank, rowElements, dtype, salt) =>
  Array.from(rowsOfRank, (rows, rank) =>
    storageOf(dtype, fillRows(new Float32Array(rows * rowElements), rank, rowElements, salt)),
  );

export async function expectSame(tensor, expected, what) {
  const bytes = await readTensor(tensor);
  const found = viewStorage(tensor.dtype, bytes.buffer, 0, expected.length);
  assert.equal(bytes.byteLength, expected.byteLength, `${what}: bytes`);
  for (let i = 0; i < expected.length; i++) {
    if (found[i] !== expected[i]) throw new Error(`${what}[${i}]: found ${found[i]}, expected ${expected[i]}`);
  }
}

/** Puts values on the device, behind `gap` elements and with `gap` elements between rows. */
export async function place(device, dtype, rows, rowElements, values, gap = 0) {
  const stride = rowElements + gap;
  const image = createStorage(dtype, gap + rows * stride);
  for (let row = 0; row < rows; row++) {
    image.set(values.subarray(row * rowElements, (row + 1) * rowElements), gap + row * stride);
  }
  const buffer = device.allocate(image.byteLength);
  await writeTensor(image, buffer.tensor(dtype, [image.length]));
  const whole = buffer.tensor(dtype, [rows, rowElements], gap * image.BYTES_PER_ELEMENT);
  if (gap === 0) return { buffer, tensor: whole };
  // As tensors of others come: by address and strides only.
  const { address, device: where } = whole;
  return { buffer, tensor: { dtype, shape: [rows, rowElements], strides: [stride, 1], address, device: where } };
}

/** Replays of a graph that are many: what a GPU does in seconds takes host threads minutes. */
export const manyReplays = ({ facts }) => (facts.runsOn === 'cuda' ? 1000 : 200);
