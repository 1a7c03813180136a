/** Runs the three ranks as worker threads. */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Worker } from 'node:worker_threads';
import { worldSize } from './example.js';
import type { Facts } from './facts.js';

/** Every rank's report, in rank order. Rejects with the first failure; no rank outlives it. */
export async function runWalkthrough(): Promise<Facts[]> {
  const folder = await mkdtemp(join(tmpdir(), 'ep-walkthrough-'));
  const workers = Array.from(
    { length: worldSize },
    (_, rank) =>
      new Worker(new URL('./rank-thread.mjs', import.meta.url), {
        workerData: { rank, storePath: join(folder, 'store') },
      }),
  );
  try {
    return await Promise.all(workers.map(reportOf));
  } finally {
    await Promise.all(workers.map((worker) => worker.terminate()));
    await rm(folder, { recursive: true, force: true });
  }
}

function reportOf(worker: Worker, rank: number): Promise<Facts> {
  return new Promise((resolve, reject) => {
    worker.once('message', resolve);
    worker.once('error', reject);
    worker.once('exit', (code) => reject(new Error(`rank ${rank} ended with status ${code} and without a report`)));
  });
}
