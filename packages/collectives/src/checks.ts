/** What c10d refuses before anything moves, each with its own message. */
import { type AbortOptions, checkInteger, checkSignal, type DType, EpError, invalid, type Rank } from '@ep/core';
import { DeviceElements } from './device/elements.js';
import type { Data, Elements, GroupEngine } from './engine.js';
import { dataOf, dtypeOf, isKept, messageData } from './operands.js';
import type { MessageOp, Operand } from './options.js';
import { REDUCE_OPS, type ReduceOp, type ReduceOpName, refusal } from './reduce-op.js';

const NAMES: ReadonlySet<unknown> = new Set(REDUCE_OPS);

export function checkRank(rank: Rank | undefined, what: string, where: string, size: number): Rank {
  return checkInteger(rank, what, where, 0, size - 1);
}

/** Throws unless they are an object with a signal that is one, or absent. */
export function checkOptions(options: AbortOptions | undefined, where: string): void {
  if (options === undefined) return;
  if (typeof options !== 'object' || options === null) {
    throw invalid('options', { where, expected: 'an object', found: options });
  }
  checkSignal(options.signal, where);
}

/** Throws for the first message of a batch that `send` or `recv` would refuse. */
export function checkBatch(ops: readonly MessageOp[], where: string, engine: GroupEngine): void {
  if (!Array.isArray(ops)) throw invalid('ops', { where, expected: 'a list of messages', found: ops });
  for (const [i, message] of (ops as readonly MessageOp[]).entries()) {
    const at = `${where}: ops[${i}]`;
    if (typeof message !== 'object' || message === null) {
      throw invalid(`ops[${i}]`, { where, expected: 'a message', found: message });
    }
    const { op, peer } = message;
    if (op !== 'send' && op !== 'recv') throw invalid('op', { where: at, expected: "'send' or 'recv'", found: op });
    if (op === 'send' || peer !== undefined) checkRank(peer, 'peer', at, engine.size);
    messageData(message.tensor, at, engine);
    checkTag(message.tag, at);
  }
}

/** What a tag may be: c10d's tags are 32-bit. */
const LARGEST_TAG = 2 ** 31 - 1;

export function checkTag(tag: number | undefined, where: string): number {
  return tag === undefined ? 0 : checkInteger(tag, 'tag', where, 0, LARGEST_TAG);
}

export const reduceOpName = (op: ReduceOp): ReduceOpName => (typeof op === 'string' ? op : op.op);

/** The last pair that was accepted: a loop of small reductions asks for one and the same. */
let acceptedOp: ReduceOp | undefined;
let acceptedDtype: DType | undefined;

/** The reduction, `sum` unless given. Throws for one that there is not, and for one that does not take the dtype. */
export function checkReduceOp(op: ReduceOp | undefined, dtype: DType, where: string): ReduceOp {
  const chosen = op ?? 'sum';
  if (typeof chosen === 'string' && chosen === acceptedOp && dtype === acceptedDtype) return chosen;
  const name = reduceOpName(chosen);
  if (!NAMES.has(name) || (name === 'premul-sum' && typeof chosen === 'string')) {
    const expected = `one of ${REDUCE_OPS.slice(0, -1).join(', ')} or { op: 'premul-sum', factor }`;
    throw invalid('op', { where, expected, found: typeof chosen === 'string' ? chosen : name });
  }
  if (typeof chosen !== 'string' && typeof chosen.factor !== 'number') {
    throw invalid('op.factor', { where, expected: 'a number', found: chosen.factor });
  }
  const why = refusal(name, dtype);
  if (why === undefined) {
    acceptedOp = chosen;
    acceptedDtype = dtype;
    return chosen;
  }
  throw new EpError('EP_INVALID_ARGUMENT', `${where}: ${why}`, { context: { where, op: name, dtype } });
}

/** What the other tensors of a call must be like. */
export interface Pattern {
  /** The tensor that they are compared with, as messages name it. */
  readonly name: string;
  readonly dtype: DType;
  /** Elements of each; any if absent. */
  readonly length?: number;
}

export function checkAlike(source: Operand, elements: Data, what: string, where: string, like: Pattern): void {
  const dtype = dtypeOf(source);
  if (dtype !== like.dtype) {
    throw invalid(`dtype of ${what}`, { where, expected: `${like.dtype} as of ${like.name}`, found: dtype });
  }
  if (like.length !== undefined && elements.length !== like.length) {
    throw invalid(`length of ${what}`, {
      where,
      expected: `${like.length} elements as of ${like.name}`,
      found: elements.length,
    });
  }
}

