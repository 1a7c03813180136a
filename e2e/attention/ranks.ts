/** Runs one rank program N times, as worker threads of one process or as processes, and collects what each rank reports. */
import { type ChildProcess, fork } from 'node:child_process';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Worker } from 'node:worker_threads';

export type Mode = 'threads' | 'processes';

export interface Report {
  readonly rank: number;
  readonly value?: unknown;
  readonly error?: { readonly code?: string; readonly message: string; readonly context?: Record<string, unknown> };
  /** How the rank ended without a report: exit code or signal. */
  readonly exit?: string;
}

export interface Start {
  readonly scenario: string;
  readonly rank: number;
  readonly worldSize: number;
  readonly store: string;
  readonly data: unknown;
}

const PROGRAM = new URL('./program.mjs', import.meta.url);

function runThread(start: Start, onReady: () => void): { ended: Promise<Report>; kill: () => void } {
  const worker = new Worker(PROGRAM, { workerData: start });
  let report: Report | undefined;
  const ended = new Promise<Report>((resolve) => {
    worker.on('message', (message: Report | 'ready') => {
      if (message === 'ready') onReady();
      else report = message;
    });
    worker.on('error', (error) => {
      report = { rank: start.rank, error: { message: String(error) } };
    });
    worker.on('exit', (code) => resolve(report ?? { rank: start.rank, exit: `exit ${code}` }));
  });
  return { ended, kill: () => void worker.terminate() };
}

function runProcess(start: Start, onReady: () => void): { ended: Promise<Report>; kill: () => void } {
  const child: ChildProcess = fork(fileURLToPath(PROGRAM), [JSON.stringify(start)], { serialization: 'advanced' });
  let report: Report | undefined;
  const ended = new Promise<Report>((resolve) => {
    child.on('message', (message: Report | 'ready') => {
      if (message === 'ready') onReady();
      else report = message;
    });
    child.on('exit', (code, signal) => resolve(report ?? { rank: start.rank, exit: signal ?? `exit ${code}` }));
  });
  return { ended, kill: () => void child.kill('SIGKILL') };
}

export interface RunOptions {
  readonly data?: unknown;
  readonly timeoutMs?: number;
  /** Kills that rank (SIGKILL, or terminate() of its thread) so many milliseconds after it has reported that it is ready. */
  readonly kill?: { readonly rank: number; readonly afterMs: number };
}

/** Reports in rank order. Rejects, after killing all ranks, when one has not ended in time. */
export async function runRanks(
  scenario: string,
  worldSize: number,
  mode: Mode,
  options: RunOptions = {},
): Promise<Report[]> {
  const folder = await mkdtemp(join(tmpdir(), 'ep-e2e-'));
  let killer: NodeJS.Timeout | undefined;
  const ranks = Array.from({ length: worldSize }, (_, rank) => {
    const start = { scenario, rank, worldSize, store: join(folder, 'store'), data: options.data };
    const onReady = (): void => {
      if (options.kill?.rank === rank) killer = setTimeout(() => ranks[rank]!.kill(), options.kill.afterMs);
    };
    return mode === 'threads' ? runThread(start, onReady) : runProcess(start, onReady);
  });
  const timeoutMs = options.timeoutMs ?? 60_000;
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(
      () => reject(new Error(`${scenario} on ${worldSize} ${mode} did not end within ${timeoutMs} ms`)),
      timeoutMs,
    );
  });
  try {
    return await Promise.race([Promise.all(ranks.map((rank) => rank.ended)), late]);
  } finally {
    clearTimeout(timer);
    clearTimeout(killer);
    for (const rank of ranks) rank.kill();
    await rm(folder, { recursive: true, force: true });
  }
}

/** The values of all ranks; throws the first error with its rank. */
export function valuesOf<T>(reports: readonly Report[]): T[] {
  return reports.map((report) => {
    if (report.error) throw new Error(`rank ${report.rank}: ${report.error.code ?? ''} ${report.error.message}`);
    if (report.exit) throw new Error(`rank ${report.rank} ended with ${report.exit}`);
    return report.value as T;
  });
}
