/** Waiting for words of one's own part of the heap that other PEs write. */
import { type Comparison, invalid, turnLoopIfDue, type WaitOptions } from '@ep/core';
import { native } from '@ep/native';
import { awaitedRanks, checkLimits, comparisonCode, nativeTimeout, runWait, waitError } from '@ep/native/ranks';
import { encode64 } from './element.js';
import { checkSymmetric, type Space } from './space.js';
import type { Element, SymmetricArray } from './symmetric.js';

export type WaitDType = 'i8' | 'u8' | 'i16' | 'u16' | 'i32' | 'u32' | 'i64' | 'u64';

/** Elements whose `status` is not 0 are left out. */
export interface Selection {
  readonly status?: ArrayLike<number>;
}

export type WaitManyOptions = WaitOptions & Selection;

type IntegerArray = Int8Array | Uint8Array | Int16Array | Uint16Array | Int32Array | Uint32Array;

/**
 * HAZARD: a plain load of an array that nobody writes in JS may be moved out of a loop by the optimizer; an atomic one may not, and it
 * orders what is read after it.
 */
function load(array: SymmetricArray<WaitDType>, index: number): number | bigint {
  return Atomics.load(array.local as IntegerArray, index);
}

function holds(cmp: Comparison, found: number | bigint, value: number | bigint): boolean {
  switch (cmp) {
    case 'eq':
      return found === value;
    case 'ne':
      return found !== value;
    case 'lt':
      return found < value;
    case 'le':
      return found <= value;
    case 'gt':
      return found > value;
    case 'ge':
      return found >= value;
  }
}

/** Indices to look at, and what each must be. */
interface Condition {
  readonly where: string;
  readonly array: SymmetricArray<WaitDType>;
  readonly cmp: Comparison;
  readonly code: number;
  readonly indices: readonly number[];
  readonly value: (index: number) => number | bigint;
}

function wanted(array: SymmetricArray<WaitDType>, value: unknown, where: string): number | bigint {
  if (array.dtype === 'i64' || array.dtype === 'u64') return encode64(value as number | bigint, where);
  if (typeof value === 'number' && Number.isSafeInteger(value)) return value;
  throw invalid('value', { where, expected: `an integer, for ${array.dtype}`, found: value });
}

const WAITED: ReadonlySet<string> = new Set(['i8', 'u8', 'i16', 'u16', 'i32', 'u32', 'i64', 'u64']);

