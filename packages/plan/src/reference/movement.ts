import { checkInteger, checkNumber, checkOffsets, checkRange, maxRows } from '../check.js';
import type { GradientReduction } from '../directions.js';
import { type DispatchPlan, rankDispatch } from '../dispatch-plan.js';
import { invalidArgument, shown } from '../error.js';
import { checkDispatchPlan, checkReduction as checkReductionForm } from '../form.js';
import {
  checkTensor,
  checkTensorList,
  checkTensors,
  elementsOf,
  type RankTensors,
  type RowStorage,
} from './tensors.js';

/**
 * Moves rows as a plan says, one row at a time with every bound checked, into fresh tensors of the receivers filled with `fill`.
 * The oracle for dispatch (`fwd-*`), return (`rev-q`) and the unreduced KV gradient (`rev-kv`, `rev-kv-compact`).
 */
export function movePlan<T extends RowStorage>(
  plan: DispatchPlan,
  source: RankTensors<T>,
  rowElements: number,
  fill = 0,
): T[] {
  checkDispatchPlan(plan);
  checkInteger(rowElements, 'rowElements', 1, maxRows);
  checkFill(fill);
  checkTensors(source, 'source', plan.worldSize, (r) => plan.sendTokens[r]! * rowElements);
  const received = source.map((like, t) =>
    emptyLike(like, elementsOf(plan.recvTokens[t]!, rowElements, `the tensor of rank ${t}`), fill),
  );
  for (let r = 0; r < plan.worldSize; r++) {
    const mine = rankDispatch(plan, r);
    for (let e = 0; e < mine.dstRank.length; e++) {
      for (let i = 0; i < mine.length[e]!; i++) {
        const from = (mine.srcOffset[e]! + i) * rowElements;
        const to = (mine.dstOffset[e]! + i) * rowElements;
        const target = received[mine.dstRank[e]!];
        if (
          target === undefined ||
          !fits(from, rowElements, source[r]!.length) ||
          !fits(to, rowElements, target.length)
        ) {
          throw invalidArgument(`dispatch ${e} of rank ${r} leaves its tensors at row ${i}`, {
            rank: r,
            entry: e,
            row: i,
          });
        }
        for (let x = 0; x < rowElements; x++) target[to + x] = source[r]![from + x]!;
      }
    }
  }
  return received;
}

/** Which of the buffers of `GradientReduction` the gradients are in. */
export type GradientForm = 'dense' | 'compact';

/**
 * Sums the replicas of every shard, replica ascending, in the precision asked for: 'f64', or 'f32' with one rounding per addition, which
 * is what a kernel with an fp32 accumulator does. Returns home tensors; rows of shards without replicas are 0.
 */
export function sumReplicas(
  reduction: GradientReduction,
  gradients: RankTensors,
  rowElements: number,
  form: GradientForm,
  precision: 'f64' | 'f32',
): Float64Array[] {
  checkReduction(reduction, form);
  checkInteger(rowElements, 'rowElements', 1, maxRows);
  checkPrecision(precision);
  checkTensorList(gradients, 'gradients', reduction.worldSize);
  const add = precision === 'f32' ? (a: number, b: number) => Math.fround(a + b) : (a: number, b: number) => a + b;
  const rowOf = form === 'dense' ? reduction.denseRow : reduction.compactRow;
  const home: Float64Array[] = [];
  for (let r = 0; r < reduction.worldSize; r++) {
    const from = reduction.shardOffsets[r]!;
    const to = reduction.shardOffsets[r + 1]!;
    let tokens = 0;
    for (let g = from; g < to; g++) tokens += reduction.lengths[g]!;
    const sums = new Float64Array(elementsOf(tokens, rowElements, `the home tensor of rank ${r}`));
    const replicas = checkTensor(gradients[r], `gradients[${r}]`);
    for (let g = from; g < to; g++) {
      checkRun(reduction.homeRow[g]!, `reduction.homeRow[${g}]`, reduction.lengths[g]!, tokens);
      for (let slot = reduction.slotOffsets[g]!; slot < reduction.slotOffsets[g + 1]!; slot++)
        checkRun(rowOf[slot]!, `reduction.${form}Row[${slot}]`, reduction.lengths[g]!, replicas.length / rowElements);
      for (let i = 0; i < reduction.lengths[g]! * rowElements; i++) {
        let sum = 0;
        for (let slot = reduction.slotOffsets[g]!; slot < reduction.slotOffsets[g + 1]!; slot++) {
          sum = add(sum, replicas[rowOf[slot]! * rowElements + i]!);
        }
        sums[reduction.homeRow[g]! * rowElements + i] = sum;
      }
    }
    home.push(sums);
  }
  return home;
}

/** The lists divide each other; where their rows lie is checked where tensors are at hand. */
function checkReduction(reduction: GradientReduction, form: GradientForm): void {
  checkReductionForm(reduction, 'reduction');
  if (form !== 'dense' && form !== 'compact') {
    throw invalidArgument(`form must be 'dense' or 'compact', found ${shown(form)}`, { name: 'form' });
  }
  checkOffsets(reduction.shardOffsets, 'reduction.shardOffsets', reduction.lengths.length);
  checkOffsets(reduction.slotOffsets, 'reduction.slotOffsets', reduction.replica.length);
  checkRange(reduction.lengths, 'reduction.lengths', 0, maxRows);
}

/** Not so for what is no number, as the end of a column that is too short. */
function fits(begin: number, length: number, total: number): boolean {
  return begin >= 0 && begin + length <= total;
}

function checkRun(row: number, name: string, length: number, rows: number): void {
  if (fits(row, length, rows)) return;
  throw invalidArgument(`${name} must begin ${length} rows within the ${rows} of its tensor, found ${row}`, {
    name,
    length,
    rows,
    found: row,
  });
}

export function checkPrecision(precision: unknown): void {
  if (precision === 'f64' || precision === 'f32') return;
  throw invalidArgument(`precision must be 'f64' or 'f32', found ${shown(precision)}`, { name: 'precision' });
}

/** Any number, NaN too: rows that nobody may read are often filled with it. */
export function checkFill(fill: unknown): void {
  if (!Number.isNaN(fill)) checkNumber(fill, 'fill', Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY);
}

function emptyLike<T extends RowStorage>(like: T, length: number, fill: number): T {
  const Storage = like.constructor as new (length: number) => T;
  const made = new Storage(length);
  made.fill(fill);
  return made;
}
