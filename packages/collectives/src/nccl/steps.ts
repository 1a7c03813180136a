/** Calls of a group as functions of NCCL, and which of them it does not have. */
import { EpError } from '@ep/core';
import { EqualParts, reduceOpName } from '../checks.js';
import type { DeviceElements } from '../device/elements.js';
import type { DeviceCall } from '../engine.js';

/** As native/core/gpu/nccl.hpp numbers them. */
export const VERBS = ['all-reduce', 'broadcast', 'reduce', 'all-gather', 'reduce-scatter', 'send', 'recv'] as const;

/** One function of NCCL: what this rank gives to it, and takes. */
export interface Step {
  readonly verb: (typeof VERBS)[number];
  /** Root or peer; -1: none. */
  readonly rank: number;
  readonly from?: DeviceElements | undefined;
  readonly to?: DeviceElements | undefined;
}

const REDUCING: ReadonlySet<string> = new Set(['all-reduce', 'reduce', 'reduce-scatter']);
const FOLDS: ReadonlySet<string> = new Set(['sum', 'avg', 'product', 'min', 'max', 'premul-sum']);
const MOVED_ONLY: ReadonlySet<string> = new Set(['i16', 'u16']);

/** Throws `EP_UNSUPPORTED` for what NCCL does not have. */
export function checkReduction({ kind, dtype, reduceOp }: Pick<DeviceCall, 'kind' | 'dtype' | 'reduceOp'>): void {
  if (!REDUCING.has(kind) || reduceOp === undefined) return;
  const name = reduceOpName(reduceOp);
  const lacking = !FOLDS.has(name) ? `the reduction ${name}` : MOVED_ONLY.has(dtype) ? `reductions of ${dtype}` : '';
  if (lacking === '') return;
  throw new EpError('EP_UNSUPPORTED', `${kind}: NCCL has not ${lacking}; tensors in host memory can be reduced so`, {
    context: { kind, dtype, op: name },
  });
}

const whole = (list: readonly DeviceElements[]): DeviceElements | undefined =>
  EqualParts.wholeOf(list) as DeviceElements | undefined;

/**
 * Of the table at `EngineCall`. What NCCL carries out must be the same on all ranks: it follows from the form of the call alone (lists of tensors, or one for all ranks), not from where
 * tensors happen to lie.
 */
export function stepsOf({ kind, root, inputs, outputs }: DeviceCall, rank: number, size: number): readonly Step[] {
  const [input, output] = [inputs[0], outputs[0]];
  const ranks = Array.from({ length: size }, (_, one) => one);
  const here = (one: number, elements: DeviceElements | undefined) => (one === rank ? elements : undefined);
  switch (kind) {
    case 'barrier':
    case 'all-reduce':
      return [{ verb: 'all-reduce', rank: -1, from: input, to: output }];
    case 'broadcast':
    case 'reduce':
      return [{ verb: kind, rank: root, from: input, to: output }];
    case 'all-gather': {
      const target = whole(outputs);
      if (target !== undefined) return [{ verb: 'all-gather', rank: -1, from: input, to: target }];
      return ranks.map((one) => ({ verb: 'broadcast', rank: one, from: here(one, input), to: outputs[one] }));
    }
    case 'reduce-scatter': {
      const source = whole(inputs);
      if (source !== undefined) return [{ verb: 'reduce-scatter', rank: -1, from: source, to: output }];
      return ranks.map((one) => ({ verb: 'reduce', rank: one, from: inputs[one], to: here(one, output) }));
    }
    case 'gather':
      return [
        { verb: 'send', rank: root, from: input },
        ...outputs.map((to, peer) => ({ verb: 'recv' as const, rank: peer, to })),
      ];
    case 'scatter':
      return [
        ...inputs.map((from, peer) => ({ verb: 'send' as const, rank: peer, from })),
        { verb: 'recv', rank: root, to: output },
      ];
    case 'all-to-all':
      return [
        ...inputs.map((from, peer) => ({ verb: 'send' as const, rank: peer, from })),
        ...outputs.map((to, peer) => ({ verb: 'recv' as const, rank: peer, to })),
      ];
  }
}