export function waiting(space: Space) {
  const { memory, native: words, rank } = space;

  function checkArray(array: SymmetricArray<WaitDType>, where: string): void {
    checkSymmetric(space, array, where);
    if (!WAITED.has(array.dtype)) {
      throw invalid('dtype', { where, expected: `one of ${[...WAITED].join(', ')}`, found: array.dtype });
    }
  }

  function condition(
    where: string,
    array: SymmetricArray<WaitDType>,
    cmp: Comparison,
    values: unknown,
    selection: Selection | undefined,
  ): Condition {
    checkArray(array, where);
    const status = selection?.status;
    const vector = ArrayBuffer.isView(values) || Array.isArray(values) ? (values as ArrayLike<unknown>) : undefined;
    for (const [what, list] of [['status', status] as const, ['values', vector] as const]) {
      if (list !== undefined && list.length !== array.length) {
        throw invalid(what, { where, expected: `${array.length} entries, as there are elements`, found: list.length });
      }
    }
    const indices = Array.from({ length: array.length }, (_, i) => i).filter((i) => !status || status[i] === 0);
    const same = vector === undefined ? wanted(array, values, where) : 0;
    const each = vector && Array.from({ length: array.length }, (_, i) => wanted(array, vector[i], where));
    return { where, array, cmp, code: comparisonCode(cmp), indices, value: each ? (i) => each[i]! : () => same };
  }

  const holding = ({ array, cmp, indices, value }: Condition): number[] =>
    indices.filter((i) => holds(cmp, load(array, i), value(i)));

  function nativeWords({ array, code, indices, value }: Condition): (number | bigint)[] {
    const { bytesPerElement: width, byteOffset } = array;
    const signed = array.dtype.startsWith('i') ? 1 : 0;
    // A negative number would be refused as a size: as a bigint it is taken as its 64 bits.
    return indices.flatMap((i) => [byteOffset + i * width, width, signed, code, BigInt(value(i))]);
  }

  /** Sleeps until `atLeast` of the words hold at one moment. Returns what the one word was, where there is one. */
  async function sleep(test: Condition, atLeast: number, options?: WaitOptions): Promise<bigint | undefined> {
    const timeoutMs = nativeTimeout(options, space.timeoutMs, test.where);
    const ranks = awaitedRanks(options, space);
    const list = nativeWords(test);
    const outcome = await runWait(
      native().operations,
      () => words.wordsWatch(list, atLeast, timeoutMs, ranks),
      memory.ending,
      options?.signal,
    );
    if (outcome.status === 0) return test.indices.length === 1 ? outcome.found : undefined;
    const { cmp, indices, value } = test;
    const progress =
      indices.length === 1
        ? `awaited a value ${cmp} ${value(indices[0]!)}, found ${load(test.array, indices[0]!)}`
        : `${holding(test).length} of ${indices.length} elements hold, awaited ${atLeast}`;
    const where = `${test.where} at heap offset ${test.array.byteOffset} of rank ${rank}`;
    throw space.liveness.notice(waitError(where, outcome, { awaited: options?.peers ?? [], timeoutMs, progress }));
  }

  function tried(test: Condition, atLeast: number): boolean {
    return words.wordsTry(nativeWords(test), atLeast, true);
  }

  /** The one element's value that ended the wait. */
  async function one<D extends WaitDType>(
    where: string,
    array: SymmetricArray<D>,
    cmp: Comparison,
    value: Element<D> | number,
    options?: WaitOptions,
  ): Promise<Element<D>> {
    if (options !== undefined) checkLimits(options, where, space.worldSize);
    options?.signal?.throwIfAborted();
    await turnLoopIfDue();
    const single = array?.length === 1 ? array : checkedFirst(array, where);
    checkArray(single, where);
    comparisonCode(cmp);
    const target = wanted(single, value, where);
    let found = load(single, 0);
    if (holds(cmp, found, target)) return found as Element<D>;
    const test = condition(where, single, cmp, target, undefined);
    if (tried(test, 1)) {
      found = load(single, 0);
      // It held within the call; what it is now may be newer, and need not hold any more.
      if (holds(cmp, found, target)) return found as Element<D>;
    }
    const word = (await sleep(test, 1, options))!;
    const wide = single.dtype.startsWith('i') ? BigInt.asIntN(8 * single.bytesPerElement, word) : word;
    return (single.bytesPerElement === 8 ? wide : Number(wide)) as Element<D>;
  }

  function checkedFirst<D extends WaitDType>(array: SymmetricArray<D>, where: string): SymmetricArray<D> {
    checkArray(array, where);
    if (array.length === 0) throw invalid('array', { where, expected: 'of at least one element', found: array.length });
    return array.subarray(0, 1);
  }

  type Values<D extends WaitDType> = Element<D> | number;
  type Vector<D extends WaitDType> = ArrayLike<Element<D> | number>;

  async function all(test: Condition, options: WaitManyOptions | undefined): Promise<void> {
    if (options !== undefined) checkLimits(options, test.where, space.worldSize);
    options?.signal?.throwIfAborted();
    await turnLoopIfDue();
    const wanted = test.indices.length;
    if (holding(test).length === wanted || tried(test, wanted)) return;
    await sleep(test, wanted, options);
  }

  async function some(test: Condition, options: WaitManyOptions | undefined): Promise<Uint32Array> {
    if (options !== undefined) checkLimits(options, test.where, space.worldSize);
    options?.signal?.throwIfAborted();
    await turnLoopIfDue();
    if (test.indices.length === 0) return new Uint32Array(0);
    const limit = options?.timeoutMs ?? space.timeoutMs;
    const end = performance.now() + limit;
    for (;;) {
      let held = holding(test);
      if (held.length === 0 && tried(test, 1)) held = holding(test);
      if (held.length > 0) return Uint32Array.from(held);
      // An element that held for a moment only is not reported: nobody could say which one it was.
      await sleep(test, 1, { ...options, timeoutMs: Math.max(0, end - performance.now()) });
    }
  }

  const any = async (test: Condition, options: WaitManyOptions | undefined): Promise<number | undefined> =>
    (await some(test, options))[0];

  return {
    /**
     * Resolves when the first element of `ivar` compares so with `value`. Rejects with `EP_TIMEOUT`, with `EP_PEER_LOST` when a rank died (any, or one of
     * `peers`), with `EP_ABORTED` or `EP_CLOSED` after `finalize()`, or with the reason of `signal`.
     */
    async waitUntil<D extends WaitDType>(
      ivar: SymmetricArray<D>,
      cmp: Comparison,
      value: Values<D>,
      options?: WaitOptions,
    ): Promise<void> {
      await one('waitUntil', ivar, cmp, value, options);
    },
    /** All elements at one moment. */
    async waitUntilAll<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      value: Values<D>,
      options?: WaitManyOptions,
    ): Promise<void> {
      await all(condition('waitUntilAll', ivars, cmp, value, options), options);
    },
    /** Index of an element that holds; undefined if the status leaves none. */
    async waitUntilAny<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      value: Values<D>,
      options?: WaitManyOptions,
    ): Promise<number | undefined> {
      return any(condition('waitUntilAny', ivars, cmp, value, options), options);
    },
    /** Indices of all elements that hold, at least one; empty if the status leaves none. */
    async waitUntilSome<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      value: Values<D>,
      options?: WaitManyOptions,
    ): Promise<Uint32Array> {
      return some(condition('waitUntilSome', ivars, cmp, value, options), options);
    },
    /** The vector forms compare each element with its own value. */
    async waitUntilAllVector<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      values: Vector<D>,
      options?: WaitManyOptions,
    ): Promise<void> {
      await all(condition('waitUntilAllVector', ivars, cmp, values, options), options);
    },
    async waitUntilAnyVector<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      values: Vector<D>,
      options?: WaitManyOptions,
    ): Promise<number | undefined> {
      return any(condition('waitUntilAnyVector', ivars, cmp, values, options), options);
    },
    async waitUntilSomeVector<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      values: Vector<D>,
      options?: WaitManyOptions,
    ): Promise<Uint32Array> {
      return some(condition('waitUntilSomeVector', ivars, cmp, values, options), options);
    },

    /** Whether the first element holds now. */
    test<D extends WaitDType>(ivar: SymmetricArray<D>, cmp: Comparison, value: Values<D>): boolean {
      const single = ivar?.length === 1 ? ivar : checkedFirst(ivar, 'test');
      checkArray(single, 'test');
      comparisonCode(cmp);
      return holds(cmp, load(single, 0), wanted(single, value, 'test'));
    },
    testAll<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      value: Values<D>,
      select?: Selection,
    ): boolean {
      const test = condition('testAll', ivars, cmp, value, select);
      return holding(test).length === test.indices.length;
    },
    testAny<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      value: Values<D>,
      select?: Selection,
    ): number | undefined {
      return holding(condition('testAny', ivars, cmp, value, select))[0];
    },
    testSome<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      value: Values<D>,
      select?: Selection,
    ): Uint32Array {
      return Uint32Array.from(holding(condition('testSome', ivars, cmp, value, select)));
    },
    testAllVector<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      values: Vector<D>,
      select?: Selection,
    ): boolean {
      const test = condition('testAllVector', ivars, cmp, values, select);
      return holding(test).length === test.indices.length;
    },
    testAnyVector<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      values: Vector<D>,
      select?: Selection,
    ): number | undefined {
      return holding(condition('testAnyVector', ivars, cmp, values, select))[0];
    },
    testSomeVector<D extends WaitDType>(
      ivars: SymmetricArray<D>,
      cmp: Comparison,
      values: Vector<D>,
      select?: Selection,
    ): Uint32Array {
      return Uint32Array.from(holding(condition('testSomeVector', ivars, cmp, values, select)));
    },

    /** Resolves with the value of the signal that ended the wait. */
    signalWaitUntil(
      signal: SymmetricArray<'u64'>,
      cmp: Comparison,
      value: bigint | number,
      options?: WaitOptions,
    ): Promise<bigint> {
      return one('signalWaitUntil', signal, cmp, value, options);
    },
    /** The value of a signal of this PE. */
    signalFetch(signal: SymmetricArray<'u64'>): bigint {
      checkArray(signal, 'signalFetch');
      return load(signal, 0) as bigint;
    },
  };
}
