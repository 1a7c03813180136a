import { checkInt32Array, checkInteger, checkObject, checkRange, checkRows, describe, maxRows } from '../check.js';
import { unwrittenColumn } from '../column.js';
import { invalidArgument, PlanError } from '../error.js';
import { checkMap, type ExpertMap } from './experts.js';
import { checkLayout, type RoutingLayout } from './layout.js';

/**
 * How a rank's receive tensor is laid out. Either way the rows of a local expert are one block, those of a source rank in it one run, runs
 * in the order of the sources, rows of a run in the order of the source's tokens: where a row lies does not depend on who came first.
 *
 * - 'low-latency': `[localExperts, ranks * maxTokens]` rows; a block begins where its expert does, whatever the counts. No rank may have more
 *   than `maxTokens` tokens.
 * - 'high-throughput': blocks back to back, each padded with zero rows to a multiple of `alignment` (1 by default).
 */
export type MoeForm =
  | { readonly mode: 'low-latency'; readonly maxTokens: number }
  | { readonly mode: 'high-throughput'; readonly alignment?: number };

/** Where everything lies in the receive tensors, from counts alone. Offsets and counts are rows. */
export interface Placement {
  /** Element `p * worldSize + s`: rows that source s sends to replica p, and the first of them in the block of p. */
  readonly count: Int32Array;
  readonly begin: Int32Array;
  /** Rows that the runs of each replica's block span, and the first row of the block in its rank's receive tensor. */
  readonly rows: Int32Array;
  readonly blockStart: Int32Array;
  /** Rows of each rank's receive tensor, padding included. */
  readonly recvRows: Int32Array;
}

/** The deterministic placement of what `counts[s * replicas + p]` says that source s sends to replica p. Prefix sums, nothing else. */
export function placeRows(map: ExpertMap, counts: Int32Array, form: MoeForm): Placement {
  checkMap(map);
  checkForm(form);
  const replicas = map.expert.length;
  const { worldSize } = map;
  checkCounts(map);
  checkInt32Array(counts, 'counts', worldSize * replicas);
  checkRange(counts, 'counts', 0, maxRows);
  const count = new Int32Array(replicas * worldSize);
  const begin = new Int32Array(replicas * worldSize);
  const rows = new Int32Array(replicas);
  for (let p = 0; p < replicas; p++) {
    let fill = 0;
    for (let s = 0; s < worldSize; s++) {
      const n = counts[s * replicas + p]!;
      if (form.mode === 'low-latency' && n > form.maxTokens) {
        throw new PlanError(
          'EP_CAPACITY',
          `rank ${s} sends ${n} rows to expert ${map.expert[p]} on rank ${map.rank[p]}, maxTokens is ${form.maxTokens}`,
          { rank: s, replica: p, needed: n, limit: form.maxTokens },
        );
      }
      count[p * worldSize + s] = n;
      begin[p * worldSize + s] = checkRows(fill, `expert ${map.expert[p]} on rank ${map.rank[p]}`, { replica: p });
      fill += n;
    }
    rows[p] = checkRows(fill, `expert ${map.expert[p]} on rank ${map.rank[p]}`, { replica: p });
  }
  const blockStart = new Int32Array(replicas);
  const recvRows = new Int32Array(worldSize);
  for (let r = 0; r < worldSize; r++) {
    let fill = 0;
    for (let p = map.rankOffsets[r]!; p < map.rankOffsets[r + 1]!; p++) {
      blockStart[p] = checkRows(fill, `the receive tensor of rank ${r}`, { rank: r });
      fill += blockRows(form, worldSize, rows[p]!);
    }
    recvRows[r] = checkRows(fill, `the receive tensor of rank ${r}`, { rank: r });
  }
  return Object.freeze({ count, begin, rows, blockStart, recvRows });
}

/** Rows of a block, its padding or its spare rows included. */
export function blockRows(form: MoeForm, worldSize: number, rows: number): number {
  if (form.mode === 'low-latency') return worldSize * form.maxTokens;
  const { alignment = 1 } = form;
  return Math.ceil(rows / alignment) * alignment;
}

/** Row of each choice of a source in the receive tensor of its replica's rank; -1 where there is none. Parallel to the layout's choices. */
export function rowsOfChoices(placement: Placement, layout: RoutingLayout): Int32Array {
  checkObject(placement, 'placement');
  const worldSize = checkInt32Array(placement.recvRows, 'placement.recvRows').length;
  const replicas = checkInt32Array(placement.rows, 'placement.rows').length;
  checkPlacement(placement, replicas, worldSize);
  checkLayout(layout, replicas);
  checkInteger(layout.rank, 'layout.rank', 0, worldSize - 1);
  const row = unwrittenColumn(layout.replica.length);
  fillRows(placement, layout.rank, layout, row);
  return row;
}

/** The same, into an array that may be a part of a larger one. */
export function fillRows(
  { begin, blockStart, recvRows }: Placement,
  source: number,
  { replica, slot }: Pick<RoutingLayout, 'replica' | 'slot'>,
  into: Int32Array,
): void {
  const worldSize = recvRows.length;
  for (let i = 0; i < into.length; i++) {
    const p = replica[i]!;
    into[i] = p < 0 ? -1 : blockStart[p]! + begin[p * worldSize + source]! + slot[i]!;
  }
}

/** A checked copy of a form, all of its fields given. */
export function checkForm(form: MoeForm, name = 'form'): MoeForm {
  checkObject(form, name);
  if (form.mode === 'low-latency') {
    return Object.freeze({ mode: form.mode, maxTokens: checkInteger(form.maxTokens, 'maxTokens', 1, maxRows) });
  }
  if (form.mode === 'high-throughput') {
    return Object.freeze({ mode: form.mode, alignment: checkInteger(form.alignment ?? 1, 'alignment', 1, maxRows) });
  }
  const { mode } = form as { readonly mode: unknown };
  throw invalidArgument(`${name}.mode must be 'low-latency' or 'high-throughput', found ${describe(mode)}`, {
    name: `${name}.mode`,
    found: mode,
  });
}

/** The kinds and lengths of its fields. */
export function checkPlacement(placement: Placement, replicas: number, worldSize: number, name = 'placement'): void {
  checkObject(placement, name);
  for (const field of ['count', 'begin'] as const)
    checkInt32Array(placement[field], `${name}.${field}`, replicas * worldSize);
  for (const field of ['rows', 'blockStart'] as const) checkInt32Array(placement[field], `${name}.${field}`, replicas);
  checkInt32Array(placement.recvRows, `${name}.recvRows`, worldSize);
}

/** Tables of counts are dense: refused before they are allocated. */
export function checkCounts(map: ExpertMap): void {
  checkRows(map.worldSize ** 2, 'the table of tokens per rank (ranks * ranks)', { worldSize: map.worldSize });
  checkRows(map.expert.length * map.worldSize, 'the table of counts (replicas * ranks)', {
    replicas: map.expert.length,
    worldSize: map.worldSize,
  });
}
