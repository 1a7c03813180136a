/** What a rank of `ep bench moe` measures, and what it tells back. */
import type { MoeForm } from '@ep/plan/moe';

/** Shared memory, and software NICs: what those take is their emulator's, and no network's. */
export const moeTransports = ['shm', 'ibgda', 'efa'] as const;
export type MoeBenchTransport = (typeof moeTransports)[number];

/** The same on all ranks. */
export interface MoeShape {
  readonly transport: MoeBenchTransport;
  readonly worldSize: number;
  readonly mode: MoeForm['mode'];
  /** Of each rank. */
  readonly tokens: number;
  readonly hidden: number;
  readonly experts: number;
  readonly topK: number;
  readonly repeats: number;
  /** Calls of the native loop; 0: none. */
  readonly steps: number;
}

export interface MoeTask extends MoeShape {
  readonly store: string;
  readonly rank: number;
}

/** Milliseconds of each repeat on this rank. */
export interface MoeTimes {
  readonly series: Readonly<Record<string, readonly number[]>>;
  /** Rows of 2 * hidden bytes that a dispatch brings here, and that this rank's combine brings back to it. */
  readonly rows: number;
  /** Nanoseconds of dispatch and combine together, in a native loop: results that are sent, and those that stay where experts have written them. */
  readonly steps?: readonly number[];
  readonly stepsInPlace?: readonly number[];
}
