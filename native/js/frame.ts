/** Arguments of the shortest native calls, handed over in memory: each that is passed as an argument costs a tenth of the call. */

/** As `frame_word` in native/napi/bind_memory.cpp; numbers are f64, the value of a signal is u64. */
const FRAME = { peer: 0, dstOffset: 1, srcOffset: 2, byteLength: 3, op: 4, slot: 5, value: 6 } as const;

/** The same words in a collective call, as `frame_word` in native/napi/bind_collective.cpp. */
const CALL_FRAME = {
  kind: 0,
  dtype: 1,
  op: 2,
  factor: 3,
  root: 4,
  bytes: 5,
  sequence: 6,
  timeoutMs: 7,
  inputAllocation: 8,
  inputOffset: 9,
  outputAllocation: 10,
  outputOffset: 11,
  epoch: 12,
} as const;

/** HAZARD: one for all calls of an environment. Write and call at once; nothing else may run in between. */
export class CallFrame {
  readonly #numbers: Float64Array;
  readonly #words: BigUint64Array;

  constructor(buffer: ArrayBuffer) {
    this.#numbers = new Float64Array(buffer);
    this.#words = new BigUint64Array(buffer);
  }

  /** For `putFrame` (op 0: no signal). The addon checks the range of each number; what is no number becomes NaN, which it refuses. */
  put(peer: number, dstOffset: number, srcOffset: number, byteLength: number): void {
    const numbers = this.#numbers;
    numbers[FRAME.peer] = peer;
    numbers[FRAME.dstOffset] = dstOffset;
    numbers[FRAME.srcOffset] = srcOffset;
    numbers[FRAME.byteLength] = byteLength;
  }

  /** The signal of `putFrame`, and all that `signalFrame` needs besides `peer`. `value` modulo 2^64. */
  signal(peer: number, op: number, slot: number, value: bigint): void {
    const numbers = this.#numbers;
    numbers[FRAME.peer] = peer;
    numbers[FRAME.op] = op;
    numbers[FRAME.slot] = slot;
    this.#words[FRAME.value] = value;
  }

  /** Of the calls of `NativeCollectiveGroup`. Places are (allocation, byte offset); allocation -1: an ordinary array. */
  collective(
    kind: number,
    dtype: number,
    op: number,
    factor: number,
    root: number,
    bytes: number,
    sequence: number,
    timeoutMs: number,
  ): void {
    const numbers = this.#numbers;
    numbers[CALL_FRAME.kind] = kind;
    numbers[CALL_FRAME.dtype] = dtype;
    numbers[CALL_FRAME.op] = op;
    numbers[CALL_FRAME.factor] = factor;
    numbers[CALL_FRAME.root] = root;
    numbers[CALL_FRAME.bytes] = bytes;
    numbers[CALL_FRAME.sequence] = sequence;
    numbers[CALL_FRAME.timeoutMs] = timeoutMs;
  }

  /** Of the group, after a collective call. */
  get epoch(): number {
    return this.#numbers[CALL_FRAME.epoch]!;
  }

  /** Where the one input and the one output of `NativeCollectiveGroup.call` lie. */
  places(inputAllocation: number, inputOffset: number, outputAllocation: number, outputOffset: number): void {
    const numbers = this.#numbers;
    numbers[CALL_FRAME.inputAllocation] = inputAllocation;
    numbers[CALL_FRAME.inputOffset] = inputOffset;
    numbers[CALL_FRAME.outputAllocation] = outputAllocation;
    numbers[CALL_FRAME.outputOffset] = outputOffset;
  }
}

/** As `repeat_word` in native/napi/bind_collective.cpp. */
const REPEAT_FRAME = { sequence: 0, operation: 1, epoch: 2 } as const;

/** Of one group's `repeat`. */
export class RepeatFrame {
  readonly #numbers: Float64Array;

  constructor(buffer: ArrayBuffer) {
    this.#numbers = new Float64Array(buffer);
  }

  set sequence(sequence: number) {
    this.#numbers[REPEAT_FRAME.sequence] = sequence;
  }

  /** Of the call that was repeated: 0 if it has ended, and well. */
  get operation(): number {
    return this.#numbers[REPEAT_FRAME.operation]!;
  }

  /** Of the group, after a call that has ended. */
  get epoch(): number {
    return this.#numbers[REPEAT_FRAME.epoch]!;
  }
}
