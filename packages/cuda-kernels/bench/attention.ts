/**
 * Attention dispatch against the machine's own copies, against the same dispatch staged through send and receive buffers, against the original's kernel
 * with one put per row (compat), and against MPI_Alltoallv of the same bytes where Open MPI is installed; all in one run, results verified. Ranks are processes.
 */
import { execFile, fork } from 'node:child_process';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { SHORTEST_STALL_US } from '@ep/native/ranks';
import { ALLTOALLV_SOURCE } from './alltoallv.js';
import type { StepTimes } from './steps.js';

export interface AttentionBenchOptions {
  /** Where rank processes find a transport: this package imports none. */
  readonly transport: { readonly url: string; readonly path: readonly string[] };
  readonly ranks?: number;
  /** Bytes that each rank sends in one call. 96 MiB unless given. */
  readonly payloadBytes?: number;
  readonly rowBytes?: readonly number[];
  readonly repeats?: number;
  readonly signal?: AbortSignal;
  /** Is told what is measured next. */
  readonly tell?: (text: string) => void;
}

/** One series: milliseconds of a call (slowest rank, median of the repeats) and its spread, payload GB/s of all ranks together, counted once. */
export interface Series {
  readonly milliseconds: number;
  /** (slowest - fastest) / median. */
  readonly spread: number;
  readonly gigabytesPerSecond: number;
}

export interface AttentionBenchResult {
  readonly rowBytes: number;
  readonly bytesPerRank: number;
  readonly copy: { readonly memcpy: Series; readonly nonTemporal: Series };
  readonly direct: Series;
  readonly staged: Series;
  /** The per-token kernel of the original on the same threads. */
  readonly compat: Series;
  /** Absent where Open MPI is not installed; see `skipped`. */
  readonly alltoallv?: Series;
  readonly ratios: {
    /** Direct over the fastest copy of the same threads: goal 0.85. */
    readonly ofCopy: number;
    /** Goal 2. */
    readonly overStaged: number;
    readonly overCompat: number;
    /** Staged over the bound of its three copies: 1 means that the baseline is as good as it can be. */
    readonly stagedOfBound: number;
    /** Goal 1.5. */
    readonly overAlltoallv?: number;
  };
}

/** Microseconds of what happened `count` times; all 0 where it never did. */
export interface Percentiles {
  readonly count: number;
  readonly p50: number;
  readonly p99: number;
  readonly slowest: number;
}

/** How long a thread that only reads the clock was kept from it, in a second on each of `cores`: a step in which that happens cannot be faster. */
export interface StallResult extends Percentiles {
  readonly cores: number;
  /** Microseconds; what is shorter is not counted. */
  readonly shortest: number;
}

export interface StepGoal {
  readonly at: 'p99' | 'slowest';
  readonly microseconds: number;
  readonly met: boolean;
}

/** Wanted with 4 ranks on 2 cores: who waits for the scheduler waits for microseconds, never for milliseconds. */
const STEP_GOALS = { p99: 100, slowest: 1000 } as const;

/** Dispatches of a few rows, each awaited, then released: microseconds of one on rank 0. */
export interface StepResult extends Percentiles {
  /** In a native loop of the same kernel, or one call from JS after the other, also without the threads that V8 has for itself. */
  readonly from: 'native' | 'JS' | 'JS, V8 without threads';
  readonly ranks: number;
  readonly bytesPerRank: number;
  readonly goals: readonly StepGoal[];
}

export interface AttentionBenchReport {
  readonly bench: 'attention';
  readonly steps: readonly StepResult[];
  /** Of the cores that the steps ran on, before and between them. */
  readonly stalls: StallResult;
  readonly ranks: number;
  readonly repeats: number;
  readonly results: readonly AttentionBenchResult[];
  /** What was not measured, and why. */
  readonly skipped: readonly string[];
}

export interface RankTask {
  readonly rank: number;
  readonly worldSize: number;
  readonly store: string;
  readonly transport: AttentionBenchOptions['transport'];
  readonly payloadBytes: number;
  readonly rowBytes: readonly number[];
  readonly repeats: number;
  /** Measures small steps instead of throughput: this many calls. */
  readonly stepCalls?: number;
}

/** Milliseconds of every repeat, per series; what a rank reports for one row size. */
export interface RankTimes {
  readonly rowBytes: number;
  readonly bytes: number;
  readonly series: Readonly<Record<'memcpy' | 'nonTemporal' | 'direct' | 'staged' | 'compat', readonly number[]>>;
}

const run = promisify(execFile);