/** One tensor for each rank, all like each other and, if given, like `like`. */
export function checkList(
  sources: readonly Operand[] | undefined,
  what: string,
  where: string,
  size: number,
  like?: Pattern | 'dtype alike',
): Data[] {
  if (!Array.isArray(sources)) {
    throw invalid(what, { where, expected: `a list of ${size} tensors, one for each rank`, found: sources });
  }
  if (sources.length !== size) {
    throw invalid(`length of ${what}`, { where, expected: `${size}, one tensor for each rank`, found: sources.length });
  }
  // Also of a list with holes, which map() skips.
  const all = Array.from(sources as readonly Operand[], (source, rank) => dataOf(source, `${what}[${rank}]`, where));
  const first: Pattern = {
    name: `${what}[0]`,
    dtype: dtypeOf(sources[0]),
    ...(like !== 'dtype alike' && { length: all[0]!.length }),
  };
  const pattern = typeof like === 'object' ? like : first;
  for (let rank = 0; rank < size; rank++) checkAlike(sources[rank], all[rank]!, `${what}[${rank}]`, where, pattern);
  return all;
}

/** `total` is what the parts of `whole` must be in all. */
export function checkWhole(whole: Data, what: string, where: string, part: Data, size: number, of: string): void {
  if (whole.length === part.length * size) return;
  throw invalid(`length of ${what}`, {
    where,
    expected: `${part.length * size} elements, ${size} times those of ${of}`,
    found: whole.length,
  });
}

/**
 * The equal parts of arrays, without a copy: the same frozen list for the same array. That is how an engine sees that a call repeats, which would otherwise have
 * to look at every part of it.
 */
export class EqualParts {
  static readonly #wholes = new WeakMap<readonly Data[], Data>();
  readonly #lists = new WeakMap<Data, readonly Data[]>();

  /** What the arrays of a call are the equal parts of, where its form says so: then they are on all ranks. */
  static wholeOf(list: readonly Data[]): Data | undefined {
    return EqualParts.#wholes.get(list);
  }

  of(whole: Elements, size: number): readonly Elements[];
  of(whole: Data, size: number): readonly Data[];
  of(whole: Data, size: number): readonly Data[] {
    const made = this.#lists.get(whole);
    // HAZARD: groups grow, and the buffer of an array may grow or shrink under it.
    if (made?.length === size && made[0]!.length * size === whole.length) return made;
    const length = whole.length / size;
    const list = Object.freeze(Array.from({ length: size }, (_, i) => whole.subarray(i * length, (i + 1) * length)));
    this.#lists.set(whole, list);
    EqualParts.#wholes.set(list, whole);
    return list;
  }
}

/** The parts of `whole` by rows. */
export function checkSplits(
  splits: readonly number[] | undefined,
  what: 'inputSplits' | 'outputSplits',
  where: string,
  size: number,
  whole: {
    readonly elements: Data;
    readonly rows: number;
    readonly rowElements: number;
    readonly parts: EqualParts;
  },
): readonly Data[] {
  const { elements, rows, rowElements } = whole;
  const tensor = what === 'inputSplits' ? 'input' : 'output';
  if (splits === undefined) {
    if (rows % size === 0) return whole.parts.of(elements, size);
    throw invalid(`rows of ${tensor}`, { where, expected: `a multiple of ${size} without ${what}`, found: rows });
  }
  if (!Array.isArray(splits) || splits.length !== size) {
    const found = Array.isArray(splits) ? splits.length : splits;
    throw invalid(what, { where, expected: `a list of ${size} numbers of rows, one for each rank`, found });
  }
  let at = 0;
  const ends = Array.from(splits as readonly unknown[], (split, rank) => {
    at += checkInteger(split, `${what}[${rank}]`, where);
    return at;
  });
  if (at !== rows) throw invalid(`sum of ${what}`, { where, expected: `${rows}, the rows of ${tensor}`, found: at });
  return ends.map((end, rank) =>
    elements.subarray((rank === 0 ? 0 : ends[rank - 1]!) * rowElements, end * rowElements),
  );
}

interface Extent {
  readonly group: NamedArrays;
  readonly index: number;
  readonly begin: number;
  readonly end: number;
}

/** Arrays of one call, as messages name them. */
export interface NamedArrays {
  readonly what: string;
  readonly arrays: readonly Data[];
}

