/**
 * Reductions in plain TypeScript, to the bit what the table of reduce-op.ts says; native/core/collective/reduce.hpp is the same in C++.
 *
 * A NaN that sum, product, avg or premul-sum give is the canonical quiet one (f64 0x7ff8000000000000, f32 0x7fc00000, f16 0x7e00, bf16 0x7fc0): which
 * NaN an addition keeps depends on the machine. min and max give the first NaN among the elements, with its sign and payload, made quiet. `factor` of
 * premul-sum is first rounded to f32 but for f64. All of this holds for one source, too.
 */
import { type DType, decode, EpError, encode, type Storage } from '@ep/core';
import type { Elements } from './engine.js';
import { type ReduceOp, type ReduceOpName, refusal } from './reduce-op.js';

export function reduceOpName(op: ReduceOp): ReduceOpName {
  return typeof op === 'string' ? op : op.op;
}

type Floats = Float32Array | Float64Array;
type SmallIntegers = Int32Array | Uint32Array | Int16Array | Uint16Array | Int8Array | Uint8Array;
type BigIntegers = BigInt64Array | BigUint64Array;

/** Where the NaNs of a float array are written and read: as numbers, engines may change or fold them. */
class NaNBits {
  readonly #words: Uint32Array;
  readonly #wide: boolean;

  constructor(floats: Floats) {
    this.#wide = floats instanceof Float64Array;
    this.#words = new Uint32Array(floats.buffer, floats.byteOffset, floats.byteLength / 4);
  }

  setCanonical(i: number): void {
    if (this.#wide) {
      this.#words[2 * i] = 0;
      this.#words[2 * i + 1] = 0x7ff80000;
    } else {
      this.#words[i] = 0x7fc00000;
    }
  }

  copyQuiet(i: number, from: NaNBits): void {
    if (this.#wide) {
      this.#words[2 * i] = from.#words[2 * i]!;
      this.#words[2 * i + 1] = from.#words[2 * i + 1]! | 0x80000;
    } else {
      this.#words[i] = from.#words[i]! | 0x400000;
    }
  }
}

/** sum, avg, product and premul-sum: `round` after every step. */
function foldArithmetic(
  op: ReduceOp,
  target: Floats,
  sources: readonly Floats[],
  round: (value: number) => number,
  ranks: number,
): void {
  const bits = new NaNBits(target);
  const name = reduceOpName(op);
  const factor = typeof op === 'string' ? 1 : round(op.factor);
  const product = name === 'product';
  const scaled = name === 'premul-sum';
  const count = sources.length;
  const first = sources[0]!;
  for (let i = 0; i < target.length; i++) {
    let folded = scaled ? round(first[i]! * factor) : first[i]!;
    for (let s = 1; s < count; s++) {
      const next = sources[s]![i]!;
      folded = round(product ? folded * next : folded + (scaled ? round(next * factor) : next));
    }
    if (name === 'avg') folded = round(folded / ranks);
    if (Number.isNaN(folded)) bits.setCanonical(i);
    else target[i] = folded;
  }
}

/** Math.min and Math.max order -0 below +0 and pass NaN on, but not its payload. */
function foldExtreme(pick: (a: number, b: number) => number, target: Floats, sources: readonly Floats[]): void {
  const bits = new NaNBits(target);
  for (let i = 0; i < target.length; i++) {
    let folded = sources[0]![i]!;
    for (let s = 1; s < sources.length; s++) folded = pick(folded, sources[s]![i]!);
    if (Number.isNaN(folded)) bits.copyQuiet(i, new NaNBits(sources.find((source) => Number.isNaN(source[i]!))!));
    else target[i] = folded;
  }
}

function reduceFloats(op: ReduceOp, target: Floats, sources: readonly Floats[], ranks: number): void {
  const name = reduceOpName(op);
  if (name === 'min') foldExtreme(Math.min, target, sources);
  else if (name === 'max') foldExtreme(Math.max, target, sources);
  else foldArithmetic(op, target, sources, target instanceof Float64Array ? (value) => value : Math.fround, ranks);
}

