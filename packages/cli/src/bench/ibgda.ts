/** The benchmark of posting to queue pairs, and of the software NIC, in the form that `ep bench` prints. */
import type { benchIbgda, IbgdaBenchReport, PostSeries } from '@ep/ibgda/bench';
import type { Bench, BenchCase, BenchOptions, BenchResult, BenchTable } from './bench.js';

const quickPosts = 20_000;

/** What one poster gains over the lock; what the emulator executes each second; its part of what a thread copies. */
const goals = { overLock: 1.2, requests: 2e6, ofCopy: 0.7 } as const;

export function ibgdaBench(module: { readonly benchIbgda: typeof benchIbgda }): Bench {
  return {
    name: 'ibgda',
    run: async ({ quick, repeats }: BenchOptions, tell): Promise<BenchResult> => {
      const size = quick ? { posts: quickPosts, repeats: 2 } : {};
      return ibgdaResult(await module.benchIbgda({ ...size, ...(repeats === undefined ? {} : { repeats }), tell }));
    },
  };
}

export function medianOf(samples: readonly number[]): number {
  const sorted = [...samples].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

const spreadOf = (samples: readonly number[]): number =>
  (Math.max(...samples) - Math.min(...samples)) / medianOf(samples);

const millions = (perSecond: number): number => perSecond / 1e6;

/** For tests, too: from a report to tables and cases. */
export function ibgdaResult(report: IbgdaBenchReport): BenchResult {
  return {
    name: 'ibgda',
    cases: [...report.posts.map((one) => postCase(one, lockOf(report, one))), ...nicCases(report)],
    tables: [...[false, true].map((executed) => postTable(report, executed)), nicTable(report)],
    notes: [
      'instructions of a post are counted in CI (node native/tests/device/post_instructions.mjs), against a committed baseline',
      'the software NIC is an emulator: its figures say nothing of a network',
      'ratios of two posters promise nothing: on few cores an unfair lock stays in one cache; posting on a GPU is measured by native/tests/cuda',
    ],
  };
}

function lockOf(report: IbgdaBenchReport, { posters, batch, executed }: PostSeries): PostSeries {
  return report.posts.find(
    (one) => one.way === 'lock' && one.posters === posters && one.batch === batch && one.executed === executed,
  )!;
}

const nameOf = ({ way, sharing, posters, batch, executed }: PostSeries): string =>
  `${way}, shared by ${sharing}, ${posters} posters, batch ${batch}${executed ? ', executed' : ''}`;

function postCase(one: PostSeries, lock: PostSeries): BenchCase {
  const { samples, posters, executed, way, sharing } = one;
  const promised = posters === 1 && !executed && way === 'in-turn' && sharing === 'device';
  const value = medianOf(samples) / medianOf(lock.samples);
  const goal = promised ? { goal: { at: 'least' as const, value: goals.overLock } } : {};
  return {
    name: nameOf(one),
    unit: 'M posts/s',
    median: millions(medianOf(samples)),
    spread: spreadOf(samples),
    samples: samples.length,
    ratios: one === lock ? [] : [{ name: 'times the lock', value, ...goal }],
    detail: { posters, batch: one.batch },
  };
}

/** A row for each way, a column for each number of posters and batch. */
function postTable(report: IbgdaBenchReport, executed: boolean): BenchTable {
  const series = report.posts.filter((one) => one.executed === executed);
  const column = ({ posters, batch }: PostSeries): string => `${posters} x ${batch}`;
  const row = ({ way, sharing }: PostSeries): string => `${way}, ${sharing}`;
  const columns = [...new Set(series.map(column))];
  const rows = [...new Set(series.map(row))].map((name) => {
    const cells = columns.map((at) => {
      const one = series.find((other) => row(other) === name && column(other) === at)!;
      const rate = medianOf(one.samples);
      const ratio = rate / medianOf(lockOf(report, one).samples);
      return `${millions(rate).toPrecision(3)} (${ratio.toFixed(2)})`;
    });
    return [name, ...cells];
  });
  const where = executed ? 'while the software NIC executes them' : 'while nobody executes them';
  return {
    title: `million posts a second ${where}, and times the lock; posters x batch`,
    rows: [['way, sharing', ...columns], ...rows],
  };
}

function nicCases({ nic }: IbgdaBenchReport): BenchCase[] {
  const requests = nic.requests.map(({ batch, samples }): BenchCase => {
    const value = medianOf(samples);
    const goal = batch === 1 ? {} : { goal: { at: 'least' as const, value: goals.requests / 1e6 } };
    return {
      name: `software NIC, 8-byte inline writes, ${batch} a doorbell`,
      unit: 'M requests/s',
      median: millions(value),
      spread: spreadOf(samples),
      samples: samples.length,
      ratios: [{ name: 'million requests a second', value: millions(value), ...goal }],
      detail: { batch },
    };
  });
  const ofCopy = medianOf(nic.written) / medianOf(nic.copied);
  const large: BenchCase = {
    name: 'software NIC, 64 KiB writes',
    unit: 'GB/s',
    median: medianOf(nic.written) / 1e9,
    spread: spreadOf(nic.written),
    samples: nic.written.length,
    ratios: [{ name: 'of copy bandwidth of one thread', value: ofCopy, goal: { at: 'least', value: goals.ofCopy } }],
    detail: { copied: medianOf(nic.copied) / 1e9 },
  };
  return [...requests, large];
}

function nicTable({ nic }: IbgdaBenchReport): BenchTable {
  return {
    title: 'the software NIC, in time of its thread',
    rows: [
      ['what', 'each second'],
      ...nic.requests.map(({ batch, samples }) => [
        `8-byte inline writes, ${batch} a doorbell`,
        `${millions(medianOf(samples)).toPrecision(3)} M`,
      ]),
      ['64 KiB writes', `${(medianOf(nic.written) / 1e9).toPrecision(3)} GB`],
      ['copies of one thread', `${(medianOf(nic.copied) / 1e9).toPrecision(3)} GB`],
    ],
  };
}
