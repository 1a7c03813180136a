import { checkInt32Array, checkRange, maxRows } from './check.js';
import { invalidArgument, PlanError, shown } from './error.js';
import type { DocumentList } from './shards.js';

/**
 * How a document that does not fit one rank is split. `sequential`: consecutive runs, one per rank. `head-tail`: each rank gets a run from
 * the document's head and one of the same length (one token longer, if odd) from its tail, so that ranks with equally many tokens of it
 * have nearly equal attention work: rows i and L - 1 - i together always see L + 1 keys.
 */
export type PackSplit = 'sequential' | 'head-tail';

/**
 * Packs documents, in order, into the ranks' token budgets: rank 0 fills up first. A document is split only where a budget ends, so with
 * budgets that whole documents fill exactly every document lives on one rank (MLP-DP); split ones are MLP-CP. Runs of a document that
 * meet on one rank are one part; an empty document keeps one empty part. Throws EP_CAPACITY when the documents exceed the budgets.
 */
export function packDocuments(lengths: Int32Array, budgets: Int32Array, split: PackSplit = 'sequential'): DocumentList {
  checkInt32Array(lengths, 'lengths');
  checkInt32Array(budgets, 'budgets');
  checkRange(lengths, 'lengths', 0, maxRows);
  checkRange(budgets, 'budgets', 0, maxRows);
  if (budgets.length === 0)
    throw invalidArgument('budgets must have one element per rank, found 0', { name: 'budgets', found: 0 });
  if (split !== 'sequential' && split !== 'head-tail') {
    throw invalidArgument(`split must be 'sequential' or 'head-tail', found ${shown(split)}`, {
      name: 'split',
      found: split,
    });
  }
  let needed = 0;
  let available = 0;
  for (const n of lengths) needed += n;
  for (const n of budgets) available += n;
  if (needed > available) {
    throw new PlanError(
      'EP_CAPACITY',
      `the documents have ${needed} tokens, the budgets of ${budgets.length} ranks hold ${available}`,
      { needed, available },
    );
  }
  const homeRank: number[] = [];
  const parts: number[] = [];
  const documentOffsets = new Int32Array(lengths.length + 1);
  let rank = 0;
  let room = budgets[0]!;
  for (let d = 0; d < lengths.length; d++) {
    const runs: { readonly rank: number; readonly tokens: number }[] = [];
    let left = lengths[d]!;
    while (left > 0) {
      while (room === 0) room = budgets[++rank]!;
      const tokens = Math.min(left, room);
      runs.push({ rank, tokens });
      left -= tokens;
      room -= tokens;
    }
    if (runs.length === 0) runs.push({ rank, tokens: 0 });
    const inOrder =
      split === 'sequential' || runs.length === 1
        ? runs
        : [
            ...runs.map((run) => ({ rank: run.rank, tokens: Math.floor(run.tokens / 2) })),
            ...runs.map((run) => ({ rank: run.rank, tokens: Math.ceil(run.tokens / 2) })).reverse(),
          ];
    let last = -1;
    for (const run of inOrder) {
      if (run.tokens === 0 && runs.length > 1) continue;
      if (run.rank === last) {
        parts[parts.length - 1]! += run.tokens;
        continue;
      }
      homeRank.push(run.rank);
      parts.push(run.tokens);
      last = run.rank;
    }
    documentOffsets[d + 1] = parts.length;
  }
  return Object.freeze({
    worldSize: budgets.length,
    documentOffsets,
    homeRank: Int32Array.from(homeRank),
    lengths: Int32Array.from(parts),
  });
}
