/** Arguments of the shortest native calls, handed over in memory: each that is passed as an argument costs a tenth of the call. */

/** As `frame_word` in native/napi/bind_memory.cpp; numbers are f64, the value of a signal is u64. */
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
}
