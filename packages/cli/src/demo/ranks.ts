/** Starts the demo's ranks, as processes, as worker threads, or as threads of several processes, and collects what they report. */
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { type EpCode, EpError, ERROR_TABLE } from '@ep/core';
import { launchIn, storePath } from '../run/launch.js';
import { type Scratch, withScratch } from '../run/scratch.js';
import type { RankMessage, SharedProcess, ThreadData } from './rank-main.js';
import { runRankThreads } from './rank-threads.js';

/** 'process-per-gpu': ranks of a GPU are worker threads of one process, each GPU has its own. */
export type RankMode = 'processes' | 'threads' | 'process-per-gpu';

/** For people. */
export const ranksText = (ranks: number, mode: RankMode): string =>
  mode === 'process-per-gpu' ? `${ranks} threads of a process for each GPU` : `${ranks} ${mode}`;

export interface RankJob {
  /** The program of each rank: built beside the entry point; see tsup.config.ts. */
  readonly program: URL;
  /** Writes what every rank needs to know to this path, and to paths that begin with it. */
  readonly write: (path: string) => void;
  /** Ranks that are to die: nobody waits for their results, and their end is no failure. */
  readonly dies?: ReadonlySet<number>;
  /** How many GPUs ranks take in turn. */
  readonly gpus: number;
}

/** Collects messages; the first failure wins, for the later ones are mostly its echoes. */
class Collector<P extends string, R extends { readonly rank: number }> {
  readonly results = new Map<number, R>();
  failure: Extract<RankMessage<P, R>, { kind: 'failure' }> | undefined;
  readonly #onPhase: (phase: P) => void;

  constructor(onPhase: (phase: P) => void) {
    this.#onPhase = onPhase;
  }

  take(message: RankMessage<P, R>): void {
    if (message.kind === 'phase') this.#onPhase(message.phase);
    else if (message.kind === 'result') this.results.set(message.result.rank, message.result);
    else this.failure ??= message;
  }

  finish(ranks: number, otherwise: () => string): R[] {
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

/** Resolves with the result of every rank that is to live, by rank. Rejects with the first failure, after all ranks have ended. */
export async function runRanks<P extends string, R extends { readonly rank: number }>(
  ranks: number,
  job: RankJob,
  mode: RankMode,
  onPhase: (phase: P) => void,
  signal: AbortSignal,
): Promise<R[]> {
  return withScratch('ep-demo-', (scratch) => {
    const jobPath = join(scratch.folder, 'job.json');
    job.write(jobPath);
    const collector = new Collector<P, R>(onPhase);
    return mode === 'threads'
      ? runThreads(ranks, job, { jobPath, storePath: storePath(scratch.folder) }, collector, signal)
      : runProcesses(ranks, job, { scratch, jobPath, shared: mode === 'process-per-gpu' }, collector, signal);
  });
}

async function runProcesses<P extends string, R extends { readonly rank: number }>(
  ranks: number,
  job: RankJob,
  { scratch, jobPath, shared }: { readonly scratch: Scratch; readonly jobPath: string; readonly shared: boolean },
  collector: Collector<P, R>,
  signal: AbortSignal,
): Promise<R[]> {
  const errors: string[] = [];
  const named = shared ? 'process' : 'rank';
  const together: SharedProcess = { worldSize: ranks, dies: [...(job.dies ?? [])] };
  const result = await launchIn(scratch, {
    ranks: shared ? job.gpus : ranks,
    program: process.execPath,
    args: [fileURLToPath(job.program), jobPath, ...(shared ? [JSON.stringify(together)] : [])],
    signal,
    // Where ranks share a process, the one that dies leaves its process to the others.
    ...(job.dies === undefined || shared ? {} : { keepGoing: true }),
    onEvent: (event) => {
      if (event.event !== 'line') return;
      if (event.stream === 'stdout' && event.text.startsWith('{'))
        collector.take(JSON.parse(event.text) as RankMessage<P, R>);
      else errors.push(`[${named} ${event.rank}] ${event.text}`);
    },
  });
  signal.throwIfAborted();
  return collector.finish(ranks - (job.dies?.size ?? 0), () => {
    const who = result.failed === undefined ? `a ${named}` : `${named} ${result.failed.rank}`;
    const how = result.failed?.signal ?? `status ${result.failed?.code ?? 0}`;
    return `${who} ended with ${how} and without a result${errors.length > 0 ? `:\n${errors.slice(-20).join('\n')}` : ''}`;
  });
}

async function runThreads<P extends string, R extends { readonly rank: number }>(
  ranks: number,
  job: RankJob,
  paths: Pick<ThreadData, 'jobPath' | 'storePath'>,
  collector: Collector<P, R>,
  signal: AbortSignal,
): Promise<R[]> {
  const places = Array.from({ length: ranks }, (_, rank): ThreadData => ({ ...paths, rank, worldSize: ranks }));
  const { program, dies } = job;
  const crashes = await runRankThreads<P, R>({ program, places, ...(dies && { dies }), signal }, (message) =>
    collector.take(message),
  );
  signal.throwIfAborted();
  return collector.finish(
    ranks - (job.dies?.size ?? 0),
    () => `worker threads ended without a result${crashes.length > 0 ? `:\n${crashes.join('\n')}` : ''}`,
  );
}
