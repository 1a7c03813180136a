// A rank of a group that goes wrong as its argument says; with `threads`, a process whose workers are the ranks. EP_TRACE_DIR says where dumps go.
import { setTimeout as sleep } from 'node:timers/promises';
import { isMainThread, threadId, Worker, workerData } from 'node:worker_threads';
import { dumpOnSignal, initProcessGroup } from '@ep/collectives';
import { openFileStore, prefixStore, readLaunchEnv } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';

/** @param {{ rank: number, worldSize: number, path: string, what: string }} place */
async function runRank({ rank, worldSize, path, what }) {
  const store = await openFileStore(path);
  const transport = await nvshmem.shm.open(
    { rank, worldSize, store: prefixStore(store, 'transport') },
    { signal: new AbortController().signal },
  );
  const group = await initProcessGroup({
    backend: transport,
    store: prefixStore(store, 'group'),
    rank,
    worldSize,
    timeoutMs: 30_000,
  });
  const values = Float32Array.of(rank, 1, 2, 3);
  await group.allReduce(values, { op: 'sum' });
  /** @type {Record<string, () => Promise<unknown>>} */
  const acts = {
    // Rank 1 broadcasts where the others reduce.
    mismatch: async () => (rank === 1 ? group.broadcast(values, { root: 0 }) : group.allReduce(values, { op: 'sum' })),
    // As above, and every rank ends in the moment at which it knows.
    abrupt: async () => {
      const call = rank === 1 ? group.barrier() : group.allReduce(values, { op: 'sum' });
      await call.catch(() => process.exit(0));
    },
    // Rank 2 never comes; it is still there to be asked.
    late: async () => {
      if (rank === 2) await sleep(1500);
      else await group.allReduce(values, { op: 'max', timeoutMs: 500 });
    },
    // Rank 2 dies.
    death: async () => {
      if (rank === 2) process.kill(process.pid, 'SIGKILL');
      await group.barrier();
    },
    fine: async () => group.barrier(),
    // Until it is asked, and a moment for that.
    threads: async () => {
      console.log(`ready ${threadId}`);
      await sleep(60_000, undefined, { ref: true });
    },
  };
  try {
    await acts[what]?.();
  } catch (error) {
    console.log(/** @type {{ code?: string }} */ (error).code);
  }
  if (what === 'fine' || (what === 'late' && rank === 2)) group.flightRecorder().dump();
  await group.close({ signal: AbortSignal.timeout(2000) }).catch(() => {});
  await transport.close().catch(() => {});
  await store.close();
}

if (!isMainThread) await runRank(workerData);
else if (process.argv[2] === 'threads') {
  const stopPassing = dumpOnSignal();
  const [, , what, path, count] = /** @type {[string, string, string, string, string]} */ (process.argv);
  const workers = Array.from({ length: Number(count) }, (_, rank) => {
    return new Worker(new URL(import.meta.url), { workerData: { rank, worldSize: Number(count), path, what } });
  });
  process.on('SIGTERM', async () => {
    stopPassing();
    await Promise.all(workers.map((worker) => worker.terminate()));
    process.exit(0);
  });
} else {
  const { rank, worldSize, store } = readLaunchEnv();
  if (store.kind !== 'file') throw new Error('these ranks meet at a file');
  await runRank({ rank, worldSize, path: store.path, what: process.argv[2] ?? 'fine' });
}
