/** The benchmark of puts over EFA's GIN facade, in the form that `ep bench` prints. */
import type { benchEfa, EfaBenchReport, PutCost, PutSeries } from '@ep/efa-gda/bench';
import type { Bench, BenchCase, BenchOptions, BenchResult, BenchTable } from './bench.js';
import { medianOf } from './ibgda.js';

const quickPuts = 20_000;

/** What one poster gains over the lock; doorbells of each put in runs of eight. */
const goals = { overLock: 1.2, doorbells: 1 / 8 } as const;

export function efaBench(module: { readonly benchEfa: typeof benchEfa }): Bench {
  return {
    name: 'efa',
    run: async ({ quick, repeats }: BenchOptions, tell): Promise<BenchResult> => {
      const size = quick ? { puts: quickPuts, repeats: 2 } : {};
      return efaResult(await module.benchEfa({ ...size, ...(repeats === undefined ? {} : { repeats }), tell }));
    },
  };
}

const millions = (perSecond: number): number => perSecond / 1e6;

/** For tests, too: from a report to tables and cases. */
export function efaResult(report: EfaBenchReport): BenchResult {
  return {
    name: 'efa',
    cases: [...report.puts.map((one) => putCase(one, lockOf(report, one))), ...report.costs.map(costCase)],
    tables: [putTable(report), costTable(report)],
    notes: [
      'whoever waits for room writes the completions of both protocols; ours takes them out, checks ranges and keeps what an error report needs, which the lock does not',
      'instructions of a put are counted in CI (node native/tests/device/post_instructions.mjs), against a committed baseline; upstream counted 2272, then 584 of a put on a GPU (sm_90): a reference for the design, of other code on another machine',
      'ratios of two posters promise nothing: on few cores an unfair lock stays in one cache; no figure here is one of EFA',
    ],
  };
}

function lockOf(report: EfaBenchReport, { posters, run }: PutSeries): PutSeries {
  return report.puts.find((one) => one.way === 'lock' && one.posters === posters && one.run === run)!;
}

function putCase(one: PutSeries, lock: PutSeries): BenchCase {
  const { samples, posters, run, way, sharing } = one;
  const promised = posters === 1 && run === 1 && way === 'lock-free' && sharing === 'device';
  const median = medianOf(samples);
  const goal = promised ? { goal: { at: 'least' as const, value: goals.overLock } } : {};
  return {
    name: `${way}, shared by ${sharing}, ${posters} posters, runs of ${run}`,
    unit: 'M puts/s',
    median: millions(median),
    spread: (Math.max(...samples) - Math.min(...samples)) / median,
    samples: samples.length,
    ratios: one === lock ? [] : [{ name: 'times the lock', value: median / medianOf(lock.samples), ...goal }],
    detail: { posters, run },
  };
}

function costCase({ way, sharing, run, puts, doorbells, words, registerFences, systemFences }: PutCost): BenchCase {
  const promised = run === 8 && way === 'lock-free';
  const goal = promised ? { goal: { at: 'most' as const, value: goals.doorbells } } : {};
  const each = doorbells / puts;
  return {
    name: `${way}, shared by ${sharing}, doorbells in runs of ${run}`,
    unit: 'a put',
    median: each,
    spread: 0,
    samples: 1,
    ratios: promised ? [{ name: 'doorbells of each put', value: each, ...goal }] : [],
    detail: { words: words / puts, registerFences: registerFences / puts, systemFences: systemFences / puts },
  };
}

/** A row for each way, a column for each number of posters and length of a run. */
function putTable(report: EfaBenchReport): BenchTable {
  const column = ({ posters, run }: PutSeries): string => `${posters} x ${run}`;
  const row = ({ way, sharing }: PutSeries): string => `${way}, ${sharing}`;
  const columns = [...new Set(report.puts.map(column))];
  const rows = [...new Set(report.puts.map(row))].map((name) => {
    const cells = columns.map((at) => {
      const one = report.puts.find((other) => row(other) === name && column(other) === at)!;
      const rate = medianOf(one.samples);
      return `${millions(rate).toPrecision(3)} (${(rate / medianOf(lockOf(report, one).samples)).toFixed(2)})`;
    });
    return [name, ...cells];
  });
  const title = 'million puts a second while nobody executes them, and times the lock; posters x puts of a run';
  return { title, rows: [['way, sharing', ...columns], ...rows] };
}

function costTable({ costs }: EfaBenchReport): BenchTable {
  const each = (count: number, { puts }: PutCost): string => (count / puts).toPrecision(3);
  return {
    title: 'of each put, by one poster',
    rows: [
      ['way, sharing, run', 'doorbells', 'words of 8 bytes', 'fences of registers', 'fences of the system'],
      ...costs.map((one) => [
        `${one.way}, ${one.sharing}, ${one.run}`,
        each(one.doorbells, one),
        each(one.words, one),
        each(one.registerFences, one),
        each(one.systemFences, one),
      ]),
    ],
  };
}
