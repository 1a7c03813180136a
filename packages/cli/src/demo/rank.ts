/** One rank of the demo: the program that processes run, and the module that worker threads load. */
import { isMainThread, parentPort, workerData } from 'node:worker_threads';
import { isEpError, openFileStore, readLaunchEnv } from '@ep/core';
import { demoShape, TokenRows } from './inputs.js';
import { type RankMessage, readJob } from './job.js';
import { runStep } from './step.js';

export interface ThreadData {
  readonly jobPath: string;
  readonly rank: number;
  readonly worldSize: number;
  readonly storePath: string;
}

type Say = (message: RankMessage) => void;

async function runRank(place: ThreadData, say: Say): Promise<void> {
  const { rank, worldSize } = place;
  const { dtype, plan, seed, documents, transport } = readJob(place.jobPath);
  const store = await openFileStore(place.storePath);
  try {
    const source = new TokenRows(seed, documents);
    const onPhase = (phase: Extract<RankMessage, { kind: 'phase' }>['phase']): void =>
      say({ kind: 'phase', rank, phase });
    const result = await runStep(
      { rank, worldSize, store },
      { plan, shape: { ...demoShape, dtype }, source, transport, onPhase },
    );
    say({ kind: 'result', result });
  } finally {
    await store.close();
  }
}

function placeOfProcess(): ThreadData {
  const { rank, worldSize, store } = readLaunchEnv();
  if (store.kind !== 'file') throw new Error(`the ranks of the demo meet at a file store, found ${store.kind}`);
  return { rank, worldSize, storePath: store.path, jobPath: process.argv[2]! };
}

async function main(): Promise<void> {
  const thread = isMainThread ? undefined : (workerData as ThreadData);
  const say: Say = (message) => {
    if (thread) parentPort!.postMessage(message);
    else process.stdout.write(`${JSON.stringify(message)}\n`);
  };
  let rank = thread?.rank ?? -1;
  try {
    const place = thread ?? placeOfProcess();
    rank = place.rank;
    await runRank(place, say);
  } catch (error) {
    const known = isEpError(error);
    const message = error instanceof Error ? (known ? error.message : (error.stack ?? error.message)) : String(error);
    say({ kind: 'failure', rank, code: known ? error.code : 'INTERNAL', message });
    process.exitCode = 1;
  }
}

await main();
