// Over the stand-in for a GPU.
import { fileURLToPath } from 'node:url';
import type { DeviceTensor } from '@ep/core';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { type CudaBuffer, readTensor, viewTensor, writeTensor } from '../../src/cuda/buffer.js';
import { CudaDevice } from '../../src/cuda/device.js';

process.env.EP_CUDA_PATH = fileURLToPath(
  new URL('../../../../native/build/Release/libep_cuda_host.so', import.meta.url),
);

let device: CudaDevice;
let buffer: CudaBuffer;
let whole: DeviceTensor<'i32'>;
beforeAll(async () => {
  device = new CudaDevice();
  buffer = device.allocate(256);
  whole = buffer.tensor('i32', [3, 4, 2], 16);
  await writeTensor(
    Int32Array.from({ length: 24 }, (_, i) => i),
    whole,
  );
});
afterAll(async () => {
  await buffer.close();
  await device.close();
});

const numbers = async (tensor: DeviceTensor) => [...new Int32Array((await readTensor(tensor)).buffer)];

it('is the part it says, in the memory of the whole', async () => {
  const block = viewTensor(whole, [2, 2], 10);
  expect(block).toEqual({ dtype: 'i32', shape: [2, 2], address: whole.address + 40n, device: whole.device });
  expect(await numbers(block)).toEqual([10, 11, 12, 13]);
  await writeTensor(Int32Array.of(-1, -2), viewTensor(block, [2], 1));
  expect(await numbers(viewTensor(whole, [24]))).toEqual([
    ...Array(11).keys(),
    -1,
    -2,
    ...[...Array(11).keys()].map((i) => 13 + i),
  ]);
  const stream = device.stream();
  const [from, to] = [viewTensor(whole, [3], 0), viewTensor(whole, [3], 10)];
  stream.copy(from, to);
  await stream.synchronize();
  expect(await numbers(to)).toEqual([0, 1, 2]);
  await stream.close();
});

it('may be empty, and end where the whole ends', async () => {
  expect(await numbers(viewTensor(whole, [0, 2], 24))).toEqual([]);
  expect(await numbers(viewTensor(whole, [1], 23))).toEqual([23]);
});

it('of memory of others is an address', async () => {
  const { dtype, shape, address, device: where } = whole;
  const theirs = viewTensor({ dtype, shape, address, device: where }, [2], 3);
  expect(theirs).toEqual({ dtype: 'i32', shape: [2], address: address + 12n, device: where });
  await expect(readTensor(theirs)).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
});

it('reaches no further than the whole, and needs packed rows', () => {
  const refused = (shape: readonly number[], offset: number) => {
    expect(() => viewTensor(whole, shape, offset)).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
  };
  refused([25], 0);
  refused([2], 23);
  refused([1], -1);
  refused([1], 0.5);
  refused([-2, -2], 0);
  refused([1.5], 0);
  refused(3 as never, 0);
  expect(() => viewTensor(undefined as never, [1])).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
  const apart = { ...whole, strides: [16, 4, 1] };
  expect(() => viewTensor(apart, [1])).toThrow(expect.objectContaining({ code: 'EP_UNSUPPORTED' }));
});
