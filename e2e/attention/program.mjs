// One rank: joins the others, runs a scenario, reports its value or error.
import { parentPort, workerData } from 'node:worker_threads';
import { hostile } from '@ep/conformance/hostile';
import { openFileStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import { compatScenarios } from './compat.mjs';
import { goldenScenarios } from './golden.mjs';
import { scenarios as dispatchScenarios } from './scenarios.mjs';

const start = workerData ?? JSON.parse(process.argv[2]);
const scenarios = { ...dispatchScenarios, ...compatScenarios, ...goldenScenarios };
const post = (message) =>
  new Promise((resolve) => {
    if (parentPort) {
      parentPort.postMessage(message);
      resolve();
    } else {
      process.send(message, resolve);
    }
  });

try {
  const store = await openFileStore(start.store);
  const transport = await (start.data?.transport === 'hostile' ? hostile : nvshmem.shm).open(
    { rank: start.rank, worldSize: start.worldSize, store },
    {
      signal: new AbortController().signal,
      timeoutMs: 120_000,
      ...(start.data?.config ? { config: start.data.config } : {}),
    },
  );
  let message;
  try {
    message = {
      rank: start.rank,
      value: await scenarios[start.scenario]({ ...start, transport, ready: () => post('ready') }),
    };
  } finally {
    await transport.close();
    await store.close();
  }
  await post(message);
} catch (error) {
  const context = JSON.parse(
    JSON.stringify(error?.context ?? {}, (_, value) => (typeof value === 'bigint' ? String(value) : value)),
  );
  await post({ rank: start.rank, error: { code: error?.code, message: error?.stack ?? String(error), context } });
}
