/**
 * `ep bench moe`: dispatch and combine over shared memory against the machine's own copy of the same bytes, the same exchange by our own `allToAllSingle`, and
 * by MPI_Alltoallv with the packing that it needs; one run, contenders in turns, results verified. And over software NICs against that copy: figures of an emulator.
 */
import { execFile } from 'node:child_process';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { native } from '@ep/native';
import { rankTopk } from '@ep/plan/moe';
import type { Bench, BenchCase, BenchOptions, BenchRatio, BenchResult } from '../bench/bench.js';
import { formatBytes } from '../doctor/machine.js';
import { MPI_MOE_SOURCE } from './alltoallv.js';
import { bytesOf, planShape, shapesOf, shapeText } from './shapes.js';
import type { MoeShape, MoeTask, MoeTimes } from './task.js';

/** Built beside the entry point; see tsup.config.ts. */
const rankProgram = new URL('./bench-moe-rank.js', import.meta.url);

const run = promisify(execFile);

const medianOf = (values: readonly number[]): number =>
  values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)]!;

/** By repeat, milliseconds of the slowest rank. */
const slowestOf = (perRank: readonly MoeTimes[], name: string): number[] =>
  perRank[0]!.series[name]!.map((_, i) => Math.max(...perRank.map(({ series }) => series[name]![i]!)));

/** Over shared memory ranks have a core each where there are enough, as mpirun gives its own; an emulated NIC has threads besides. */
async function runRanks(shape: MoeShape, folder: string): Promise<MoeTimes[]> {
  const store = join(folder, `store-${shape.transport}-${shape.mode}-${shape.worldSize}-${shape.tokens}`);
  // No other command pays for it.
  const { coresFor } = await import('@ep/collectives/bench');
  const { usableCores } = native().binding.hostFacts();
  const cores =
    shape.transport === 'shm' && shape.worldSize <= usableCores
      ? coresFor({ ranks: shape.worldSize, usableCores })
      : undefined;
  return Promise.all(
    Array.from({ length: shape.worldSize }, async (_, rank) => {
      const task: MoeTask = { ...shape, rank, store };
      const node = [process.execPath, fileURLToPath(rankProgram), JSON.stringify(task)];
      const [command, ...args] = cores === undefined ? node : ['taskset', '-c', `${cores[rank]}`, ...node];
      const { stdout } = await run(command!, args, { maxBuffer: 2 ** 28 });
      return JSON.parse(stdout) as MoeTimes;
    }),
  );
}

