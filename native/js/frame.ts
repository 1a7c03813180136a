/** Arguments of the shortest native calls, handed over in memory: each that is passed as an argument costs a tenth of the call. */

/** As `frame_word` in native/napi/bind_memory.cpp; numbers are f64, the value of a signal is u64. Collective calls use the same words: bind_collective.cpp. */
const FRAME = { peer: 0, dstOffset: 1, srcOffset: 2, byteLength: 3, op: 4, slot: 5, value: 6 } as const;

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
    numbers[0] = kind;
    numbers[1] = dtype;
    numbers[2] = op;
    numbers[3] = factor;
    numbers[4] = root;
    numbers[5] = bytes;
    numbers[6] = sequence;
    numbers[7] = timeoutMs;
  }

  /** Of the group, after a collective call. */
  get epoch(): number {
    return this.#numbers[12]!;
  }

  /** Where the one input and the one output of `NativeCollectiveGroup.call` lie. */
  places(inputAllocation: number, inputOffset: number, outputAllocation: number, outputOffset: number): void {
    const numbers = this.#numbers;
    numbers[8] = inputAllocation;
    numbers[9] = inputOffset;
    numbers[10] = outputAllocation;
    numbers[11] = outputOffset;
  }
}
