/** The addon's part in process groups: native/napi/bind_collective.cpp. */
import type { OperationId } from './binding.js';

/** What is known of a call that failed. */
export interface NativeCallFailure {
  /** Members when it failed. */
  readonly active: Int32Array;
  /** Those that had not come. */
  readonly missing: Int32Array;
  /** Those that died with it. */
  readonly lost: Int32Array;
  /** Seven numbers for each of `active` where their calls differ: sequence, kind, dtype, reduction, root, bytes, factor. */
  readonly calls: Float64Array;
}

/** One rank's side of a process group in shared memory: native/core/collective/group.hpp. */
export interface NativeCollectiveGroup {
  /** `ep_segment_handle` bytes, for `attach` on the others. */
  handle(): Uint8Array;
  /** `incarnation`: 1, 2, … of the processes that have had the rank. One that takes no part yet is kept until it is taken in. */
  attach(rank: number, handle: Uint8Array, incarnation: number): void;
  /** The rank cannot be reached: as if it had died. */
  lose(rank: number, incarnation: number): void;
  /** Bytes of group memory; its index. */
  allocate(byteLength: number): number;
  window(allocation: number): ArrayBuffer;
  /**
   * A call with at most one block on each side, as the frame says (`CallFrame.collective`, `CallFrame.places`); arrays where a block is not in group memory,
   * no `output` where it is the input. `attempt`: may be carried out on this thread. 0: has ended, and well.
   */
  call(attempt: boolean, input?: ArrayBufferView, output?: ArrayBufferView): OperationId;
  /**
   * The last call, which must have ended at once, with the number in its frame (`RepeatFrame`), which then holds how it went. No receiver and no arguments: finding
   * the group and reading what has not changed take two thirds of the time of a small call. HAZARD: arrays are not looked at: the caller holds them, whole.
   */
  readonly repeat: (() => void) & { readonly frame: ArrayBuffer };
  /** Any call: for each block (allocation or -1, byte offset, bytes), and its array if it is an ordinary one. */
  callLists(
    attempt: boolean,
    inputPlaces: Float64Array,
    inputs: readonly (ArrayBufferView | undefined)[],
    outputPlaces: Float64Array,
    outputs: readonly (ArrayBufferView | undefined)[],
  ): OperationId;
  /** Once an operation with ordinary outputs has ended well: copies them; undefined for those in group memory. */
  collect(operation: OperationId, outputs: readonly (ArrayBufferView | undefined)[]): void;
  /** An ordinary array is copied at once. `timeoutMs` negative: none. */
  send(
    peer: number,
    tag: number,
    dtype: number,
    byteLength: number,
    timeoutMs: number,
    allocation: number,
    byteOffset: number,
    array?: ArrayBufferView,
  ): OperationId;
  /** The outcome's `rank` is the source, its `found` the bytes of the message. */
  receive(
    peer: number,
    tag: number,
    dtype: number,
    byteLength: number,
    timeoutMs: number,
    allocation: number,
    byteOffset: number,
  ): OperationId;
  /** Once a receive into an ordinary array has ended well. */
  takeReceived(operation: OperationId, array: ArrayBufferView): void;
  failure(operation: OperationId): NativeCallFailure;
  epoch(): number;
  /** Members of an epoch that this rank has been in; empty for any other. */
  active(epoch: number): Int32Array;
  /** Four numbers (calls, bytes, writes, signals) for each kind, then for sends, then for receives. */
  trace(): Float64Array;
  /** Ranks of the group, whether or not they take part. */
  size(): number;
  /** What this rank itself knows of all that there may be: 0 absent, 1 connected, 2 waiting to be taken in, 3 taking part. */
  survey(): Uint8Array;
  /** A call that changes who takes part, or only asks. The same on all ranks, but for `repairs`. Throws where a rank or the size is beyond the capacity. */
  membership(
    sequence: number,
    timeoutMs: number,
    evicted: Int32Array,
    admitted: Int32Array,
    size: number,
    repairs: boolean,
  ): OperationId;
  /** Once it has ended well: whether those to be taken in were, and what all agree on. */
  membershipEnd(operation: OperationId): { readonly admitted: boolean; readonly states: Uint8Array };
  /** Of a rank that takes no part: waits to be taken in. The outcome's `expected` is the number of the call that did so. */
  join(timeoutMs: number): OperationId;
  /**
   * After a call that failed: moves group memory away from ranks that were taken out in the middle of writing to it. On the thread that uses the memory,
   * which nobody may change meanwhile.
   */
  fence(): void;
  /**
   * Back to back on this thread: all-reduces of two f32 (0), barriers (1) or, to compare them with, exchanges of one number that are no calls (2), which use 4096 bytes of every
   * member's first group memory; ns of each, timed 16 at a time. Every member runs it at one time.
   */
  measure(what: 0 | 1 | 2, firstSequence: number, rounds: number): Float64Array;
  close(): void;
}
