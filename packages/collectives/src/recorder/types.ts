/** What a process group tells a flight recorder: each call when it was made, and how it ended. */
import type { DType } from '@ep/core';
import type { OpKind } from '../engine.js';
import type { ReduceOpName } from '../reduce-op.js';

/** One call of one rank. Numbers that a call has not are -1, texts ''. Ranks are ranks of the group. */
export interface CallEntry {
  /** Name of the group: with `sequence` it says which calls of several ranks belong together. */
  readonly group: string;
  /** Of this rank in that group. */
  readonly rank: number;
  readonly kind: OpKind | 'send' | 'recv' | 'membership';
  /** The method that was called: `allGatherIntoTensor` and `allGather` are one kind. */
  readonly op: string;
  /** Collectives: as `EngineCall.sequence`. `send`, `recv`: 1, 2, 3, … of the messages of this group on this rank, of no meaning to others. */
  readonly sequence: number;
  readonly dtype: DType;
  /** n of the table at `EngineCall`; of all-to-all the elements that this rank sends; of `recv` the room for them. */
  readonly elements: number;
  /** `elements` in bytes. */
  readonly bytes: number;
  readonly root: number;
  readonly reduceOp: ReduceOpName | '';
  /** `send`, `recv`: the other rank, -1 for any. */
  readonly peer: number;
  readonly tag: number;
}

/** `aborted`: cut off by the caller's signal or by closing the group. */
export type CallOutcome = 'done' | 'failed' | 'aborted';

/**
 * Told of every call of the groups that share it, in the order of the calls, on the thread that makes them.
 *
 * HAZARD: runs inside every call, also of those that end in half a microsecond: it must not throw, and `begin` must not keep `entry`, which the group
 * fills anew for its next call.
 */
export interface CallRecorder {
  /** Returns what `end` is called with, once. */
  readonly begin: (entry: CallEntry) => number;
  readonly end: (token: number, outcome: CallOutcome, error?: unknown) => void;
}
