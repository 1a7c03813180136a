/** Ranks of one process, each a worker thread. */
import { Worker } from 'node:worker_threads';
import type { RankMessage, ThreadData } from './rank-main.js';

export interface RankThreads {
  /** The program of each rank. */
  readonly program: URL;
  readonly places: readonly ThreadData[];
  /** Ranks that are to die. */
  readonly dies?: ReadonlySet<number>;
  readonly signal?: AbortSignal;
}

/** Passes on what ranks say until all of them have ended; resolves with why any ended that was not to. Such a one ends the others, which would wait for it until their own deadlines. */
export async function runRankThreads<P extends string, R>(
  { program, places, dies, signal }: RankThreads,
  onMessage: (message: RankMessage<P, R>) => void,
): Promise<readonly string[]> {
  const workers = places.map((place) => new Worker(program, { workerData: place }));
  const stopAll = (): void => {
    for (const worker of workers) void worker.terminate();
  };
  signal?.addEventListener('abort', stopAll, { once: true });
  if (signal?.aborted) stopAll();
  const crashes: string[] = [];
  try {
    await Promise.all(
      workers.map((worker, i) => {
        const { rank } = places[i]!;
        return new Promise<void>((resolve) => {
          worker.on('message', onMessage);
          worker.on('error', (error) => crashes.push(`rank ${rank}: ${error.stack ?? error.message}`));
          worker.on('exit', (code) => {
            if (code !== 0 && !dies?.has(rank)) {
              crashes.push(`rank ${rank} ended with status ${code}`);
              stopAll();
            }
            resolve();
          });
        });
      }),
    );
  } finally {
    signal?.removeEventListener('abort', stopAll);
  }
  return crashes;
}
