import { freestEnd } from './balance-runs.js';
import type { RowBytes } from './balance-state.js';

/**
 * The fewest bytes for each pair that a run can cost which has at most `pairs` of them (or counts for no more), where all of its queries and all
 * keys and values up to its end have to move: qRowBytes * (b - a) + kvRowBytes * b bytes for [a, b), (b * (b + 1) - a * (a + 1)) / 2 pairs.
 * Borders may be anywhere here, not only at rows, so no run that `runs` finds is cheaper.
 */
export class RunBound {
  readonly #q: number;
  readonly #kv: number;
  readonly #pairs: number;
  readonly #freest: number;

  constructor(rowBytes: RowBytes, pairs: number) {
    this.#q = rowBytes.qRowBytes;
    this.#kv = rowBytes.kvRowBytes;
    this.#pairs = pairs;
    this.#freest = freestEnd(pairs, rowBytes);
  }

  /** Of runs that end in [low, high]. Ends short of the freest one are dearer the shorter, ends beyond it the longer. */
  perPair(low: number, high: number): number {
    // In a = from + 1/2 and b = end + 1/2, a run has (b * b - a * a) / 2 pairs.
    const b = Math.min(high + 0.5, Math.max(low + 0.5, this.#freest));
    const whole = this.#q * b;
    const prefix = this.#kv * (b - 0.5);
    // Where bytes for each pair are fewest for this end; beyond it, more pairs cost more each. Written so that nothing cancels out.
    const cheapest = (this.#q * b * b) / (whole + prefix + Math.sqrt(prefix * (2 * whole + prefix)));
    const from = b * b - 2 * this.#pairs;
    if (from <= cheapest * cheapest) return this.#q / cheapest;
    return (whole + prefix - this.#q * Math.sqrt(from)) / this.#pairs;
  }
}
