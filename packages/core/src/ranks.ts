/** How messages name ranks. */

import { checkAttached } from './buffers.js';
import { invalid } from './errors.js';

/** The most that a world may have, wherever its size is said: lists of one entry for each rank are made before anybody is met. */
export const MOST_WORLD_SIZE = 2 ** 20;

const RUNS_SHOWN = 12;

/** `rank 3`, `ranks 0-2, 5`: sorted, runs folded, long lists cut with their total. `no rank` if there are none. */
export function formatRanks(ranks: Iterable<number>): string {
  if (typeof ranks?.[Symbol.iterator] !== 'function') {
    throw invalid('ranks', { where: 'formatRanks', expected: 'a list of ranks', found: ranks });
  }
  if (ArrayBuffer.isView(ranks)) checkAttached(ranks as Int32Array, 'formatRanks');
  const sorted = [...new Set(ranks)].sort((a, b) => a - b);
  if (sorted.length === 0) return 'no rank';
  const runs: string[] = [];
  for (let i = 0; i < sorted.length; ) {
    let end = i;
    while (end + 1 < sorted.length && sorted[end + 1] === sorted[end]! + 1) end++;
    runs.push(i === end ? `${sorted[i]}` : `${sorted[i]}-${sorted[end]}`);
    i = end + 1;
  }
  const shown = runs.slice(0, RUNS_SHOWN).join(', ');
  const cut = runs.length > RUNS_SHOWN ? `, … (${sorted.length} in all)` : '';
  return `${sorted.length === 1 ? 'rank' : 'ranks'} ${shown}${cut}`;
}
