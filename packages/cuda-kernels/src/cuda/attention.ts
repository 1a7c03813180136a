/** The dispatches of one attention step over device memory. */
import { type DeviceTensor, invalid, type WaitOptions, type Work } from '@ep/core';
import type { AttentionPlan } from '@ep/plan';
import { type AttentionShape, checkAttention, stepSpecs } from '../attention.js';
import type { RunOptions } from '../options.js';
import { type BoundDeviceDispatch, DeviceDispatcher, type DeviceLease } from './dispatcher.js';

/** A lease whose tensors have these names. */
export type NamedDeviceLease<K extends string> = DeviceLease & {
  readonly tensors: Readonly<Record<K, DeviceTensor>>;
};

type Step<In extends string> = (
  tensors: Readonly<Record<In, DeviceTensor>>,
  options?: RunOptions,
) => Work<NamedDeviceLease<In>>;

/** As `AttentionDispatch`, of tensors on the device. */
export interface DeviceAttentionDispatch {
  readonly queryKeyValue: Step<'q' | 'k' | 'v'>;
  readonly output: Step<'o'>;
  readonly outputGradient: Step<'dO'>;
  readonly gradients: Step<'dQ' | 'dK' | 'dV'>;
  /** Bytes that this rank sends in one forward and one backward pass, its own among them. */
  readonly bytesSent: { readonly forward: number; readonly backward: number };
  /** The same dispatches, for `enqueue` and graphs. */
  readonly bound: Readonly<Record<'queryKeyValue' | 'output' | 'outputGradient' | 'gradients', BoundDeviceDispatch>>;
}

/** Collective: binds all four dispatches of a plan. Errors as `bindAttention`. */
export async function bindDeviceAttention(
  dispatcher: DeviceDispatcher,
  plan: AttentionPlan,
  shape: AttentionShape,
  options?: WaitOptions,
): Promise<DeviceAttentionDispatch> {
  const where = 'bindDeviceAttention';
  if (!(dispatcher instanceof DeviceDispatcher)) {
    throw invalid('dispatcher', { where, expected: 'a dispatcher over device memory', found: dispatcher });
  }
  const bound = await dispatcher.bindMade(
    where,
    () => {
      checkAttention(plan, shape, where);
      return stepSpecs(plan, shape);
    },
    options ?? {},
  );
  const step =
    <K extends string>(dispatch: BoundDeviceDispatch): Step<K> =>
    (tensors, runOptions) =>
      dispatch.run(tensors, runOptions) as Work<NamedDeviceLease<K>>;
  return {
    queryKeyValue: step(bound.queryKeyValue),
    output: step(bound.output),
    outputGradient: step(bound.outputGradient),
    gradients: step(bound.gradients),
    bytesSent: {
      forward: bound.queryKeyValue.bytesSent + bound.output.bytesSent,
      backward: bound.outputGradient.bytesSent + bound.gradients.bytesSent,
    },
    bound,
  };
}
