import { checkInteger } from '../check.js';
import type { GradientReduction } from '../directions.js';
import { type DispatchPlan, rankDispatch } from '../dispatch-plan.js';
import { invalidArgument } from '../error.js';

/** A tensor of rows for each rank: `ranks[r]` holds `rows * rowElements` numbers. */
export type RankTensors<T extends RowStorage = RowStorage> = readonly T[];
export type RowStorage = Float32Array | Float64Array | Int32Array | Uint32Array | Uint16Array | Uint8Array;

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
  checkInteger(rowElements, 'rowElements', 1, 2 ** 31 - 1);
  if (source.length !== plan.worldSize) {
    throw invalidArgument(`source must hold ${plan.worldSize} tensors, found ${source.length}`, {
      expected: plan.worldSize,
      found: source.length,
    });
  }
  for (let r = 0; r < plan.worldSize; r++) {
    const expected = plan.sendTokens[r]! * rowElements;
    if (source[r]!.length !== expected) {
      throw invalidArgument(`source[${r}] must hold ${expected} elements, found ${source[r]!.length}`, {
        rank: r,
        expected,
        found: source[r]!.length,
      });
    }
  }
  const received = source.map((like, t) => emptyLike(like, plan.recvTokens[t]! * rowElements, fill));
  for (let r = 0; r < plan.worldSize; r++) {
    const mine = rankDispatch(plan, r);
    for (let e = 0; e < mine.dstRank.length; e++) {
      for (let i = 0; i < mine.length[e]!; i++) {
        const from = (mine.srcOffset[e]! + i) * rowElements;
        const to = (mine.dstOffset[e]! + i) * rowElements;
        const target = received[mine.dstRank[e]!]!;
        if (from + rowElements > source[r]!.length || to + rowElements > target.length) {
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
  const add = precision === 'f32' ? (a: number, b: number) => Math.fround(a + b) : (a: number, b: number) => a + b;
  const rowOf = form === 'dense' ? reduction.denseRow : reduction.compactRow;
  const home: Float64Array[] = [];
  for (let r = 0; r < reduction.worldSize; r++) {
    const from = reduction.shardOffsets[r]!;
    const to = reduction.shardOffsets[r + 1]!;
    let tokens = 0;
    for (let g = from; g < to; g++) tokens += reduction.lengths[g]!;
    const sums = new Float64Array(tokens * rowElements);
    for (let g = from; g < to; g++) {
      for (let i = 0; i < reduction.lengths[g]! * rowElements; i++) {
        let sum = 0;
        for (let slot = reduction.slotOffsets[g]!; slot < reduction.slotOffsets[g + 1]!; slot++) {
          sum = add(sum, gradients[r]![rowOf[slot]! * rowElements + i]!);
        }
        sums[reduction.homeRow[g]! * rowElements + i] = sum;
      }
    }
    home.push(sums);
  }
  return home;
}

function emptyLike<T extends RowStorage>(like: T, length: number, fill: number): T {
  const Storage = like.constructor as new (length: number) => T;
  const made = new Storage(length);
  made.fill(fill);
  return made;
}
