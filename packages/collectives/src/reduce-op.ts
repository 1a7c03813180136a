/** Reductions, and which dtypes each of them takes. */
import type { DType } from '@ep/core';

/**
 * What `allReduce`, `reduce` and `reduceScatter` do with the elements of the contributors, always folded in ascending rank order; in a group of several hosts those of each
 * host first, then what the hosts have come to.
 *
 * | op | dtypes | arithmetic |
 * |----|--------|------------|
 * | sum, product | all but fp8 | integers wrap modulo 2^bits; f16 and bf16 are added up in f32, over all hosts, and rounded once |
 * | avg | f64 f32 f16 bf16 | the sum, then one division by the number of contributors |
 * | min, max | all but fp8 | a NaN among the elements gives NaN; -0 is less than +0 |
 * | band, bor, bxor | integers | |
 * | premul-sum | f64 f32 f16 bf16 | every element times `factor`, rounded (f16, bf16: in f32), then summed |
 *
 * No fused multiply-add anywhere, so that every engine gives the same bits.
 */
export type ReduceOp =
  | 'sum'
  | 'avg'
  | 'product'
  | 'min'
  | 'max'
  | 'band'
  | 'bor'
  | 'bxor'
  | { readonly op: 'premul-sum'; readonly factor: number };

export type ReduceOpName = Exclude<ReduceOp, object> | 'premul-sum';

export const REDUCE_OPS = [
  'sum',
  'avg',
  'product',
  'min',
  'max',
  'band',
  'bor',
  'bxor',
  'premul-sum',
] as const satisfies readonly ReduceOpName[];

const FLOATS: ReadonlySet<DType> = new Set<DType>(['f64', 'f32', 'f16', 'bf16']);
const INTEGERS: ReadonlySet<DType> = new Set<DType>(['i64', 'u64', 'i32', 'u32', 'i16', 'u16', 'i8', 'u8']);

/** Undefined if `op` takes `dtype`, else why not. */
export function refusal(op: ReduceOpName, dtype: DType): string | undefined {
  const float = FLOATS.has(dtype);
  if (!float && !INTEGERS.has(dtype)) return `${dtype} can be moved but not reduced`;
  switch (op) {
    case 'avg':
      return float ? undefined : `avg of ${dtype} would have to round: sum, then divide as you need`;
    case 'premul-sum':
      return float ? undefined : `premul-sum takes f64, f32, f16 and bf16, not ${dtype}`;
    case 'band':
    case 'bor':
    case 'bxor':
      return float ? `${op} takes integers, not ${dtype}` : undefined;
    default:
      return undefined;
  }
}
