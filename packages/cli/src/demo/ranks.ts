/** Starts the demo's ranks, as processes or as worker threads, and collects what they report. */
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Worker } from 'node:worker_threads';
import { type EpCode, EpError, ERROR_TABLE } from '@ep/core';
import { launchIn, storePath } from '../run/launch.js';
import { type Scratch, withScratch } from '../run/scratch.js';
import { type Job, type RankMessage, writeJob } from './job.js';
import type { ThreadData } from './rank.js';
import type { Phase, StepResult } from './step.js';

export type RankMode = 'processes' | 'threads';

/** Built beside the entry point; see tsup.config.ts. */
const rankProgram = new URL('./demo-rank.js', import.meta.url);

/** Collects messages; the first failure wins, for the later ones are mostly its echoes. */
class Collector {
  readonly results = new Map<number, StepResult>();
  failure: Extract<RankMessage, { kind: 'failure' }> | undefined;
  readonly #onPhase: (phase: Phase) => void;

  constructor(onPhase: (phase: Phase) => void) {
    this.#onPhase = onPhase;
  }

  take(message: RankMessage): void {
    if (message.kind === 'phase') this.#onPhase(message.phase);
    else if (message.kind === 'result') this.results.set(message.result.rank, message.result);
    else this.failure ??= message;
  }

  finish(ranks: number, otherwise: () => string): StepResult[] {
    if (this.failure !== undefined) {
      const { code, message, rank } = this.failure;
      const known = Object.hasOwn(ERROR_TABLE, code) ? (code as EpCode) : 'EP_ABORTED';
      throw new EpError(known, `rank ${rank}: ${message}`, { context: { rank } });
    }
    const results = [...this.results.values()].sort((a, b) => a.rank - b.rank);
    if (results.length < ranks)
      throw new EpError('EP_PEER_LOST', otherwise(), { context: { reported: results.length } });
    return results;
  }
}

/** Resolves with every rank's result, by rank. Rejects with the first failure, after all ranks have ended. */
export async function runRanks(
  ranks: number,
  job: Job,
  mode: RankMode,
  onPhase: (phase: Phase) => void,
  signal: AbortSignal,
): Promise<StepResult[]> {
  return withScratch('ep-demo-', (scratch) => {
    const jobPath = join(scratch.folder, 'job.json');
    writeJob(jobPath, job);
    const collector = new Collector(onPhase);
    return mode === 'threads'
      ? runThreads(ranks, { jobPath, storePath: storePath(scratch.folder) }, collector, signal)
      : runProcesses(ranks, { scratch, jobPath }, collector, signal);
  });
}

async function runProcesses(
  ranks: number,
  { scratch, jobPath }: { readonly scratch: Scratch; readonly jobPath: string },
  collector: Collector,
  signal: AbortSignal,
): Promise<StepResult[]> {
  const errors: string[] = [];
  const result = await launchIn(scratch, {
    ranks,
    program: process.execPath,
    args: [fileURLToPath(rankProgram), jobPath],
    signal,
    onEvent: (event) => {
      if (event.event !== 'line') return;
      if (event.stream === 'stdout' && event.text.startsWith('{'))
        collector.take(JSON.parse(event.text) as RankMessage);
      else errors.push(`[rank ${event.rank}] ${event.text}`);
    },
  });
  signal.throwIfAborted();
  return collector.finish(ranks, () => {
    const who = result.failed === undefined ? 'a rank' : `rank ${result.failed.rank}`;
    const how = result.failed?.signal ?? `status ${result.failed?.code ?? 0}`;
    return `${who} ended with ${how} and without a result${errors.length > 0 ? `:\n${errors.slice(-20).join('\n')}` : ''}`;
  });
}

async function runThreads(
  ranks: number,
  paths: Pick<ThreadData, 'jobPath' | 'storePath'>,
  collector: Collector,
  signal: AbortSignal,
): Promise<StepResult[]> {
  const workers = Array.from({ length: ranks }, (_, rank) => {
    const data: ThreadData = { ...paths, rank, worldSize: ranks };
    return new Worker(rankProgram, { workerData: data });
  });
  const stopAll = (): void => {
    for (const worker of workers) void worker.terminate();
  };
  signal.addEventListener('abort', stopAll, { once: true });
  const crashes: string[] = [];
  try {
    await Promise.all(
      workers.map(
        (worker, rank) =>
          new Promise<void>((resolve) => {
            worker.on('message', (message: RankMessage) => collector.take(message));
            worker.on('error', (error) => crashes.push(`rank ${rank}: ${error.stack ?? error.message}`));
            worker.on('exit', (code) => {
              // Its peers would wait for it until their own deadlines.
              if (code !== 0) stopAll();
              resolve();
            });
          }),
      ),
    );
  } finally {
    signal.removeEventListener('abort', stopAll);
  }
  signal.throwIfAborted();
  return collector.finish(
    ranks,
    () => `worker threads ended without a result${crashes.length > 0 ? `:\n${crashes.join('\n')}` : ''}`,
  );
}
