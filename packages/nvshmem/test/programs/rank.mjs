/** What every test program begins with: its place in the world, and how it reports. */
import assert from 'node:assert/strict';
import { isMainThread, parentPort, workerData } from 'node:worker_threads';
import { openFileStore } from '@ep/core';
import { shmemInit } from '@ep/nvshmem';

const init = isMainThread ? JSON.parse(process.env.EP_TEST_RANK) : workerData;

function send(message) {
  if (isMainThread) process.send(message);
  else parentPort.postMessage(message);
}

const describe = (error) => ({
  message: String(error?.stack ?? error),
  ...(error?.code === undefined ? {} : { code: error.code, context: error.context }),
});

/** Runs `main` as this rank; what it returns or throws is what the test sees. */
export async function runRank(main) {
  const { rank, worldSize, storePath, args } = init;
  const store = await openFileStore(storePath);
  try {
    const value = await main({ rank, worldSize, store, args, note: (value) => send({ kind: 'note', value }) });
    send({ kind: 'done', value });
  } catch (error) {
    send({ kind: 'failed', error: describe(error) });
  } finally {
    await store.close();
    // The channel to the parent would keep the process.
    if (isMainThread) process.disconnect();
  }
}

/** Runs `main` with the library open, and closes it together with the other ranks. */
export function runShmem(main, heapBytes = 1 << 20) {
  return runRank(async (member) => {
    const shmem = await shmemInit(member, { heapBytes, timeoutMs: 60_000 });
    let value;
    try {
      value = await main(shmem, member);
    } catch (error) {
      // The others must not wait for a rank that has failed.
      await shmem.close();
      throw error;
    }
    await shmem.finalize();
    return value;
  });
}

/** mulberry32: the same numbers on every rank for the same seed. */
export function generator(seed) {
  let state = seed >>> 0;
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return (t ^ (t >>> 14)) >>> 0;
  };
  return { next, below: (end) => next() % end };
}

/** The code of what `body` throws or rejects with. */
export async function codeOf(body) {
  try {
    await body();
  } catch (error) {
    assert.ok(error.code, `no EpError: ${error.stack}`);
    return error.code;
  }
  return 'nothing was thrown';
}
