/** The collectives' own benchmark in the form that `ep bench` prints. */
import type {
  BenchOp,
  benchCollectives,
  CollectivesBenchReport,
  CollectivesBenchResult,
  wrongOption,
} from '@ep/collectives/bench';
import { misused } from '../failure.js';
import type { Bench, BenchCase, BenchOptions, BenchRatio, BenchResult, BenchTable } from './bench.js';

type Module = {
  readonly benchCollectives: typeof benchCollectives;
  readonly wrongOption: typeof wrongOption;
  readonly sizeText: (bytes: number) => string;
};

export function collectivesBench(module: Module): Bench {
  return {
    name: 'collectives',
    filters: ['ranks', 'sizes', 'ops'],
    check: (options) => {
      const wrong = module.wrongOption(options);
      if (wrong !== undefined) throw misused(`--${wrong.option}`, { where: 'bench collectives', ...wrong });
    },
    run: async ({ ops, ...options }: BenchOptions, tell): Promise<BenchResult> => {
      const report = await module.benchCollectives({
        ...options,
        ...(ops && { ops: ops as readonly BenchOp[] }),
        onProgress: tell,
      });
      return collectivesResult(report, module.sizeText);
    },
  };
}

/** For tests, too: from a report to tables and cases. */
export function collectivesResult(report: CollectivesBenchReport, sizeText: Module['sizeText']): BenchResult {
  const nameOf = ({ op, bytes, ranks }: CollectivesBenchResult): string =>
    `${op}${op === 'barrier' ? '' : ` of ${sizeText(bytes)}`}, ${ranks} ranks`;
  return {
    name: 'collectives',
    cases: report.results.map((result) => caseOf(result, nameOf(result))),
    tables: tablesOf(report.results, sizeText),
    notes: [
      `beside us: ${report.peers.length === 0 ? 'nobody' : report.peers.join(', ')}; ${report.usableCores} usable cores; every result was compared`,
      ...report.results.flatMap((result) => {
        const { native, exchange } = result.series;
        if (native === undefined || exchange === undefined) return [];
        const [took, least] = [native.p50, exchange.p50].map((us) => us.toFixed(3));
        return [
          `${nameOf(result)}: ${took} us in a native loop, beside ${least} us of a bare exchange between the same ranks`,
        ];
      }),
      ...report.bitwise.map(
        ({ ranks, elements, runs }) =>
          `sums of ${elements.join(', ')} f32 bitwise equal on ${ranks} ranks, in group memory and typed arrays, in ${runs} runs each`,
      ),
    ],
    skipped: report.skipped,
  };
}

function caseOf({ bytes, ranks, series, figures }: CollectivesBenchResult, name: string): BenchCase {
  const group = series.group!;
  const detail: Record<string, number> = { bytes, ranks, 'calls in a row': group.calls };
  for (const [contender, of] of Object.entries(series)) {
    detail[`${contender} p50 us`] = of.p50;
    detail[`${contender} p99 us`] = of.p99;
  }
  return {
    name,
    unit: 'us',
    median: group.p50,
    spread: group.spread,
    samples: group.samples,
    ratios: figures.map(
      ({ text, value, goal }): BenchRatio => ({
        name: text,
        value,
        ...(goal && { goal: { at: goal.at, value: goal.value } }),
      }),
    ),
    detail,
  };
}

/** One for each number of ranks: rows of sizes by operation, microseconds and how many times as fast we are. */
function tablesOf(results: readonly CollectivesBenchResult[], sizeText: Module['sizeText']): readonly BenchTable[] {
  const absent = '-';
  return [...new Set(results.map(({ ranks }) => ranks))].map((ranks) => ({
    title: `${ranks} ranks: us of a call at p50, and times as fast as`,
    rows: [
      ['', 'group', 'p99', 'typed', 'bf16', 'Open MPI', 'Gloo', 'x Open MPI', 'typed x', 'x Gloo', 'typed x', 'GB/s'],
      ...results
        .filter((result) => result.ranks === ranks)
        .map(({ op, bytes, series, figures }) => {
          const ratio = (name: string): string | number => figures.find((one) => one.name === name)?.value ?? absent;
          const time = (name: keyof typeof series): string | number => series[name]?.p50 ?? absent;
          return [
            op === 'barrier' ? op : `${op} ${sizeText(bytes)}`,
            time('group'),
            series.group!.p99,
            time('typed'),
            time('bf16'),
            time('Open MPI'),
            time('Gloo'),
            ratio('group over Open MPI'),
            ratio('typed over Open MPI'),
            ratio('group over Gloo'),
            ratio('typed over Gloo'),
            op === 'barrier' ? absent : bytes / series.group!.p50 / 1000,
          ];
        }),
    ],
  }));
}
