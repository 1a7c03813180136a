/**
 * Collectives of CPU ranks on one machine against Open MPI, Gloo and the machine's own copies: same values, same sizes, same run, in turns. Every contender's ranks
 * are processes, and every result is compared element by element.
 */
import { mkdir, mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { invalid } from '@ep/core';
import { native } from '@ep/native';
import {
  ALL_SIZES,
  type BenchCase,
  chooseCases,
  ourTargets,
  peerTarget,
  QUICK_SIZES,
  type SeriesName,
  sizeText,
} from './cases.js';
import type { Contender } from './contender.js';
import { FIGURE_TEXT, type FigureName, type Goal, goalOf, isMet } from './goals.js';
import { startOurs } from './ours.js';
import { MOST_RANKS } from './pattern.js';
import { type Found, findGloo, findOpenMpi, type Peer } from './peers.js';
import { BENCH_OPS, type BenchOp } from './protocol.js';
import { type Series, seriesOf, type Turns, timesAsFast } from './series.js';
import { type Player, race } from './turns.js';

export { coresFor } from './ours.js';
export { BENCH_OPS, type BenchOp, type Series, type SeriesName, sizeText };

export interface CollectivesBenchOptions {
  /** Powers of two up to 16; 2 and 4 unless given. */
  readonly ranks?: readonly number[];
  /** Bytes of the larger buffer of a rank; 8 B to 256 MB unless given. */
  readonly sizes?: readonly number[];
  readonly ops?: readonly BenchOp[];
  /** Turns of each contender; 7 unless given, fewer where they take long. */
  readonly repeats?: number;
  /** Few sizes and short turns: shows that it works. */
  readonly quick?: boolean;
  /** Told what is measured next. */
  readonly onProgress?: (text: string) => void;
  readonly signal?: AbortSignal;
}

export interface CollectivesFigure {
  readonly name: FigureName;
  readonly text: string;
  readonly value: number;
  readonly goal?: Goal & { readonly met: boolean };
}

export interface CollectivesBenchResult {
  readonly op: BenchOp;
  readonly ranks: number;
  /** Of the larger buffer of a rank, as f32 (bf16: as many elements); 0 for a barrier. */
  readonly bytes: number;
  readonly series: Readonly<Partial<Record<SeriesName, Series>>>;
  readonly figures: readonly CollectivesFigure[];
}

export interface CollectivesBenchReport {
  readonly bench: 'collectives';
  /** By affinity and quota. */
  readonly usableCores: number;
  /** Who was measured beside us, for example `Open MPI 4.1.4`. */
  readonly peers: readonly string[];
  readonly results: readonly CollectivesBenchResult[];
  /** Sums of numbers that depend on the order, found bitwise equal: on all ranks, in both kinds of memory, in every run, in calls of these lengths. */
  readonly bitwise: readonly { readonly ranks: number; readonly elements: readonly number[]; readonly runs: number }[];
  /** What was not measured, and why. */
  readonly skipped: readonly string[];
}

const TIMEOUT_MS = 120_000;
const BUDGET = { turns: 7, turnMs: 40, caseMs: 12_000 } as const;
const QUICK_BUDGET = { turns: 2, turnMs: 4, caseMs: 500 } as const;

/** Throws when a result is wrong, and when a contender fails. */
export async function benchCollectives(options: CollectivesBenchOptions = {}): Promise<CollectivesBenchReport> {
  const { quick = false, ranks = [2, 4], ops = BENCH_OPS, sizes = quick ? QUICK_SIZES : ALL_SIZES, signal } = options;
  const wrong = wrongOption({ ranks, sizes, ops });
  if (wrong !== undefined) throw invalid(wrong.option, { where: 'benchCollectives', ...wrong });
  const folder = await mkdtemp(join(tmpdir(), 'ep-bench-'));
  try {
    const found = [await findOpenMpi(folder), await findGloo()];
    const peers = found.filter((one): one is Peer => 'start' in one);
    const skipped = found.flatMap((one: Found) => ('unavailable' in one ? [`${one.name}: ${one.unavailable}`] : []));
    const { usableCores, allocatable } = native().binding.hostFacts();
    const budget = { ...(quick ? QUICK_BUDGET : BUDGET), ...(options.repeats && { turns: options.repeats }) };
    const results: CollectivesBenchResult[] = [];
    const bitwise: CollectivesBenchReport['bitwise'][number][] = [];
    for (const size of ranks) {
      const place = join(folder, `${size}`);
      await mkdir(place);
      const choice = chooseCases(size, { ops, sizes }, allocatable ?? Number.POSITIVE_INFINITY);
      skipped.push(...choice.skipped);
      const mostBytes = Math.max(BITWISE_MOST * 4, ...choice.cases.map(({ bytes }) => bytes));
      const start = { folder: place, ranks: size, mostBytes, usableCores, timeoutMs: TIMEOUT_MS, signal };
      await withContenders([startOurs, ...peers.map((peer) => peer.start)], start, async ([ours, ...others]) => {
        if (ops.includes('all-reduce')) bitwise.push(await checkBitwise(ours!));
        for (const one of choice.cases) {
          options.onProgress?.(`${size} ranks, ${one.op}${one.bytes === 0 ? '' : ` of ${sizeText(one.bytes)}`}`);
          const { times, unsupported } = await race(playersOf(one, ours!, others), budget);
          skipped.push(...unsupported);
          results.push(resultOf(one, size, usableCores, times));
        }
      });
    }
    const named = peers.map(({ name, version }) => `${name} ${version}`);
    return { bench: 'collectives', usableCores, peers: named, results, bitwise, skipped };
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

export interface WrongOption {
  readonly option: 'ops' | 'ranks' | 'sizes';
  readonly expected: string;
  readonly found: number | string;
}

/** The first of these options that `benchCollectives` refuses. */
export function wrongOption(options: {
  readonly ranks?: readonly number[];
  readonly sizes?: readonly number[];
  readonly ops?: readonly string[];
}): WrongOption | undefined {
  const { ranks = [], sizes = [], ops = [] } = options;
  for (const found of ops) {
    if (!(BENCH_OPS as readonly string[]).includes(found)) {
      return { option: 'ops', expected: `one of ${BENCH_OPS.join(', ')}`, found };
    }
  }
  for (const found of ranks) {
    if (found < 2 || found > MOST_RANKS || !Number.isInteger(Math.log2(found))) {
      return { option: 'ranks', expected: `a power of two from 2 to ${MOST_RANKS}`, found };
    }
  }
  for (const found of sizes) {
    if (!Number.isSafeInteger(found) || found < 4 || found % 4 !== 0 || found > 2 ** 31) {
      return { option: 'sizes', expected: 'multiples of 4 bytes up to 2 GB', found };
    }
  }
  return undefined;
}

async function withContenders<O>(
  starts: readonly ((options: O) => Promise<Contender>)[],
  options: O,
  body: (contenders: readonly Contender[]) => Promise<void>,
): Promise<void> {
  const contenders: Contender[] = [];
  try {
    for (const start of starts) contenders.push(await start(options));
    await body(contenders);
    for (const contender of contenders) await contender.close();
  } catch (error) {
    for (const contender of contenders) await contender.stop();
    throw error;
  }
}

function playersOf(one: BenchCase, ours: Contender, others: readonly Contender[]): readonly Player<SeriesName>[] {
  return [
    ...ourTargets(one).map(([name, target]) => ({ name, contender: ours, target })),
    ...others.map((contender) => ({ name: contender.name as SeriesName, contender, target: peerTarget(one) })),
  ];
}

export function resultOf(
  one: BenchCase,
  ranks: number,
  usableCores: number,
  times: ReadonlyMap<SeriesName, { readonly turns: Turns; readonly calls: number }>,
): CollectivesBenchResult {
  const series: Partial<Record<SeriesName, Series>> = {};
  for (const [name, { turns, calls }] of times) series[name] = seriesOf(turns, calls);
  const figures: CollectivesFigure[] = [];
  const add = (name: FigureName, value: number | undefined): void => {
    if (value === undefined) return;
    const goal = goalOf(name, { ...one, ranks, usableCores });
    figures.push({
      name,
      text: FIGURE_TEXT[name],
      value,
      ...(goal && { goal: { ...goal, met: isMet(goal, value) } }),
    });
  };
  const over = (ours: SeriesName, other: SeriesName): number | undefined => {
    const [a, b] = [times.get(ours), times.get(other)];
    return a && b && timesAsFast(a.turns, b.turns);
  };
  for (const peer of ['Open MPI', 'Gloo'] as const) {
    for (const memory of ['group', 'typed'] as const) add(`${memory} over ${peer}`, over(memory, peer));
  }
  const copy = (series.copy?.p50 ?? 0) < (series['copy-non-temporal']?.p50 ?? 0) ? 'copy' : 'copy-non-temporal';
  // All ranks copy at the same time, each as many bytes as it reduces: their time is P S / C.
  add('group of the bound', over('group', copy));
  add('bf16 over f32', over('bf16', 'group'));
  add('native us', series.native?.p50);
  add('exchange us', series.exchange?.p50);
  add('inline us', series.awaited && series.group?.p50);
  add('awaited us', series.awaited?.p50);
  return { ...one, ranks, series, figures };
}

/** Lengths for which one call is cut in other ways than for the next; the first elements are the same in all. */
const BITWISE_ELEMENTS = [1000, 70_001, 262_147] as const;
const BITWISE_MOST = Math.max(...BITWISE_ELEMENTS);
const BITWISE_RUNS = 2;

/** Throws when two sums of the same numbers differ. */
async function checkBitwise(ours: Contender): Promise<CollectivesBenchReport['bitwise'][number]> {
  const first = new Set<string>();
  for (const elements of BITWISE_ELEMENTS) {
    const all = new Set<string>();
    for (let run = 0; run < BITWISE_RUNS; run++) {
      for (const variant of ['group', 'typed'] as const) {
        const answers = await ours.ask({ verb: 'bitwise', variant, op: 'all-reduce', dtype: 'f32', elements });
        for (const [start, whole] of answers) {
          first.add(start!);
          all.add(whole!);
        }
      }
    }
    if (all.size === 1 && first.size === 1) continue;
    throw new Error(
      `all-reduce of ${elements} elements on ${ours.ranks} ranks: ${all.size} different results, and ${first.size} of the first elements of all lengths`,
    );
  }
  return { ranks: ours.ranks, elements: BITWISE_ELEMENTS, runs: BITWISE_RUNS };
}
