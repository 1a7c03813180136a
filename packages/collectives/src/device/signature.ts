/**
 * A call in 64 bits, which ranks compare on the device; and what such a word says. It has no number of the call: ranks take their calls in order, by counts that lie on the device, so
 * one that is replayed by a graph is as good as one that was launched.
 */
import type { DeviceCall } from '../engine.js';
import { describeCall } from '../portable/signature.js';
import { REDUCE_OPS } from '../reduce-op.js';
import { factorOf, KIND_CODES, KINDS, reductionCode, TYPE_CODES, TYPES } from '../shm/codes.js';

/** Lowest first. Numbers that do not fit keep their lowest bits: whoever differs in the others alone is not found. */
const FIELDS = { elements: 32n, factor: 13n, root: 7n, fold: 4n, dtype: 4n, kind: 4n } as const;
type Field = keyof typeof FIELDS;

/** 0 for 0 and for none. */
function factorBits(factor: number): bigint {
  const bits = new BigUint64Array(Float64Array.of(factor).buffer)[0]!;
  let folded = 0n;
  for (let rest = bits; rest > 0n; rest >>= FIELDS.factor) folded ^= rest;
  return folded;
}

/** Elements that the table of `EngineCall` calls n; those of an all-to-all are compared between pairs. */
const countOf = ({ kind, inputs, outputs }: DeviceCall): number =>
  kind === 'all-to-all' ? 0 : ((inputs[0] ?? outputs[0])?.length ?? 0);

export function signatureOf(call: DeviceCall): bigint {
  const values: Record<Field, bigint> = {
    elements: BigInt(countOf(call)),
    factor: factorBits(factorOf(call.reduceOp)),
    root: BigInt(call.root + 1),
    fold: BigInt(reductionCode(call.reduceOp)),
    dtype: BigInt(TYPE_CODES[call.dtype]),
    kind: BigInt(KIND_CODES[call.kind]),
  };
  let word = 0n;
  let at = 0n;
  for (const [name, bits] of Object.entries(FIELDS) as [Field, bigint][]) {
    word |= (values[name] & ((1n << bits) - 1n)) << at;
    at += bits;
  }
  return word;
}

const REDUCING = new Set(['all-reduce', 'reduce', 'reduce-scatter']);

/** In the words of the other engines, as far as the word has it; equal words give equal texts. */
export function describeSignature(word: bigint): string {
  const found = {} as Record<Field, number>;
  let at = 0n;
  for (const [name, bits] of Object.entries(FIELDS) as [Field, bigint][]) {
    found[name] = Number((word >> at) & ((1n << bits) - 1n));
    at += bits;
  }
  const kind = KINDS[found.kind] ?? 'barrier';
  const reduceOp = REDUCE_OPS[found.fold]!;
  const text = describeCall({
    kind,
    dtype: TYPES[found.dtype] ?? 'u8',
    root: found.root - 1,
    inputs: [{ length: found.elements }],
    outputs: [],
    // Of a factor, the word has too little to say which.
    ...(REDUCING.has(kind) && reduceOp !== 'premul-sum' && { reduceOp }),
    ...(REDUCING.has(kind) && reduceOp === 'premul-sum' && { reduceOp: 'premul-sum' as never }),
  });
  return found.factor === 0 ? text : `${text} by factor #${found.factor}`;
}
