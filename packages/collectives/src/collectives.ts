/** The collective operations on tensors: arguments are checked here, then the lane takes the call to the engine. */
import { checkTimeout, type DType, invalid, type Rank, Resource } from '@ep/core';
import {
  checkAlike,
  checkInputAndOutput,
  checkList,
  checkLists,
  checkOptions,
  checkRank,
  checkReduceOp,
  checkSplits,
  checkWhole,
  EqualParts,
  type Pattern,
} from './checks.js';
import { coalescedCalls } from './coalesce.js';
import type { Data, GroupEngine } from './engine.js';
import { type CallLimits, type DraftCall, Lane } from './lane.js';
import { dataOf, dtypeOf, rowsOf } from './operands.js';
import type {
  CallOptions,
  GatherOptions,
  Operand,
  ReduceOptions,
  ReduceToRootOptions,
  RootOptions,
  ScatterOptions,
  SplitOptions,
} from './options.js';
import type { CallRecorder } from './recorder/types.js';
import type { ReduceOp } from './reduce-op.js';
import { type CollectiveWork, sayWhoIsMissing } from './work.js';

const NO_ARRAYS: readonly Data[] = [];
const NO_ROOT = -1;

/** A call that does not yet say when it gives up: an object of one shape for all kinds, filled in place, because copying it takes as long as a small exchange. */
const draft = (
  kind: DraftCall['kind'],
  dtype: DType,
  root: number,
  inputs: readonly Data[],
  outputs: readonly Data[],
  reduceOp?: ReduceOp,
): DraftCall => ({ kind, sequence: 0, dtype, reduceOp, root, inputs, outputs, timeoutMs: 0, signal: undefined });

const barrierCall = (): DraftCall => draft('barrier', 'u8', NO_ROOT, NO_ARRAYS, NO_ARRAYS);

/** What groups are made of. */
export interface GroupParts {
  readonly name: string;
  /** A name that no other group of the store has had. */
  readonly id: string;
  /** World rank of each member. */
  readonly ranks: readonly Rank[];
  readonly engine: GroupEngine;
  readonly recorder: CallRecorder;
  readonly timeoutMs: number;
}

export abstract class Collectives extends Resource {
  /** As given to `initProcessGroup`; that of a group made from another has more behind a slash. */
  readonly name: string;
  readonly rank: Rank;
  protected readonly lane: Lane;
  #ranks: readonly Rank[];
  readonly #timeoutMs: number;
  readonly #parts = new EqualParts();

  protected constructor({ name, id, ranks, engine, recorder, timeoutMs }: GroupParts) {
    super(`group ${name}`);
    this.name = name;
    this.#ranks = Object.freeze([...ranks]);
    this.rank = engine.rank;
    this.lane = new Lane(id, engine, recorder);
    this.#timeoutMs = timeoutMs;
  }

  /** Ranks of the group, whether or not they take part. */
  get size(): number {
    return this.lane.engine.size;
  }