/** By repeat, milliseconds of the slowest rank. */
const slowestOf = (perRank: readonly (readonly number[])[]): number[] =>
  perRank[0]!.map((_, i) => Math.max(...perRank.map((times) => times[i]!)));

const medianOf = (values: readonly number[]): number =>
  values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)]!;

function seriesOf(slowest: readonly number[], totalBytes: number): Series {
  const median = medianOf(slowest);
  return {
    milliseconds: median,
    spread: (Math.max(...slowest) - Math.min(...slowest)) / median,
    gigabytesPerSecond: totalBytes / median / 1e6,
  };
}

/** What each rank reports; a text that it sends before says what it measures. */
async function runRanks<T>(
  tasks: readonly RankTask[],
  { signal, tell }: AttentionBenchOptions,
  execArgv: readonly string[] = process.execArgv,
): Promise<readonly T[]> {
  const program = fileURLToPath(new URL('./rank.js', import.meta.url));
  const children = tasks.map((task) =>
    fork(program, [JSON.stringify(task)], { serialization: 'advanced', execArgv: [...execArgv] }),
  );
  const onAbort = (): void => {
    for (const child of children) child.kill('SIGKILL');
  };
  signal?.addEventListener('abort', onAbort, { once: true });
  try {
    return await Promise.all(
      children.map(
        (child, rank) =>
          new Promise<T>((resolve, reject) => {
            let times: T | undefined;
            child.on('message', (message) => {
              if (typeof message === 'string') tell?.(message);
              else times = message as T;
            });
            child.on('error', reject);
            child.on('exit', (code, by) => {
              if (code === 0 && times !== undefined) resolve(times);
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
  } finally {
    signal?.removeEventListener('abort', onAbort);
    onAbort();
  }
}

/** Milliseconds per repeat of MPI_Alltoallv with the same bytes per pair, or why it was not run. */
async function runAlltoallv(
  folder: string,
  ranks: number,
  bytesPerPair: number,
  repeats: number,
  signal: AbortSignal | undefined,
): Promise<readonly number[] | string> {
  const options = signal ? { signal } : {};
  try {
    await run('mpicc', ['--version'], options);
  } catch {
    return 'MPI_Alltoallv: mpicc was not found (Debian: apt-get install libopenmpi-dev openmpi-bin)';
  }
  const [source, binary] = [join(folder, 'alltoallv.c'), join(folder, 'alltoallv')];
  await writeFile(source, ALLTOALLV_SOURCE);
  await run('mpicc', ['-O3', '-o', binary, source], options);
  const { stdout } = await run(
    'mpirun',
    [
      '-n',
      `${ranks}`,
      '--oversubscribe',
      '--mca',
      'pml',
      'ob1',
      '--mca',
      'btl',
      'self,vader',
      binary,
      `${bytesPerPair}`,
      `${repeats}`,
    ],
    { ...options, env: { ...process.env, OMPI_ALLOW_RUN_AS_ROOT: '1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM: '1' } },
  );
  const times = stdout.trim().split('\n').map(Number);
  if (times.length !== repeats || times.some((time) => !(time > 0)))
    throw new Error(`MPI_Alltoallv printed ${JSON.stringify(stdout.slice(0, 200))}`);
  return times;
}

const STEP_RANKS = 4;
/** V8 compiles and collects garbage in threads of its own; where ranks outnumber cores these take a rank's core for a slice of milliseconds. */
const V8_WITHOUT_THREADS = ['--single-threaded', '--min-semi-space-size=64', '--max-semi-space-size=64'];

function percentilesOf(microseconds: Float64Array): Percentiles {
  const sorted = microseconds.toSorted();
  const at = (fraction: number) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * fraction))] ?? 0;
  return { count: sorted.length, p50: at(0.5), p99: at(0.99), slowest: at(1) };
}

function stallsOf(runs: readonly (readonly StepTimes[])[]): StallResult {
  const series = runs.flat().flatMap(({ stalls }) => (stalls === undefined ? [] : [stalls]));
  const all = Float64Array.from(series.flatMap((stalls) => Array.from(stalls, (nanoseconds) => nanoseconds / 1000)));
  return { cores: series.length / runs.length, shortest: SHORTEST_STALL_US, ...percentilesOf(all) };
}

async function runSteps(
  folder: string,
  options: AttentionBenchOptions,
): Promise<{ readonly steps: readonly StepResult[]; readonly stalls: StallResult }> {
  const stepCalls = 4000;
  const tasks = Array.from({ length: STEP_RANKS }, (_, rank) => ({
    rank,
    worldSize: STEP_RANKS,
    store: join(folder, 'step-store'),
    transport: options.transport,
    payloadBytes: 0,
    rowBytes: [],
    repeats: 0,
    stepCalls,
  }));
  const text = `${stepCalls} small steps, ${STEP_RANKS} ranks`;
  options.tell?.(text);
  const first = await runRanks<StepTimes>(tasks, options);
  const again = tasks.map((task) => ({ ...task, store: join(folder, 'step-store-without-threads') }));
  options.tell?.(`${text}, V8 without threads`);
  const quiet = await runRanks<StepTimes>(again, options, [...process.execArgv, ...V8_WITHOUT_THREADS]);
  const result = (from: StepResult['from'], times: Float64Array): StepResult => {
    const found = percentilesOf(times);
    const goals = (['p99', 'slowest'] as const).map((at) => ({
      at,
      microseconds: STEP_GOALS[at],
      met: found[at] <= STEP_GOALS[at],
    }));
    return { from, ranks: STEP_RANKS, bytesPerRank: first[0]!.bytes, ...found, goals };
  };
  return {
    steps: [
      result('native', first[0]!.native),
      result('JS', first[0]!.javascript),
      result('JS, V8 without threads', quiet[0]!.javascript),
    ],
    stalls: stallsOf([first, quiet]),
  };
}

function resultOf(
  rowBytes: number,
  perRank: readonly RankTimes[],
  mpi: readonly number[] | undefined,
): AttentionBenchResult {
  const bytesPerRank = perRank[0]!.bytes;
  const total = bytesPerRank * perRank.length;
  const times = (name: keyof RankTimes['series']) => slowestOf(perRank.map(({ series }) => series[name]));
  const [memcpy, nonTemporal, direct, staged, compat] = [
    times('memcpy'),
    times('nonTemporal'),
    times('direct'),
    times('staged'),
    times('compat'),
  ];
  const copy = medianOf(memcpy) < medianOf(nonTemporal) ? memcpy : nonTemporal;
  /** Times as fast as another: the median of the repeats, in each of which they took turns. */
  const over = (of: readonly number[], other: readonly number[]) => medianOf(of.map((ms, i) => other[i]! / ms));
  const alltoallv = mpi && seriesOf(mpi, total);
  return {
    rowBytes,
    bytesPerRank,
    copy: { memcpy: seriesOf(memcpy, total), nonTemporal: seriesOf(nonTemporal, total) },
    direct: seriesOf(direct, total),
    staged: seriesOf(staged, total),
    compat: seriesOf(compat, total),
    ...(alltoallv === undefined ? {} : { alltoallv }),
    ratios: {
      ofCopy: over(direct, copy),
      overStaged: over(direct, staged),
      overCompat: over(direct, compat),
      stagedOfBound: 3 * over(staged, copy),
      ...(alltoallv === undefined ? {} : { overAlltoallv: alltoallv.milliseconds / medianOf(direct) }),
    },
  };
}

export async function benchAttention(options: AttentionBenchOptions): Promise<AttentionBenchReport> {
  const { ranks = 2, payloadBytes = 96 << 20, rowBytes = [2048, 16384], repeats = 15 } = options;
  const folder = await mkdtemp(join(tmpdir(), 'ep-bench-'));
  try {
    const tasks = Array.from({ length: ranks }, (_, rank) => ({
      rank,
      worldSize: ranks,
      store: join(folder, 'store'),
      transport: options.transport,
      payloadBytes,
      rowBytes,
      repeats,
    }));
    const alltoallv = (bytesPerPair: number) => {
      options.tell?.(`MPI_Alltoallv, ${ranks} ranks`);
      return runAlltoallv(folder, ranks, bytesPerPair, repeats, options.signal);
    };
    // Before and after ours: Open MPI cannot take turns with us in one process, and the machine's speed drifts.
    const bytesPerPair = Math.floor(payloadBytes / ranks);
    const before = await alltoallv(bytesPerPair);
    const perRank = await runRanks<readonly RankTimes[]>(tasks, options);
    const after = await alltoallv(bytesPerPair);
    const skipped = typeof before === 'string' ? [before] : [];
    const mpi = typeof before === 'string' || typeof after === 'string' ? undefined : [...before, ...after];
    const results = rowBytes.map((size, i) =>
      resultOf(
        size,
        perRank.map((reports) => reports[i]!),
        mpi,
      ),
    );
    return { bench: 'attention', ranks, repeats, results, ...(await runSteps(folder, options)), skipped };
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}