function reduceHalves(
  dtype: 'f16' | 'bf16',
  op: ReduceOp,
  target: Uint16Array,
  sources: readonly Uint16Array[],
  ranks: number,
): void {
  const folded = new Float32Array(target.length);
  reduceFloats(
    op,
    folded,
    sources.map((source) => decode(dtype, source)),
    ranks,
  );
  target.set(encode(dtype, folded));
}

/** Modulo 2^32, of which a store into the target keeps the lower bits. min and max compare what the arrays hold, signed or not. */
const SMALL_STEPS: { readonly [name in ReduceOpName]?: (a: number, b: number) => number } = {
  sum: (a, b) => (a + b) | 0,
  product: Math.imul,
  min: Math.min,
  max: Math.max,
  band: (a, b) => a & b,
  bor: (a, b) => a | b,
  bxor: (a, b) => a ^ b,
};

const BIG_STEPS: { readonly [name in ReduceOpName]?: (a: bigint, b: bigint) => bigint } = {
  sum: (a, b) => a + b,
  product: (a, b) => a * b,
  // biome-ignore lint/complexity/useMathMinMax: Math.min takes no bigints.
  min: (a, b) => (b < a ? b : a),
  // biome-ignore lint/complexity/useMathMinMax: nor does Math.max.
  max: (a, b) => (b > a ? b : a),
  band: (a, b) => a & b,
  bor: (a, b) => a | b,
  bxor: (a, b) => a ^ b,
};

function reduceSmall(name: ReduceOpName, target: SmallIntegers, sources: readonly SmallIntegers[]): void {
  const step = SMALL_STEPS[name]!;
  for (let i = 0; i < target.length; i++) {
    let folded = sources[0]![i]!;
    for (let s = 1; s < sources.length; s++) folded = step(folded, sources[s]![i]!);
    target[i] = folded;
  }
}

function reduceBig(name: ReduceOpName, target: BigIntegers, sources: readonly BigIntegers[]): void {
  const step = BIG_STEPS[name]!;
  const wrap = target instanceof BigInt64Array ? BigInt.asIntN : BigInt.asUintN;
  for (let i = 0; i < target.length; i++) {
    let folded = sources[0]![i]!;
    for (let s = 1; s < sources.length; s++) folded = wrap(64, step(folded, sources[s]![i]!));
    target[i] = folded;
  }
}

/**
 * `target[i]` = fold of `sources[0][i]`, `sources[1][i]`, …, in this order; at least one source, all as long as `target`, which may be one of them but
 * overlaps none otherwise. `ranks` is what `avg` divides by: as many as sources, unless these are sums of several ranks each. Throws `EP_INVALID_ARGUMENT` if `op`
 * does not take `dtype`.
 */
export function reduceInto<D extends DType>(
  dtype: D,
  op: ReduceOp,
  target: Storage[D],
  sources: readonly Storage[D][],
  ranks?: number,
): void;
export function reduceInto(
  dtype: DType,
  op: ReduceOp,
  target: Elements,
  sources: readonly Elements[],
  ranks: number = sources.length,
): void {
  const name = reduceOpName(op);
  const why = refusal(name, dtype);
  if (why !== undefined) throw new EpError('EP_INVALID_ARGUMENT', `reduce: ${why}`);
  switch (dtype) {
    case 'f64':
    case 'f32':
      reduceFloats(op, target as Floats, sources as readonly Floats[], ranks);
      break;
    case 'f16':
    case 'bf16':
      reduceHalves(dtype, op, target as Uint16Array, sources as readonly Uint16Array[], ranks);
      break;
    case 'i64':
    case 'u64':
      reduceBig(name, target as BigIntegers, sources as readonly BigIntegers[]);
      break;
    default:
      reduceSmall(name, target as SmallIntegers, sources as readonly SmallIntegers[]);
  }
}