/** Throws unless all tensors of a call lie in host memory, or all on the device. */
function checkOnePlace(where: string, inputs: NamedArrays, outputs: NamedArrays): void {
  const onDevice = (inputs.arrays[0] ?? outputs.arrays[0]) instanceof DeviceElements;
  for (const { arrays } of [inputs, outputs]) {
    for (const one of arrays) {
      if (one instanceof DeviceElements === onDevice) continue;
      throw invalid('tensors', {
        where,
        expected: 'all in host memory, or all on the device of the group',
        found: 'some of each',
      });
    }
  }
}

/** Throws unless all tensors of a call lie in one place, and apart. */
export function checkLists(where: string, inputs: NamedArrays, outputs: NamedArrays): void {
  checkApart(where, inputs, outputs);
  checkOnePlace(where, inputs, outputs);
}

/** The last input and output that were accepted: a loop of small calls has the same two, and to ask arrays for their buffers takes longer than to exchange them. */
let acceptedInput: Data | undefined;
let acceptedOutput: Data | undefined;

/** Of a call on two whole tensors, whose parts are apart because they are parts: throws unless both lie in one place, and apart. */
export function checkInputAndOutput(where: string, input: Data, output: Data): void {
  if (input === acceptedInput && output === acceptedOutput) return;
  checkLists(where, { what: 'input', arrays: [input] }, { what: 'output', arrays: [output] });
  // Arrays of host memory have buffers of fixed length here, so where they begin and end stays; one that is taken away overlaps nothing.
  if (isKept(input) && isKept(output)) {
    acceptedInput = input;
    acceptedOutput = output;
  }
}

/** Up to so many arrays, looking at every pair is faster than sorting, and leaves nothing to the garbage collector. */
const FEW_ARRAYS = 16;

/** Throws unless no output shares bytes with another array of the call. Inputs may overlap inputs only where engines read them apart: they may not. */
export function checkApart(where: string, ...groups: readonly NamedArrays[]): void {
  let count = 0;
  for (const { arrays } of groups) count += arrays.length;
  if (count > FEW_ARRAYS) checkSorted(where, groups);
  else checkPairs(where, groups);
}

function checkPairs(where: string, groups: readonly NamedArrays[]): void {
  for (let g = 0; g < groups.length; g++) {
    const { arrays } = groups[g]!;
    for (let i = 0; i < arrays.length; i++) {
      const one = arrays[i]!;
      for (let h = g; h < groups.length; h++) {
        const others = groups[h]!.arrays;
        for (let j = h === g ? i + 1 : 0; j < others.length; j++) {
          const other = others[j]!;
          if (one.buffer !== other.buffer || one.byteLength === 0 || other.byteLength === 0) continue;
          if (one.byteOffset >= other.byteOffset + other.byteLength) continue;
          if (other.byteOffset >= one.byteOffset + one.byteLength) continue;
          const names = [nameOf(groups[g]!, i), nameOf(groups[h]!, j)] as const;
          throw one.byteOffset <= other.byteOffset ? overlap(where, ...names) : overlap(where, names[1], names[0]);
        }
      }
    }
  }
}

function checkSorted(where: string, groups: readonly NamedArrays[]): void {
  const byBuffer = new Map<object, Extent[]>();
  for (const group of groups) {
    for (let i = 0; i < group.arrays.length; i++) {
      const { buffer, byteOffset, byteLength } = group.arrays[i]!;
      if (byteLength === 0) continue;
      const extent = { group, index: i, begin: byteOffset, end: byteOffset + byteLength };
      const others = byBuffer.get(buffer);
      if (others === undefined) byBuffer.set(buffer, [extent]);
      else others.push(extent);
    }
  }
  for (const extents of byBuffer.values()) {
    extents.sort((a, b) => a.begin - b.begin);
    for (let i = 1; i < extents.length; i++) {
      const before = extents[i - 1]!;
      const after = extents[i]!;
      if (after.begin < before.end)
        throw overlap(where, nameOf(before.group, before.index), nameOf(after.group, after.index));
    }
  }
}

const nameOf = ({ what, arrays }: NamedArrays, i: number): string => (arrays.length === 1 ? what : `${what}[${i}]`);

const overlap = (where: string, one: string, other: string): EpError =>
  new EpError('EP_INVALID_ARGUMENT', `${where}: ${one} and ${other} overlap in memory`, {
    context: { where, arrays: [one, other] },
  });