/** Milliseconds of dispatch and of combine by repeat, or why they were not measured. */
async function runMpi(shape: MoeShape, folder: string): Promise<{ there: number[]; back: number[] } | string> {
  try {
    await run('mpicc', ['--version']);
  } catch {
    return 'MPI_Alltoallv: mpicc was not found (Debian: apt-get install libopenmpi-dev openmpi-bin)';
  }
  const { worldSize, tokens, hidden, experts, topK, repeats } = shape;
  const { routing } = planShape(shape);
  const [source, binary, choices] = ['moe.c', 'moe', 'choices'].map((name) => join(folder, name)) as [
    string,
    string,
    string,
  ];
  await writeFile(source, MPI_MOE_SOURCE);
  await writeFile(
    choices,
    Buffer.concat(Array.from({ length: worldSize }, (_, rank) => Buffer.from(rankTopk(routing, rank).slice().buffer))),
  );
  await run('mpicc', ['-O3', '-march=native', '-o', binary, source]);
  const transport = ['--oversubscribe', '--mca', 'pml', 'ob1', '--mca', 'btl', 'self,vader'];
  const numbers = [tokens, hidden, experts, topK, repeats].map(String);
  const { stdout } = await run('mpirun', ['-n', String(worldSize), ...transport, binary, choices, ...numbers], {
    env: { ...process.env, OMPI_ALLOW_RUN_AS_ROOT: '1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM: '1' },
  });
  const lines = stdout
    .trim()
    .split('\n')
    .map((line) => line.split(' ').map(Number));
  if (lines.length !== repeats || lines.some(([a, b]) => !(a! > 0 && b! > 0))) {
    throw new Error(`MPI_Alltoallv printed ${JSON.stringify(stdout.slice(0, 200))}`);
  }
  return { there: lines.map(([a]) => a!), back: lines.map(([, b]) => b!) };
}

/** What one shape came to, for tests, too. */
export function casesOf(
  shape: MoeShape,
  perRank: readonly MoeTimes[],
  mpi: { there: number[]; back: number[] } | undefined,
): BenchCase[] {
  const { transport, mode, worldSize, tokens, hidden, repeats } = shape;
  const stores = transport === 'shm';
  const large = mode === 'high-throughput';
  const copies = [slowestOf(perRank, 'copy'), slowestOf(perRank, 'copy past the caches')];
  const copy = medianOf(copies[0]!) < medianOf(copies[1]!) ? copies[0]! : copies[1]!;
  /** Times as fast as another: the median of the repeats, in each of which they took turns. */
  const over = (of: readonly number[], other: readonly number[]): number => medianOf(of.map((ms, i) => other[i]! / ms));
  const bytes = perRank.reduce((sum, { rows }) => sum + rows * hidden * 2, 0);
  const bf16 = slowestOf(perRank, 'bf16 dispatch');
  return Object.keys(perRank[0]!.series)
    .filter((name) => /^(bf16|fp8) /.test(name))
    .map((name): BenchCase => {
      const times = slowestOf(perRank, name);
      const direction = name.endsWith('combine') ? 'combine' : 'dispatch';
      const theirs = mpi && (direction === 'combine' ? mpi.back : mpi.there);
      const plain = name.startsWith('bf16');
      const ratios: BenchRatio[] = plain
        ? [
            {
              name: 'of the copy bandwidth of the same threads',
              value: over(times, copy),
              ...(stores && large && worldSize === 2 ? { goal: { at: 'least', value: 0.75 } as const } : {}),
            },
            ...(stores
              ? [
                  {
                    name: 'times the same by allToAllSingle',
                    value: over(times, slowestOf(perRank, `allToAllSingle ${direction}`)),
                  },
                ]
              : []),
            ...(theirs === undefined
              ? []
              : [
                  {
                    name: 'times MPI_Alltoallv with its packing',
                    value: medianOf(theirs) / medianOf(times),
                    ...(large && worldSize === 2 ? { goal: { at: 'least', value: 2 } as const } : {}),
                  },
                ]),
          ]
        : [
            {
              name: 'times what bf16 takes',
              value: 1 / over(times, bf16),
              ...(stores ? { goal: { at: 'most', value: large ? 2 : 1 } as const } : {}),
            },
          ];
      const median = medianOf(times);
      return {
        name: `${mode} ${name} of ${tokens} tokens of ${hidden} channels per rank, top-${shape.topK} of ${shape.experts}, ${worldSize} ranks${stores ? '' : `, over ${transport}:soft (an emulator's figure)`}`,
        unit: 'ms',
        median,
        spread: (Math.max(...times) - Math.min(...times)) / median,
        samples: repeats,
        ratios,
        detail: { 'logical GB/s in bf16': bytes / median / 1e6, 'copy GB/s': bytes / medianOf(copy) / 1e6 },
      };
    });
}

function stepCases(shape: MoeShape, perRank: readonly MoeTimes[]): BenchCase[] {
  const { steps, stepsInPlace } = perRank[0]!;
  return [
    { how: '', samples: steps },
    { how: 'zero-copy ', samples: stepsInPlace },
  ].flatMap(({ how, samples }): BenchCase[] => {
    if (samples === undefined) return [];
    const sorted = samples.toSorted((a, b) => a - b);
    const at = (fraction: number): number =>
      sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * fraction))]! / 1000;
    return [
      {
        name: `dispatch and ${how}combine of one token per rank in a native loop, ${shape.worldSize} ranks`,
        unit: 'us',
        median: at(0.5),
        spread: (at(0.99) - at(0.5)) / at(0.5),
        samples: sorted.length,
        ratios: [{ name: 'us at p50', value: at(0.5), goal: { at: 'most', value: 15 } }],
        detail: { 'p99 us': at(0.99) },
      },
    ];
  });
}

/** Why a shape is not measured where so many bytes may be allocated (null: nobody knows); nothing if it is. */
export function tooLargeFor(shape: MoeShape, allocatable: number | null): string | undefined {
  const needed = bytesOf(shape);
  if (allocatable === null || needed <= allocatable) return undefined;
  return `${shapeText(shape)}: its ranks need ${formatBytes(needed)}, ${formatBytes(allocatable)} may be allocated`;
}

export const moeBench: Bench = {
  name: 'moe',
  filters: ['ranks'],
  run: async (options: BenchOptions, tell): Promise<BenchResult> => {
    const folder = await mkdtemp(join(tmpdir(), 'ep-bench-moe-'));
    const cases: BenchCase[] = [];
    const skipped = new Set<string>();
    try {
      for (const shape of shapesOf(options)) {
        const tooLarge = tooLargeFor(shape, native().binding.hostFacts().allocatable);
        if (tooLarge !== undefined) {
          skipped.add(tooLarge);
          continue;
        }
        tell(shapeText(shape));
        const mpi = shape.transport === 'shm' ? await runMpi(shape, folder) : undefined;
        if (typeof mpi === 'string') skipped.add(mpi);
        const perRank = await runRanks(shape, folder);
        cases.push(...casesOf(shape, perRank, typeof mpi === 'string' ? undefined : mpi), ...stepCases(shape, perRank));
      }
    } finally {
      await rm(folder, { recursive: true, force: true });
    }
    return {
      name: 'moe',
      cases,
      notes: [
        'logical bytes: two for each channel of every choice, own rank included',
        'after every repeat of every case, warm-ups included, all channels of all rows, the scales of e4m3, and what is said about rows were compared with the plan and the cast oracle; no call of a buffer had the rows of the one before it; so was the result of each step of the native loop',
        'over a software NIC: what an emulator of the NIC does with the cores that the ranks run on, and nothing of what a network would',
        'zero-copy combine: experts have written their results where their sources read them (zeroCopyCombine); the other has them sent',
        'ranks over shared memory have a core each where there are as many, as those of Open MPI do',
        'allToAllSingle packs and orders rows in JS; its combine is timed without the sum, ours and that of MPI_Alltoallv with it',
      ],
      skipped: [...skipped],
    };
  },
};
