/** Many tensors as few calls. */
import { createStorage, type DType, invalid } from '@ep/core';
import { checkApart, checkReduceOp } from './checks.js';
import { DeviceElements } from './device/elements.js';
import type { Data, Elements } from './engine.js';
import type { CallLimits, CountedCall } from './lane.js';
import { checkStillLiving, dataOf, dtypeOf } from './operands.js';
import type { Operand } from './options.js';
import type { ReduceOp } from './reduce-op.js';

/** Tensors up to this size are copied together, in host memory: below it a call of its own costs more than the two copies. */
const PACKED_BYTES = 16 * 1024;

interface Packed {
  readonly whole: Elements;
  readonly parts: readonly { readonly elements: Elements; readonly at: number }[];
}

function pack(dtype: DType, parts: readonly Elements[]): Packed {
  const whole = createStorage(
    dtype,
    parts.reduce((sum, { length }) => sum + length, 0),
  );
  let at = 0;
  const placed = parts.map((elements) => {
    const place = { elements, at };
    whole.set(elements as never, at);
    at += elements.length;
    return place;
  });
  return { whole, parts: placed };
}

function unpack({ whole, parts }: Packed): void {
  for (const { elements, at } of parts) elements.set(whole.subarray(at, at + elements.length) as never);
}

/** One call for the small tensors of each dtype, one for each large one; `finish` brings results from packed copies to their tensors. */
export function coalescedCalls(
  where: string,
  sources: readonly Operand[],
  op: ReduceOp | undefined,
  limits: CallLimits,
): { readonly calls: readonly CountedCall[]; readonly finish: () => void } {
  if (!Array.isArray(sources) || sources.length === 0) {
    throw invalid('tensors', { where, expected: 'a list of at least one tensor', found: sources });
  }
  const arrays = Array.from(sources as readonly Operand[], (source, i) => dataOf(source, `tensors[${i}]`, where));
  const small = new Map<DType, Elements[]>();
  const large: { readonly dtype: DType; readonly elements: Data }[] = [];
  for (const [i, elements] of arrays.entries()) {
    const dtype = dtypeOf(sources[i]!);
    checkReduceOp(op, dtype, where);
    if (elements instanceof DeviceElements || elements.byteLength > PACKED_BYTES) large.push({ dtype, elements });
    else {
      const others = small.get(dtype);
      if (others === undefined) small.set(dtype, [elements]);
      else others.push(elements);
    }
  }
  checkApart(where, { what: 'tensors', arrays });
  const packed = [...small].map(([dtype, parts]) => ({ dtype, ...pack(dtype, parts) }));
  const wholes = [...packed.map(({ dtype, whole }) => ({ dtype, elements: whole })), ...large];
  return {
    calls: wholes.map(({ dtype, elements }) => {
      const one = [elements];
      const reduceOp = checkReduceOp(op, dtype, where);
      const call = { kind: 'all-reduce', sequence: 0, dtype, reduceOp, root: -1, inputs: one, outputs: one } as const;
      return { call: { ...call, ...limits }, elements: elements.length };
    }),
    finish: () => {
      // All of them before any: some results are none.
      for (const { parts } of packed) for (const { elements } of parts) checkStillLiving(elements, where);
      packed.forEach(unpack);
    },
  };
}