  /** World rank of each member. */
  get ranks(): readonly Rank[] {
    // Only the group of the world grows, where each rank is its own.
    if (this.#ranks.length < this.size)
      this.#ranks = Object.freeze(Array.from({ length: this.size }, (_, rank) => rank));
    return this.#ranks;
  }

  /** All ranks get the root's elements. */
  broadcast(source: Operand, options: RootOptions): CollectiveWork {
    const op = 'broadcast';
    this.enter(op);
    const elements = dataOf(source, 'tensor', op);
    const root = checkRank(options?.root, 'root', op, this.size);
    const arrays = [elements];
    const isRoot = root === this.rank;
    const inputs = isRoot ? arrays : NO_ARRAYS;
    const outputs = isRoot ? NO_ARRAYS : arrays;
    return this.#run(op, draft('broadcast', dtypeOf(source), root, inputs, outputs), elements.length, options);
  }

  /** Every element becomes the reduction over that of all ranks, in rank order (of several hosts by host): the same bits on all ranks. */
  allReduce(source: Operand, options?: ReduceOptions): CollectiveWork {
    const op = 'allReduce';
    this.enter(op);
    const elements = dataOf(source, 'tensor', op);
    const dtype = dtypeOf(source);
    const arrays = [elements];
    const call = draft('all-reduce', dtype, NO_ROOT, arrays, arrays, checkReduceOp(options?.op, dtype, op));
    return this.#run(op, call, elements.length, options);
  }

  /** `allReduce` of several tensors, of any dtypes, as one operation: small ones travel together. */
  allReduceCoalesced(sources: readonly Operand[], options?: ReduceOptions): CollectiveWork {
    const op = 'allReduceCoalesced';
    this.enter(op);
    const { calls, finish } = coalescedCalls(op, sources, options?.op, this.limits(op, options));
    return this.lane.runAll(op, calls, finish);
  }

  /** As `allReduce`, but only the root's tensor changes. */
  reduce(source: Operand, options: ReduceToRootOptions): CollectiveWork {
    const op = 'reduce';
    this.enter(op);
    const elements = dataOf(source, 'tensor', op);
    const dtype = dtypeOf(source);
    const root = checkRank(options?.root, 'root', op, this.size);
    const arrays = [elements];
    const outputs = root === this.rank ? arrays : NO_ARRAYS;
    const call = draft('reduce', dtype, root, arrays, outputs, checkReduceOp(options.op, dtype, op));
    return this.#run(op, call, elements.length, options);
  }

  /** `outputs[r]` becomes rank r's input. */
  allGather(outputs: readonly Operand[], input: Operand, options?: CallOptions): CollectiveWork {
    const op = 'allGather';
    this.enter(op);
    const source = dataOf(input, 'input', op);
    const pattern = { name: 'input', dtype: dtypeOf(input), length: source.length };
    const targets = checkList(outputs, 'outputs', op, this.size, pattern);
    const inputs = [source];
    checkLists(op, { what: 'input', arrays: inputs }, { what: 'outputs', arrays: targets });
    return this.#run(op, draft('all-gather', pattern.dtype, NO_ROOT, inputs, targets), source.length, options);
  }

  /** `output`, `size` times as long as `input`, becomes all ranks' inputs one behind the other. */
  allGatherIntoTensor(output: Operand, input: Operand, options?: CallOptions): CollectiveWork {
    const op = 'allGatherIntoTensor';
    this.enter(op);
    const source = dataOf(input, 'input', op);
    const target = dataOf(output, 'output', op);
    const dtype = dtypeOf(input);
    checkAlike(output, target, 'output', op, { name: 'input', dtype });
    checkWhole(target, 'output', op, source, this.size, 'input');
    checkInputAndOutput(op, source, target);
    const call = draft('all-gather', dtype, NO_ROOT, [source], this.#parts.of(target, this.size));
    return this.#run(op, call, source.length, options);
  }

  /** On the root, `outputs[r]` becomes rank r's input. */
  gather(input: Operand, options: GatherOptions): CollectiveWork {
    const op = 'gather';
    this.enter(op);
    const source = dataOf(input, 'input', op);
    const root = checkRank(options?.root, 'root', op, this.size);
    const pattern = { name: 'input', dtype: dtypeOf(input), length: source.length };
    const targets = this.#onRoot(op, 'outputs', root, options.outputs, pattern);
    const inputs = [source];
    checkLists(op, { what: 'input', arrays: inputs }, { what: 'outputs', arrays: targets });
    return this.#run(op, draft('gather', pattern.dtype, root, inputs, targets), source.length, options);
  }

  /** `output` becomes the root's `inputs[rank]`. */
  scatter(output: Operand, options: ScatterOptions): CollectiveWork {
    const op = 'scatter';
    this.enter(op);
    const target = dataOf(output, 'output', op);
    const root = checkRank(options?.root, 'root', op, this.size);
    const pattern = { name: 'output', dtype: dtypeOf(output), length: target.length };
    const sources = this.#onRoot(op, 'inputs', root, options.inputs, pattern);
    const outputs = [target];
    checkLists(op, { what: 'inputs', arrays: sources }, { what: 'output', arrays: outputs });
    return this.#run(op, draft('scatter', pattern.dtype, root, sources, outputs), target.length, options);
  }

  /** `output` becomes the reduction over all ranks' `inputs[rank]`. */
  reduceScatter(output: Operand, inputs: readonly Operand[], options?: ReduceOptions): CollectiveWork {
    const op = 'reduceScatter';
    this.enter(op);
    const target = dataOf(output, 'output', op);
    const pattern = { name: 'output', dtype: dtypeOf(output), length: target.length };
    const sources = checkList(inputs, 'inputs', op, this.size, pattern);
    const reduceOp = checkReduceOp(options?.op, pattern.dtype, op);
    const outputs = [target];
    checkLists(op, { what: 'output', arrays: outputs }, { what: 'inputs', arrays: sources });
    const call = draft('reduce-scatter', pattern.dtype, NO_ROOT, sources, outputs, reduceOp);
    return this.#run(op, call, target.length, options);
  }

  /** `output` becomes the reduction over all ranks' `rank`-th part of `input`, which is `size` times as long. */
  reduceScatterTensor(output: Operand, input: Operand, options?: ReduceOptions): CollectiveWork {
    const op = 'reduceScatterTensor';
    this.enter(op);
    const target = dataOf(output, 'output', op);
    const source = dataOf(input, 'input', op);
    const dtype = dtypeOf(output);
    checkAlike(input, source, 'input', op, { name: 'output', dtype });
    checkWhole(source, 'input', op, target, this.size, 'output');
    const reduceOp = checkReduceOp(options?.op, dtype, op);
    checkInputAndOutput(op, source, target);
    const call = draft('reduce-scatter', dtype, NO_ROOT, this.#parts.of(source, this.size), [target], reduceOp);
    return this.#run(op, call, target.length, options);
  }

  /** `outputs[r]` becomes rank r's `inputs[rank]`, which is as long. */
  allToAll(outputs: readonly Operand[], inputs: readonly Operand[], options?: CallOptions): CollectiveWork {
    const op = 'allToAll';
    this.enter(op);
    const targets = checkList(outputs, 'outputs', op, this.size, 'dtype alike');
    const sources = checkList(inputs, 'inputs', op, this.size, { name: 'outputs[0]', dtype: dtypeOf(outputs[0]!) });
    checkLists(op, { what: 'inputs', arrays: sources }, { what: 'outputs', arrays: targets });
    const elements = sources.reduce((sum, one) => sum + one.length, 0);
    return this.#exchange(op, dtypeOf(outputs[0]!), sources, targets, elements, options);
  }

  /** As `allToAll`, of the rows of one tensor into those of another. */
  allToAllSingle(output: Operand, input: Operand, options?: SplitOptions): CollectiveWork {
    const op = 'allToAllSingle';
    this.enter(op);
    const target = dataOf(output, 'output', op);
    const source = dataOf(input, 'input', op);
    const dtype = dtypeOf(input);
    checkAlike(output, target, 'output', op, { name: 'input', dtype });
    const sources = checkSplits(options?.inputSplits, 'inputSplits', op, this.size, {
      elements: source,
      parts: this.#parts,
      ...rowsOf(input),
    });
    const targets = checkSplits(options?.outputSplits, 'outputSplits', op, this.size, {
      elements: target,
      parts: this.#parts,
      ...rowsOf(output),
    });
    checkInputAndOutput(op, source, target);
    return this.#exchange(op, dtype, sources, targets, source.length, options);
  }

  /** Ends when all ranks have come. */
  barrier(options?: CallOptions): CollectiveWork {
    const op = 'barrier';
    this.enter(op);
    return this.#run(op, barrierCall(), 0, options);
  }

  /** As `barrier`; its `EP_TIMEOUT` says which ranks have not come, all of them (`context.awaited`). */
  monitoredBarrier(options?: CallOptions): CollectiveWork {
    const op = 'monitoredBarrier';
    this.enter(op);
    const explain = (error: unknown) => sayWhoIsMissing(error, op, this.size);
    return this.#run(op, barrierCall(), 0, options, explain);
  }

  /** Throws if the group is closed, or what an earlier operation left behind. */
  protected enter(op: string): void {
    this.checkOpen(op);
    this.lane.check();
  }

  protected limits(op: string, options: CallOptions | undefined): CallLimits {
    return { timeoutMs: this.#timeout(op, options), signal: options?.signal };
  }

  #timeout(op: string, options: CallOptions | undefined): number {
    if (options === undefined) return this.#timeoutMs;
    checkOptions(options, op);
    options.signal?.throwIfAborted();
    return options.timeoutMs === undefined ? this.#timeoutMs : checkTimeout(options.timeoutMs, op);
  }

  #run(
    op: string,
    call: DraftCall,
    elements: number,
    options: CallOptions | undefined,
    explain?: (error: unknown) => unknown,
  ): CollectiveWork {
    call.timeoutMs = this.#timeout(op, options);
    call.signal = options?.signal;
    return this.lane.run(op, call, elements, explain);
  }

  /** The list that the root must give, and no other rank may. */
  #onRoot(
    op: string,
    what: string,
    root: Rank,
    list: readonly Operand[] | undefined,
    pattern: Pattern,
  ): readonly Data[] {
    if (root === this.rank) return checkList(list, what, op, this.size, pattern);
    if (list === undefined) return NO_ARRAYS;
    throw invalid(what, { where: op, expected: `absent but on the root, rank ${root}`, found: list });
  }

  #exchange(
    op: string,
    dtype: DType,
    inputs: readonly Data[],
    outputs: readonly Data[],
    elements: number,
    options: CallOptions | undefined,
  ): CollectiveWork {
    const own = inputs[this.rank]!.length;
    if (outputs[this.rank]!.length !== own) {
      const found = outputs[this.rank]!.length;
      throw invalid(`part of rank ${this.rank} for itself`, {
        where: op,
        expected: `as long in the output as in the input, ${own} elements`,
        found,
      });
    }
    return this.#run(op, draft('all-to-all', dtype, NO_ROOT, inputs, outputs), elements, options);
  }
}
