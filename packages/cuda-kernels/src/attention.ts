/** The dispatches of one attention step, from a plan: what moves where, forward and backward. */
import { checkInteger, invalid, type Tensor, type WaitOptions, type Work } from '@ep/core';
import type { AttentionPlan } from '@ep/plan';
import { leaseBytesFor, type PartSpec } from './binding-spec.js';
import { checkObject, checkReduction } from './check-spec.js';
import type { AttentionDType } from './core-attention.js';
import { type BoundDispatch, Dispatcher } from './dispatcher.js';
import type { Lease } from './lease.js';
import type { RunOptions } from './options.js';

/** Grouped-query attention: `queryHeads` is a multiple of `kvHeads`. */
export interface AttentionShape {
  readonly queryHeads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly dtype: AttentionDType;
}

/** A lease whose tensors have these names. */
export type NamedLease<K extends string> = Lease & { readonly tensors: Readonly<Record<K, Tensor>> };

/**
 * Home ranks hold [tokens, heads, head dimension] in the order of their shards; servers hold the rows that `plan.layout` describes. Every member is
 * collective: all ranks call the same ones in the same order.
 */
export interface AttentionDispatch {
  /** Home to server: queries, keys and values in one call. */
  queryKeyValue(
    tensors: Readonly<Record<'q' | 'k' | 'v', Tensor>>,
    options?: RunOptions,
  ): Work<NamedLease<'q' | 'k' | 'v'>>;
  /** Server to home: outputs. */
  output(tensors: Readonly<Record<'o', Tensor>>, options?: RunOptions): Work<NamedLease<'o'>>;
  /** Home to server: gradients of the outputs. */
  outputGradient(tensors: Readonly<Record<'dO', Tensor>>, options?: RunOptions): Work<NamedLease<'dO'>>;
  /** Server to home: gradients of queries, and of keys and values summed over the servers that used them. */
  gradients(
    tensors: Readonly<Record<'dQ' | 'dK' | 'dV', Tensor>>,
    options?: RunOptions,
  ): Work<NamedLease<'dQ' | 'dK' | 'dV'>>;
  /** Bytes that this rank sends in one forward and one backward pass, its own among them. */
  readonly bytesSent: { readonly forward: number; readonly backward: number };
}

type StepNames = 'queryKeyValue' | 'output' | 'outputGradient' | 'gradients';

export function stepSpecs(plan: AttentionPlan, shape: AttentionShape): Record<StepNames, readonly PartSpec[]> {
  const { dtype } = shape;
  const query = { dtype, rowShape: [shape.queryHeads, shape.headDim] };
  const keyValue = { dtype, rowShape: [shape.kvHeads, shape.headDim] };
  const gradient = { ...keyValue, plan: plan.revKvCompact, reduce: plan.reduction };
  return {
    queryKeyValue: [
      { name: 'q', plan: plan.fwdQ, ...query },
      { name: 'k', plan: plan.fwdKv, ...keyValue },
      { name: 'v', plan: plan.fwdKv, ...keyValue },
    ],
    output: [{ name: 'o', plan: plan.revQ, ...query }],
    outputGradient: [{ name: 'dO', plan: plan.fwdQ, ...query }],
    gradients: [
      { name: 'dQ', plan: plan.revQ, ...query },
      { name: 'dK', ...gradient },
      { name: 'dV', ...gradient },
    ],
  };
}

/** `EP_INVALID_ARGUMENT` unless the step can be made of them; what each dispatch needs is checked when it is bound. */
export function checkAttention(plan: unknown, shape: unknown, where: string): void {
  checkObject(plan, 'plan', 'an attention plan', where);
  checkObject(shape, 'shape', '{queryHeads, kvHeads, headDim, dtype}', where);
  for (const extent of ['queryHeads', 'kvHeads', 'headDim']) checkInteger(shape[extent], extent, where, 1);
  if ((shape.queryHeads as number) % (shape.kvHeads as number) !== 0) {
    throw invalid('queryHeads', {
      where,
      expected: `a multiple of kvHeads, ${shape.kvHeads}`,
      found: shape.queryHeads,
    });
  }
  checkReduction(plan.reduction, 'plan.reduction', where);
}

/** `leaseBytes` of a dispatcher for these steps. A step keeps at most four leases: queries with keys and values until its backward pass. */
export function attentionLeaseBytes(plan: AttentionPlan, shape: AttentionShape): number {
  checkAttention(plan, shape, 'attentionLeaseBytes');
  return Math.max(...Object.values(stepSpecs(plan, shape)).map(leaseBytesFor));
}

/** Collective: binds all four dispatches of a plan. Errors as `Dispatcher.bind`. */
export async function bindAttention(
  dispatcher: Dispatcher,
  plan: AttentionPlan,
  shape: AttentionShape,
  options?: WaitOptions,
): Promise<AttentionDispatch> {
  if (!(dispatcher instanceof Dispatcher)) {
    throw invalid('dispatcher', { where: 'bindAttention', expected: 'a dispatcher', found: dispatcher });
  }
  const bound = await dispatcher.bindMade(
    'bindAttention',
    () => {
      checkAttention(plan, shape, 'bindAttention');
      return stepSpecs(plan, shape);
    },
    options ?? {},
  );
  const run =
    (dispatch: BoundDispatch) =>
    <K extends string>(tensors: Readonly<Record<K, Tensor>>, runOptions?: RunOptions) =>
      dispatch.run(tensors, runOptions) as Work<NamedLease<K>>;
  return {
    queryKeyValue: run(bound.queryKeyValue),
    output: run(bound.output),
    outputGradient: run(bound.outputGradient),
    gradients: run(bound.gradients),
    bytesSent: {
      forward: bound.queryKeyValue.bytesSent + bound.output.bytesSent,
      backward: bound.outputGradient.bytesSent + bound.gradients.bytesSent,
    },
  };
}
