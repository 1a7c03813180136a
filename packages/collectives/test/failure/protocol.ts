/** What a scenario tells its ranks, and what they tell it. */
import type { OpKind } from '../../src/index.js';

export const OPERATIONS = [
  'barrier',
  'broadcast',
  'all-reduce',
  'reduce',
  'all-gather',
  'gather',
  'scatter',
  'reduce-scatter',
  'all-to-all',
] as const satisfies readonly OpKind[];

/**
 * When a victim dies. `before`: it never comes to the call. `posted`: right after it made the call, whatever the engine does by then. `after`: once the
 * call has ended for it. `inside`: in the middle of a call of one chunk, or wherever the stepped delay falls. `chunks`: in a call of many chunks.
 * `queue`: with many calls posted behind each other.
 */
export const MOMENTS = ['before', 'posted', 'after', 'inside', 'chunks', 'queue'] as const;
export type Moment = (typeof MOMENTS)[number];

export type BackendName = 'shm' | 'nvshmem';

export interface Scenario {
  readonly backend: BackendName;
  readonly operation: (typeof OPERATIONS)[number];
  readonly moment: Moment;
  readonly victims: readonly number[];
  readonly worldSize: number;
  /** From the call to the death, for the moments that have a delay. In milliseconds. */
  readonly delayMs: number;
}

export interface RankArguments {
  readonly rank: number;
  readonly storePath: string;
  readonly scenario: Scenario;
  /** Elements of a call. */
  readonly length: number;
}

/** How one call ended. Times are of the machine's monotonic clock, in nanoseconds. */
export type CallEnd =
  | { readonly end: 'done'; readonly contributors: readonly number[]; readonly at: string }
  | { readonly end: 'lost'; readonly lost: readonly number[]; readonly at: string };

export type FromRank =
  /** The group is up. */
  | { readonly kind: 'ready' }
  /** The last thing that a victim says: it dies now. */
  | { readonly kind: 'dying'; readonly at: string }
  | { readonly kind: 'ended'; readonly calls: readonly CallEnd[] }
  | { readonly kind: 'failed'; readonly why: string };

/** Calls that all make before the one at which the victims die, and that survivors make after they have seen all deaths. */
export const CALLS_BEFORE = 3;
export const CALLS_AFTER = 3;
/** A survivor that has seen no death after so many calls gives up. */
export const MOST_CALLS = 200_000;
export const QUEUE_LENGTH = 40;
