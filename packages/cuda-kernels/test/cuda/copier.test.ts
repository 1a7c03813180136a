// Over the stand-in for a GPU: whoever copies on a thread shares a stream of each device for it.
import { readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';
import { readTensor, writeTensor } from '../../src/cuda/buffer.js';
import { CudaDevice } from '../../src/cuda/device.js';

process.env.EP_CUDA_PATH = fileURLToPath(
  new URL('../../../../native/build/Release/libep_cuda_host.so', import.meta.url),
);

function nameOf(task: string): string {
  try {
    return readFileSync(`/proc/self/task/${task}/comm`, 'utf8').trim();
  } catch {
    return ''; // it has just ended
  }
}

/** Each stream has a thread that watches it. HAZARD: which names itself once it runs: of a stream that has copied nothing yet this may not know. */
const streams = () => readdirSync('/proc/self/task').filter((task) => nameOf(task) === 'ep-gpu-stream').length;

it('copies of all that are open on a thread share one stream, which is made anew behind the last of them', async () => {
  for (let round = 0; round < 2; round++) {
    const devices = Array.from({ length: 3 }, () => new CudaDevice());
    const buffers = devices.map((device) => device.allocate(12 << 20));
    const tensors = buffers.map((buffer) => buffer.tensor('i32', [3 << 20]));
    const values = tensors.map((_, i) => new Int32Array(3 << 20).fill(round * 3 + i));
    // Of three pieces each.
    await Promise.all(tensors.map((tensor, i) => writeTensor(values[i]!, tensor)));
    const [first, ...others] = await Promise.all([
      readTensor(tensors[0]!),
      ...tensors.slice(1).map((tensor) => readTensor(tensor)),
    ]);
    expect(streams()).toBe(1);
    expect(new Int32Array(first!.buffer).every((value) => value === round * 3)).toBe(true);
    await buffers[0]!.close();
    await devices[0]!.close();
    expect(streams()).toBe(1);
    for (const [i, bytes] of others.entries()) {
      expect(new Int32Array(bytes!.buffer).every((value) => value === round * 3 + i + 1)).toBe(true);
      await writeTensor(Int32Array.of(7), buffers[i + 1]!.tensor('i32', [1], 4));
      expect([...new Int32Array((await readTensor(buffers[i + 1]!.tensor('i32', [3]))).buffer)]).toEqual([
        round * 3 + i + 1,
        7,
        round * 3 + i + 1,
      ]);
    }
    for (const [i, device] of devices.slice(1).entries()) {
      await buffers[i + 1]!.close();
      await device.close();
    }
    await expect.poll(streams).toBe(0);
  }
});
