/** What a host stream measures of the machine and of transports: a loop of JS would measure itself. */
import type { NativeDispatch, NativeOperand, NativeTeam, OperationId } from './binding.js';

export interface StreamMeasurements {
  /** Measures put-with-signal there and back: one round-trip time in ns per round, as f64, into `samples`. Both ranks run it. */
  pingPong(description: {
    readonly handle: Uint8Array;
    readonly peer: number;
    /** True on the rank that begins. */
    readonly first: boolean;
    readonly rounds: number;
    /** A multiple of 8. */
    readonly byteLength: number;
    readonly slot: number;
    /** The slot's value before either rank began. */
    readonly base: bigint;
    readonly samples: NativeOperand;
    readonly timeoutMs: number;
    /** Two plain stores and a spin instead of the put and the wait, of 8 bytes: the hand-over that the machine itself is capable of. */
    readonly bare?: boolean;
  }): OperationId;
  /**
   * Measures puts with signal over a memory that a rank's thread serves, at most `window` under way: `found` of the outcome is the time in ns until the last has landed. Message i comes from
   * i % window * byteLength of this rank's memory, and goes to there in the second half of the peer's, each with 1 added to the slot.
   */
  putStream(description: {
    readonly handle: Uint8Array;
    readonly peer: number;
    readonly messages: number;
    readonly byteLength: number;
    readonly window: number;
    readonly slot: number;
    readonly timeoutMs: number;
  }): OperationId;
  /**
   * Measures barriers of a team, back to back: one duration in ns per round, as f64, into `samples`. The first word of each rank's part of the memory counts the rounds that it
   * has entered; a member that had not entered a round which this rank left ends the operation as a mismatch, with that word as `found`.
   */
  barriers(description: {
    readonly team: NativeTeam;
    readonly handle: Uint8Array;
    /** Rounds that all members have run with this memory before. */
    readonly first: number;
    readonly rounds: number;
    readonly samples: NativeOperand;
    readonly timeoutMs: number;
  }): OperationId;
  /**
   * Measures dispatch steps, one after the other, with credits: one duration in ns per round, as f64, into `samples`. Every received word is checked. Of one
   * part of packed rows, in a memory whose counters are 0; `chunks` by rank, as `counters` of the first call.
   */
  dispatchSteps(
    dispatch: NativeDispatch,
    chunks: Float64Array,
    timeoutMs: number,
    rounds: number,
    source: NativeOperand,
    srcOffset: number,
    strideBytes: number,
    receivedBytes: number,
    samples: NativeOperand,
  ): OperationId;
}
