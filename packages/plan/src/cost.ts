import { checkAttached, checkObject } from './check.js';

/** Query-key pairs of causal attention for the rows [from, to) of a document: row x sees x + 1 keys. Exact below 2^53. */
export function attendedPairs(from: number, to: number): number {
  return (to * (to + 1) - from * (from + 1)) / 2;
}

/** Largest over mean; 1 when there is no load at all. */
export function maxOverAverage(load: ArrayLike<number>): number {
  checkObject(load, 'load');
  checkAttached(load, 'load');
  let max = 0;
  let sum = 0;
  for (let i = 0; i < load.length; i++) {
    sum += load[i]!;
    if (load[i]! > max) max = load[i]!;
  }
  return sum === 0 ? 1 : (max * load.length) / sum;
}
