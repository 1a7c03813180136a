// One rank of the suites for GPUs, a worker thread or a process: joins the others, runs a scenario, reports its value or error.
import { parentPort, workerData } from 'node:worker_threads';
import { openFileStore } from '@ep/core';
import { CudaDevice } from '@ep/cuda-kernels';
import { openGpus } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';
import { scenarios } from './scenarios.mjs';

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
    const device = new CudaDevice(rank % openGpus().devices.length);
    try {
      return await scenarios[start.scenario]({ ...start, store, device, ready: () => post('ready') });
    } finally {
      await device.close();
      await store.close();
    }
  }
  const transport = await (start.data?.nvshmem ? nvshmem.nvshmem : nvshmem.cuda).open(
    { rank, worldSize, store },
    // With `spread`, ranks take the GPUs in turn.
    {
      signal: new AbortController().signal,
      timeoutMs: 60_000,
      config: { device: start.data?.spread ? rank % openGpus().devices.length : 0 },
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
