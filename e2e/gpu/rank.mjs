// One rank of the suites for GPUs, a worker thread or a process: joins the others, runs a scenario, reports its value or error.
import { parentPort, workerData } from 'node:worker_threads';
import { openFileStore } from '@ep/core';
import { CudaDevice } from '@ep/cuda-kernels';
import { openGpus } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';
import { scenarios } from './scenarios.mjs';

/** With `spread`, ranks take the GPUs that work in turn. @param {number} rank */
function gpuOf(rank) {
  const usable = [...openGpus().devices.entries()].flatMap(([gpu, { unusable }]) => (unusable ? [] : [gpu]));
  return usable[rank % usable.length] ?? 0;
}

const start = workerData ?? JSON.parse(process.argv[2]);
const post = (message) =>
  new Promise((resolve) => {
    if (parentPort) {
      parentPort.postMessage(message);
      resolve();
    } else {
      process.send(message, resolve);
    }
  });

async function run() {
  const store = await openFileStore(start.store);
  const { rank, worldSize } = start;
  if (start.data?.nccl) {
    const device = new CudaDevice(gpuOf(rank));
    try {
      return await scenarios[start.scenario]({ ...start, store, device, ready: () => post('ready') });
    } finally {
      await device.close();
      await store.close();
    }
  }
  const transport = await (start.data?.nvshmem ? nvshmem.nvshmem : nvshmem.cuda).open(
    { rank, worldSize, store },
    {
      signal: new AbortController().signal,
      timeoutMs: 60_000,
      config: { device: start.data?.spread ? gpuOf(rank) : 0 },
    },
  );
  const device = new CudaDevice(transport.deviceIndex);
  try {
    return await scenarios[start.scenario]({ ...start, store, transport, device, ready: () => post('ready') });
  } finally {
    await device.close();
    await transport.close();
    await store.close();
  }
}

try {
  await post({ rank: start.rank, value: await run() });
} catch (error) {
  await post({ rank: start.rank, error: { code: error?.code, message: error?.stack ?? String(error) } });
}
