/** What a benchmark looks like to `ep bench`. Packages export a function with a report of their own from `./bench`; an adapter here gives it this form. */

/** What may be left out of a benchmark that has much to measure. */
export const benchFilters = ['ranks', 'sizes', 'ops'] as const;
export type BenchFilter = (typeof benchFilters)[number];

export interface BenchOptions {
  /** Measured runs of each case, after a warm-up; the benchmark's own choice unless given. */
  readonly repeats?: number;
  /** Small sizes that only show that it works: its figures mean nothing. */
  readonly quick: boolean;
  /** Only these numbers of ranks, bytes and operations; only for a benchmark that takes the filter. */
  readonly ranks?: readonly number[];
  readonly sizes?: readonly number[];
  readonly ops?: readonly string[];
}

/** A figure next to what it is measured against, in the same run. */
export interface BenchRatio {
  /** For example `of copy bandwidth` or `over MPI_Alltoallv`. */
  readonly name: string;
  readonly value: number;
  /** What the project promises for it; absent where nothing is promised. */
  readonly goal?: { readonly at: 'least' | 'most'; readonly value: number };
}

export interface BenchCase {
  readonly name: string;
  readonly unit: string;
  readonly median: number;
  /** (largest - smallest) / median over the samples; for latencies (p99 - median) / median. */
  readonly spread: number;
  readonly samples: number;
  readonly ratios: readonly BenchRatio[];
  /** Sizes, counts and further figures. */
  readonly detail: Readonly<Record<string, number | string>>;
}

/** Many cases side by side; the first row is the heading. */
export interface BenchTable {
  readonly title: string;
  readonly rows: readonly (readonly (string | number)[])[];
}

export interface BenchResult {
  readonly name: string;
  /** Every benchmark checks what it moved or computed; a wrong result throws instead of ending up here. */
  readonly cases: readonly BenchCase[];
  /** For people, instead of a paragraph for each case: of the cases only what has a goal is told beside them. */
  readonly tables?: readonly BenchTable[];
  /** Facts that are not figures. */
  readonly notes?: readonly string[];
  /** What was not measured, and why. */
  readonly skipped?: readonly string[];
}

export interface Bench {
  readonly name: string;
  /** None unless given. */
  readonly filters?: readonly BenchFilter[];
  /** Before anything runs: throws a `UsageError` for filters that name what it does not have. */
  readonly check?: (options: BenchOptions) => void;
  /** `tell` shows what is being measured, to people who wait. */
  run(options: BenchOptions, tell: (text: string) => void): Promise<BenchResult>;
}

/** Begins a line on stderr of a benchmark's process that says what is being measured. */
export const progressMark = 'measuring: ';

export function meetsGoal({ value, goal }: BenchRatio): boolean | undefined {
  if (goal === undefined) return undefined;
  return goal.at === 'least' ? value >= goal.value : value <= goal.value;
}
