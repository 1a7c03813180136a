/** What collectives do to elements, as plain loops in rank order: what every engine is compared with. */
import { type DType, decode, encode, type Storage } from '@ep/core';
import type { Elements, EngineCall } from '../src/engine.js';
import type { ReduceOp, ReduceOpName } from '../src/reduce-op.js';

type Numbers = Exclude<Elements, BigInt64Array | BigUint64Array>;
type BigInts = BigInt64Array | BigUint64Array;

const isBig = (elements: Elements): elements is BigInts =>
  elements instanceof BigInt64Array || elements instanceof BigUint64Array;

const nameOf = (op: ReduceOp): ReduceOpName => (typeof op === 'string' ? op : op.op);

function combineBig(name: ReduceOpName, a: bigint, b: bigint): bigint {
  switch (name) {
    case 'sum':
      return a + b;
    case 'product':
      return a * b;
    case 'min':
      return a < b ? a : b;
    case 'max':
      return a > b ? a : b;
    case 'band':
      return a & b;
    case 'bor':
      return a | b;
    case 'bxor':
      return a ^ b;
    default:
      throw new Error(`${name} of integers`);
  }
}

function combine(name: ReduceOpName, a: number, b: number, float: boolean): number {
  switch (name) {
    case 'sum':
    case 'avg':
    case 'premul-sum':
      return a + b;
    case 'product':
      // Of 32-bit integers the product of the numbers has more bits than a number.
      return float ? a * b : Math.imul(a, b);
    case 'min':
      return Math.min(a, b);
    case 'max':
      return Math.max(a, b);
    case 'band':
      return a & b;
    case 'bor':
      return a | b;
    case 'bxor':
      return a ^ b;
  }
}

/** Stores into typed arrays round or wrap: `acc` has the type in which the reduction is done. */
function foldNumbers<T extends Numbers>(op: ReduceOp, acc: T, sources: readonly T[], float: boolean): T {
  const name = nameOf(op);
  const scaled = acc.slice() as T;
  const factor = typeof op === 'string' ? 1 : acc instanceof Float64Array ? op.factor : Math.fround(op.factor);
  for (const [turn, source] of sources.entries()) {
    for (let i = 0; i < acc.length; i++) scaled[i] = name === 'premul-sum' ? source[i]! * factor : source[i]!;
    for (let i = 0; i < acc.length; i++) {
      acc[i] = turn === 0 ? scaled[i]! : combine(name, acc[i]!, scaled[i]!, float);
    }
  }
  if (name === 'avg') for (let i = 0; i < acc.length; i++) acc[i] = acc[i]! / sources.length;
  return acc;
}

/** The reduction of `sources`, of which there is at least one, in their order. */
export function fold(dtype: DType, op: ReduceOp, sources: readonly Elements[]): Elements {
  const [first] = sources;
  if (first === undefined) throw new Error('nothing to reduce');
  if (isBig(first)) {
    const acc = first.slice();
    for (const source of sources.slice(1) as readonly BigInts[]) {
      for (let i = 0; i < acc.length; i++) acc[i] = combineBig(nameOf(op), acc[i]!, source[i]!);
    }
    return acc;
  }
  if (dtype === 'f16' || dtype === 'bf16') {
    const decoded = sources.map((source) => decode(dtype, source as Storage['f16']) as Float32Array);
    return encode(dtype, foldNumbers(op, new Float32Array(first.length), decoded, true));
  }
  return foldNumbers(op, first.slice() as Numbers, sources as readonly Numbers[], dtype === 'f32' || dtype === 'f64');
}

/** An array that was detached meanwhile has length 0 and takes nothing. */
function copy(to: Elements | undefined, from: Elements | undefined): void {
  if (to !== undefined && from !== undefined && to.length > 0) to.set(from as never);
}

/** Carries out one call of the ranks `active`, whose calls are `calls[rank]`. */
export function carryOut(active: readonly number[], calls: readonly (EngineCall | undefined)[]): void {
  const call = (rank: number): EngineCall => calls[rank]!;
  const { kind, dtype, reduceOp, root } = call(active[0]!);
  switch (kind) {
    case 'barrier':
      return;
    case 'broadcast':
      for (const rank of active) if (rank !== root) copy(call(rank).outputs[0], call(root).inputs[0]);
      return;
    case 'all-reduce':
    case 'reduce': {
      const inputs = active.map((rank) => call(rank).inputs[0]!);
      const result = fold(dtype, reduceOp ?? 'sum', inputs);
      for (const rank of active) copy(call(rank).outputs[0], result);
      return;
    }
    case 'all-gather':
    case 'gather':
      for (const to of active) for (const from of active) copy(call(to).outputs[from], call(from).inputs[0]);
      return;
    case 'scatter':
      for (const rank of active) copy(call(rank).outputs[0], call(root).inputs[rank]);
      return;
    case 'reduce-scatter':
      for (const rank of active) {
        const inputs = active.map((from) => call(from).inputs[rank]!);
        copy(call(rank).outputs[0], fold(dtype, reduceOp ?? 'sum', inputs));
      }
      return;
    case 'all-to-all':
      for (const to of active) for (const from of active) copy(call(to).outputs[from], call(from).inputs[to]);
      return;
  }
}

/** Bytes that `rank` gives to others in a call, and the number of ranks to which it gives them. */
export function payload(active: readonly number[], rank: number, call: EngineCall): { bytes: number; writes: number } {
  const others = active.filter((peer) => peer !== rank);
  const to = (peers: readonly number[], bytes: (peer: number) => number): { bytes: number; writes: number } => {
    const given = peers.map(bytes).filter((one) => one > 0);
    return { bytes: given.reduce((sum, one) => sum + one, 0), writes: given.length };
  };
  const own = call.inputs[0]?.byteLength ?? 0;
  switch (call.kind) {
    case 'barrier':
      return { bytes: 0, writes: 0 };
    case 'broadcast':
    case 'all-reduce':
    case 'all-gather':
      return to(others, () => own);
    case 'reduce':
    case 'gather':
      return to(rank === call.root ? [] : [call.root], () => own);
    case 'scatter':
    case 'reduce-scatter':
    case 'all-to-all':
      return to(others, (peer) => call.inputs[peer]?.byteLength ?? 0);
  }
}
