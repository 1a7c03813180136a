/** Folding what ranks have sent: as reduce.ts defines it, in native code where that pays. */
import type { DType } from '@ep/core';
import { native } from '@ep/native';
import type { Elements } from '../engine.js';
import { reduceInto, reduceOpName } from '../reduce.js';
import type { ReduceOp } from '../reduce-op.js';
import { factorOf, reductionCode, TYPE_CODES } from '../shm/codes.js';

/** For fewer elements the way into native code takes longer than folding them here. */
export const NATIVE_ELEMENTS = 128;

/** As `reduceInto`, to the bit; `dtype` and `op` have been checked. */
export function foldElements(
  dtype: DType,
  op: ReduceOp,
  target: Elements,
  sources: readonly Elements[],
  ranks: number = sources.length,
): void {
  // Native code divides by the number of sources.
  const otherMean = reduceOpName(op) === 'avg' && ranks !== sources.length;
  if (target.length < NATIVE_ELEMENTS || otherMean) reduceInto(dtype, op, target as never, sources as never, ranks);
  else native().binding.reduceElements(target, sources, TYPE_CODES[dtype], reductionCode(op), factorOf(op));
}
