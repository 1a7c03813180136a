/** What the rank programs of the demos have in common: where they run, and how they tell what came of it. */
import { pathToFileURL } from 'node:url';
import { isMainThread, parentPort, workerData } from 'node:worker_threads';
import { isEpError, type Member, openFileStore, readLaunchEnv } from '@ep/core';
import { gpuOfRank } from './devices.js';
import { runRankThreads } from './rank-threads.js';

export interface ThreadData {
  readonly jobPath: string;
  readonly rank: number;
  readonly worldSize: number;
  readonly storePath: string;
}

/** What a process is told whose ranks are its threads. The launcher numbers the processes as the GPUs that ranks take in turn. */
export interface SharedProcess {
  /** Ranks of all processes. */
  readonly worldSize: number;
  readonly dies: readonly number[];
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

const tellLauncher = (message: unknown): void => void process.stdout.write(`${JSON.stringify(message)}\n`);

/** Runs those ranks whose GPU is this process's, as threads that run the same program. */
async function runSharedProcess({ worldSize, dies }: SharedProcess): Promise<void> {
  const { rank: own, worldSize: processes, storePath, jobPath } = placeOfProcess();
  const numbers = [...Array(processes).keys()];
  const ranks = [...Array(worldSize).keys()].filter((rank) => gpuOfRank(numbers, rank) === own);
  const places = ranks.map((rank): ThreadData => ({ rank, worldSize, storePath, jobPath }));
  const program = pathToFileURL(process.argv[1]!);
  const crashes = await runRankThreads({ program, places, dies: new Set(dies) }, tellLauncher);
  if (crashes.length === 0) return;
  process.stderr.write(`${crashes.join('\n')}\n`);
  process.exitCode = 1;
}

/** Runs `body` as one rank, a process or a worker thread, and reports its result or failure; or, in a process that several ranks share, each of them. */
export async function runRankProgram<P extends string, R>(
  body: (member: Member, jobPath: string, onPhase: (phase: P) => void) => Promise<R>,
): Promise<void> {
  const thread = isMainThread ? undefined : (workerData as ThreadData);
  const shared = thread === undefined ? process.argv[3] : undefined;
  if (shared !== undefined) return runSharedProcess(JSON.parse(shared) as SharedProcess);
  const say = (message: RankMessage<P, R>): void => {
    if (thread) parentPort!.postMessage(message);
    else tellLauncher(message);
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
