/** How tokens get to their experts and back, wherever rows lie: as the demo's steps see it. */
import type { Store } from '@ep/core';
import type { MoeHandle, MoeLoss } from '@ep/cuda-kernels';
import type { TurnTimes } from '../demo/ping-pong-machine.js';

/** Rows in memory of the host. */
export interface HostRows {
  /** Writes one row in fp32, its scales applied. */
  readonly read: (row: number, into: Float32Array) => void;
  /** bf16 [rows, hidden]: where experts write their results. */
  readonly results: Uint16Array;
}

/** Rows that came here, until their results are combined. */
export interface Arrived {
  /** By local expert: rows, and the first of them. */
  readonly counts: Int32Array;
  readonly blockStart: Int32Array;
  /** Absent where the exchange computes the experts itself. */
  readonly host?: HostRows;
  readonly handle: MoeHandle;
  readonly stagedBytes: number;
}

/** A rank's tokens of one step: bf16 [tokens, hidden], and of each its experts and their weights. */
export interface Batch {
  readonly rows: Uint16Array;
  readonly topkIdx: Int32Array;
  readonly weights: Float32Array;
}

/** Two batches in turns: how long, and what came of each in the last round, bf16 [tokens, hidden]. */
export interface Turns {
  readonly times: TurnTimes;
  readonly results: readonly [Uint16Array, Uint16Array];
}

export interface Combined {
  /** bf16 [tokens, hidden]. */
  readonly y: Uint16Array;
  readonly lostRanks: Uint8Array;
  readonly stagedBytes: number;
}

export interface Exchange {
  /** Ordinal of this rank's GPU; absent where rows are in memory of the host. */
  readonly gpu?: number;
  readonly activeRanks: Uint8Array;
  readonly losses: ReadonlyMap<number, MoeLoss>;
  /** How each rank is reached. */
  routes(): readonly string[];
  /** bf16 rows and the choices of each. Two may be under way; collective, as `combine`. */
  dispatch(rows: Uint16Array, topkIdx: Int32Array): Promise<Arrived>;
  /** Computes the results of this rank's experts where the rows are. Absent where they are in memory of the host, for anybody to compute. */
  experts?(arrived: Arrived): Promise<void>;
  /** Results of experts, those in `arrived.host` or those that `experts` has left; the tokens' weights. Ends the call. */
  combine(arrived: Arrived, weights: Float32Array): Promise<Combined>;
  /** Waits for another one in the place of a dead rank. Collective, with nothing under way. Absent where rows are on a GPU. */
  takeIn?(store: Store, rank: number): Promise<void>;
  /** The same without another one, after a death that has ended the call of all. */
  goOnWithout?(store: Store, rank: number): Promise<void>;
  /** Collective, with nothing under way: rounds of two batches in turns, timed. Absent where rows are in memory of the host. */
  turns?(halves: readonly [Batch, Batch], rounds: number): Promise<Turns>;
  close(): Promise<void>;
}
