/**
 * Latencies of the shared-memory transport. Ranks are processes; every round of a ping-pong checks the number it carries. Native figures are taken on a
 * stream thread with the calls that kernels make; JS figures are of one call from JS.
 */
import { fork } from 'node:child_process';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

export interface ShmBenchOptions {
  /** Rounds of each ping-pong and barrier series; 20 000 unless given. */
  readonly rounds?: number;
  readonly signal?: AbortSignal;
  /** Is told what is measured next. */
  readonly tell?: (text: string) => void;
}

/** Microseconds. */
export interface Latency {
  readonly p50: number;
  readonly p99: number;
  readonly slowest: number;
  readonly mean: number;
  readonly samples: number;
}

export interface ShmBenchResult {
  readonly name: string;
  readonly ranks: number;
  readonly latency: Latency;
  /** How much longer it takes than two stores and a spin between the same cores: the median of series that took turns. */
  readonly timesBare?: number;
  /** What the project wants, in microseconds. */
  readonly goals: readonly LatencyGoal[];
}

export type LatencyAt = 'p50' | 'p99' | 'slowest';

export interface LatencyGoal {
  readonly at: LatencyAt;
  readonly microseconds: number;
  readonly met: boolean;
}

export interface ShmBenchReport {
  readonly bench: 'shm';
  readonly results: readonly ShmBenchResult[];
}

export interface RankTask {
  readonly rank: number;
  readonly worldSize: number;
  readonly store: string;
  readonly rounds: number;
}

/** Samples in nanoseconds; `scale` turns a round into what is reported (0.5: half a ping-pong). */
export function latencyOf(samples: Float64Array, scale: number): Latency {
  const sorted = Float64Array.from(samples, (nanoseconds) => (nanoseconds * scale) / 1000).sort();
  const at = (fraction: number) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * fraction))]!;
  return {
    p50: at(0.5),
    p99: at(0.99),
    slowest: sorted[sorted.length - 1]!,
    mean: sorted.reduce((sum, value) => sum + value, 0) / sorted.length,
    samples: sorted.length,
  };
}

/** Results of rank 0 of a world of processes; a text that it sends before them says what it measures. Rejects when a rank fails; all are ended first. */
async function runWorld(
  worldSize: number,
  rounds: number,
  { signal, tell }: ShmBenchOptions,
): Promise<readonly ShmBenchResult[]> {
  const folder = await mkdtemp(join(tmpdir(), 'ep-bench-'));
  const program = fileURLToPath(new URL('./rank.js', import.meta.url));
  const children = Array.from({ length: worldSize }, (_, rank) => {
    const task: RankTask = { rank, worldSize, store: join(folder, 'store'), rounds };
    return fork(program, [JSON.stringify(task)], { serialization: 'advanced' });
  });
  const onAbort = (): void => {
    for (const child of children) child.kill('SIGKILL');
  };
  signal?.addEventListener('abort', onAbort, { once: true });
  try {
    const reports = await Promise.all(
      children.map(
        (child, rank) =>
          new Promise<readonly ShmBenchResult[]>((resolve, reject) => {
            let results: readonly ShmBenchResult[] | undefined;
            child.on('message', (message) => {
              if (typeof message === 'string') tell?.(`${worldSize} ranks, ${message}`);
              else results = message as readonly ShmBenchResult[];
            });
            child.on('error', reject);
            child.on('exit', (code, by) => {
              if (code === 0 && results !== undefined) resolve(results);
              else
                reject(
                  signal?.aborted
                    ? signal.reason
                    : new Error(`rank ${rank} of the benchmark ended with ${by ?? `exit code ${code}`}`),
                );
            });
          }),
      ),
    );
    return reports[0]!;
  } finally {
    signal?.removeEventListener('abort', onAbort);
    onAbort();
    await rm(folder, { recursive: true, force: true });
  }
}

/** 2 ranks: put-with-signal and JS calls. 4 ranks: barriers, also where ranks outnumber cores. */
export async function benchShm(options: ShmBenchOptions = {}): Promise<ShmBenchReport> {
  const rounds = options.rounds ?? 20_000;
  const results: ShmBenchResult[] = [];
  for (const worldSize of [2, 4]) results.push(...(await runWorld(worldSize, rounds, options)));
  return { bench: 'shm', results };
}
