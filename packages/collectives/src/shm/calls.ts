/** How a call is handed to the addon. */
import { type Native, type NativeCollectiveGroup, type OperationId, RepeatFrame } from '@ep/native';
import type { Elements, EngineCall } from '../engine.js';
import { factorOf, KIND_CODES, reductionCode, TYPE_CODES } from './codes.js';
import { type GroupMemory, NO_ALLOCATION } from './memory.js';

/** As the addon takes it. */
export const limitOf = (timeoutMs: number): number => (Number.isFinite(timeoutMs) ? timeoutMs : -1);

/** What the addon has to be handed besides a place; nothing for group memory. */
export const ordinary = (elements: Elements, allocation: number): Elements | undefined =>
  allocation === NO_ALLOCATION ? elements : undefined;

/** A call that may be repeated keeps its arrays from the garbage collector: no larger ones than this. */
const KEPT_BYTES = 2 ** 20;

/** All that the call does is said by values that can be compared: lists of blocks are only if nobody can change them. */
const isSimple = ({ reduceOp, inputs, outputs }: EngineCall): boolean =>
  typeof reduceOp !== 'object' && isFixed(inputs) && isFixed(outputs);

const isFixed = (blocks: readonly Elements[]): boolean => blocks.length <= 1 || Object.isFrozen(blocks);

const sameBlocks = (blocks: readonly Elements[], last: readonly Elements[]): boolean =>
  blocks === last || (blocks.length <= 1 && blocks.length === last.length && blocks[0] === last[0]);

/** The same call on the same arrays, as far as a simple one can differ. */
const repeats = (call: EngineCall, last: EngineCall): boolean =>
  call.kind === last.kind &&
  sameBlocks(call.inputs, last.inputs) &&
  sameBlocks(call.outputs, last.outputs) &&
  call.dtype === last.dtype &&
  call.reduceOp === last.reduceOp &&
  call.root === last.root &&
  call.timeoutMs === last.timeoutMs;

export class NativeCalls {
  readonly #native: Native;
  readonly #group: NativeCollectiveGroup;
  readonly #memory: GroupMemory;
  readonly #repeat: NativeCollectiveGroup['repeat'];
  readonly #repeatFrame: RepeatFrame;
  /** The addon's last call, where it may be told to do the same again. */
  #last: EngineCall | undefined;
  #epoch = 0;

  constructor(native: Native, group: NativeCollectiveGroup, memory: GroupMemory) {
    this.#native = native;
    this.#group = group;
    this.#memory = memory;
    this.#repeat = group.repeat;
    this.#repeatFrame = new RepeatFrame(group.repeat.frame);
  }

  /** Of the group, after the last call that had ended when `start` returned. */
  get epoch(): number {
    return this.#epoch;
  }

  /** Lets go of the arrays of the last call. */
  forget(): void {
    this.#last = undefined;
  }

  /** Hands the call to the addon: 0 if it has ended, which happens only where that may try it on this thread (`attempt`). */
  start(call: EngineCall, attempt: boolean): OperationId {
    const last = this.#last;
    if (attempt && last !== undefined && repeats(call, last)) return this.#again(call.sequence);
    this.#last = undefined;
    const id = this.#begin(call, attempt);
    if (id === 0) this.#epoch = this.#native.frame.epoch;
    if (id === 0 && isSimple(call) && this.#mayKeep(call.inputs) && this.#mayKeep(call.outputs)) this.#last = call;
    return id;
  }

  #again(sequence: number): OperationId {
    const repeat = this.#repeat;
    const frame = this.#repeatFrame;
    frame.sequence = sequence;
    repeat();
    const id = frame.operation;
    if (id === 0) this.#epoch = frame.epoch;
    else this.#last = undefined;
    return id;
  }

  /**
   * HAZARD: a repetition goes on with the addresses that the addon has. Those of an array of fixed length stay as they are until it is detached, which the check of
   * operands finds before.
   */
  #mayKeep(blocks: readonly Elements[]): boolean {
    return blocks.every(
      (elements) => this.#memory.allocationOf(elements) !== NO_ALLOCATION || elements.buffer.byteLength <= KEPT_BYTES,
    );
  }

  #begin(call: EngineCall, attempt: boolean): OperationId {
    const { kind, inputs, outputs } = call;
    const input = inputs[0];
    const output = outputs[0];
    const block = input ?? output;
    this.#native.frame.collective(
      KIND_CODES[kind],
      TYPE_CODES[call.dtype],
      reductionCode(call.reduceOp),
      factorOf(call.reduceOp),
      call.root,
      kind === 'all-to-all' || block === undefined ? 0 : block.byteLength,
      call.sequence,
      limitOf(call.timeoutMs),
    );
    if (kind === 'barrier') return this.#group.call(attempt);
    if (kind !== 'all-reduce' && kind !== 'broadcast' && kind !== 'reduce') return this.#beginLists(call, attempt);
    const from = input === undefined ? NO_ALLOCATION : this.#memory.allocationOf(input);
    if (output === undefined || output === input) {
      const offset = input === undefined ? 0 : input.byteOffset;
      this.#native.frame.places(from, offset, from, offset);
      return from === NO_ALLOCATION ? this.#group.call(attempt, input) : this.#group.call(attempt);
    }
    const to = this.#memory.allocationOf(output);
    this.#native.frame.places(from, input?.byteOffset ?? 0, to, output.byteOffset);
    return from === NO_ALLOCATION || to === NO_ALLOCATION
      ? this.#group.call(attempt, input, output)
      : this.#group.call(attempt);
  }

  #beginLists({ inputs, outputs }: EngineCall, attempt: boolean): OperationId {
    const placesOf = (all: readonly Elements[]): Float64Array => {
      const places = new Float64Array(3 * all.length);
      for (let i = 0; i < all.length; i++) {
        const elements = all[i]!;
        places[3 * i] = this.#memory.allocationOf(elements);
        places[3 * i + 1] = elements.byteOffset;
        places[3 * i + 2] = elements.byteLength;
      }
      return places;
    };
    return this.#group.callLists(attempt, placesOf(inputs), inputs, placesOf(outputs), outputs);
  }
}
