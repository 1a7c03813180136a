/** From what ranks measured to what is reported. */

/** Microseconds of one call. */
export interface Series {
  readonly p50: number;
  /** Where calls were timed in rows, of the means of these rows. */
  readonly p99: number;
  readonly mean: number;
  /** (largest - smallest) / median of the turns' medians. */
  readonly spread: number;
  readonly samples: number;
  /** Calls in a row that are one sample: a clock read for each call would be a good part of a small one. */
  readonly calls: number;
}

/** Microseconds of a call by turn and sample. */
export type Turns = readonly (readonly number[])[];

export function medianOf(values: readonly number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] ?? Number.NaN;
}

/** Nanoseconds of a row by rank and sample become microseconds of a call of the slowest rank. */
export function slowest(perRank: readonly (readonly number[])[], calls: number): readonly number[] {
  return perRank[0]!.map((_, i) => Math.max(...perRank.map((of) => of[i]!)) / calls / 1000);
}

export function seriesOf(turns: Turns, calls: number): Series {
  const sorted = turns.flat().sort((a, b) => a - b);
  const at = (fraction: number): number => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * fraction))]!;
  const medians = turns.map(medianOf);
  return {
    p50: at(0.5),
    p99: at(0.99),
    mean: sorted.reduce((sum, value) => sum + value, 0) / sorted.length,
    spread: (Math.max(...medians) - Math.min(...medians)) / medianOf(medians),
    samples: sorted.length,
    calls,
  };
}

/** How many times as fast as `other`: the median over the turns, in each of which they ran one after the other. */
export function timesAsFast(ours: Turns, other: Turns): number {
  return medianOf(ours.map((turn, i) => medianOf(other[i]!) / medianOf(turn)));
}
