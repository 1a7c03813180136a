/** What the rank programs of the demos have in common: where they run, and how they tell what came of it. */
import { isMainThread, parentPort, workerData } from 'node:worker_threads';
import { isEpError, type Member, openFileStore, readLaunchEnv } from '@ep/core';

export interface ThreadData {
  readonly jobPath: string;
  readonly rank: number;
  readonly worldSize: number;
  readonly storePath: string;
}

/** Plain data, so that it passes pipes and thread messages. */
export type RankMessage<P extends string, R> =
  | { readonly kind: 'phase'; readonly rank: number; readonly phase: P }
  | { readonly kind: 'result'; readonly result: R }
  | { readonly kind: 'failure'; readonly rank: number; readonly code: string; readonly message: string };

function placeOfProcess(): ThreadData {
  const { rank, worldSize, store } = readLaunchEnv();
  if (store.kind !== 'file') throw new Error(`the ranks of the demo meet at a file store, found ${store.kind}`);
  return { rank, worldSize, storePath: store.path, jobPath: process.argv[2]! };
}

/** Runs `body` as one rank, a process or a worker thread, and reports its result or failure. */
export async function runRankProgram<P extends string, R>(
  body: (member: Member, jobPath: string, onPhase: (phase: P) => void) => Promise<R>,
): Promise<void> {
  const thread = isMainThread ? undefined : (workerData as ThreadData);
  const say = (message: RankMessage<P, R>): void => {
    if (thread) parentPort!.postMessage(message);
    else process.stdout.write(`${JSON.stringify(message)}\n`);
  };
  let rank = thread?.rank ?? -1;
  try {
    const place = thread ?? placeOfProcess();
    rank = place.rank;
    const store = await openFileStore(place.storePath);
    try {
      const { worldSize, jobPath } = place;
      const result = await body({ rank, worldSize, store }, jobPath, (phase) => say({ kind: 'phase', rank, phase }));
      say({ kind: 'result', result });
    } finally {
      await store.close();
    }
  } catch (error) {
    const known = isEpError(error);
    const message = error instanceof Error ? (known ? error.message : (error.stack ?? error.message)) : String(error);
    say({ kind: 'failure', rank, code: known ? error.code : 'INTERNAL', message });
    process.exitCode = 1;
  }
}
