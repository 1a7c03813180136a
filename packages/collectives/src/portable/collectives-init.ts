/** What the calls of a rank need, and what they leave. */
import { retold, type Words } from './arrivals.js';
import type { LaneSource } from './channel.js';
import type { FoldOrder } from './fold-order.js';
import type { GroupRounds } from './group-rounds.js';
import type { Membership } from './membership.js';
import type { DataPlan, PlanInit } from './plan.js';
import type { ControlRecord } from './records.js';
import type { Traces } from './traces.js';

/** A call whose contributors have met; `onFailed` ends it, and poisons the group. */
export interface PlannedCall extends Omit<PlanInit, 'order'> {
  readonly onFailed: (error: unknown) => void;
}

/**
 * To a rank that is taken out: how far this one had come with it in `last`, or else `before`, and what it may lack of that. HAZARD: in this order, or one that was stopped finds no more than
 * what all had told before.
 */
export function farewell(rank: number, last: Ended, before: Ended): readonly ControlRecord[] {
  const call = last.contributors.includes(rank) ? last : before;
  return [{ kind: 'evicted', completed: call.sequence }, ...retold(call.words, call.contributors)];
}

export interface CollectivesInit {
  readonly rank: number;
  readonly membership: Membership;
  /** Ranks of the group, whether or not they take part. */
  readonly size: () => number;
  readonly traces: Traces;
  /** How the data of a call travels; `longest`: it is carried natively, as all have said, and this is the most that any rank gives in one array. */
  readonly planOf: (data: PlannedCall, longest: number | undefined) => DataPlan;
  /** In which order their elements are folded. */
  readonly orderOf: (contributors: readonly number[]) => FoldOrder;
  /** In which words of small calls go, and not only in records: those of the view, or of the last one while members agree on the next. */
  readonly rounds: () => GroupRounds | undefined;
  readonly tell: (peer: number, record: ControlRecord) => void;
  /** What is told to the peer goes, instead of waiting for a connection; or the peer is gone. */
  readonly reaches: (peer: number) => boolean;
  readonly send: (peer: number, source: LaneSource) => void;
  /** More of what was given to `send` may be sent to all peers. */
  readonly kick: () => void;
  /** Takes in what has come. */
  readonly look: () => void;
  /** The same, unless it was done a moment ago. */
  readonly lookLately: () => void;
  /** Offers again what `onChunk` did not take. */
  readonly drain: () => void;
  /** Takes members out that may be alive. Rejects with `EP_EVICTED` if they have taken out this rank before, or with what the store throws. */
  readonly evict: (ranks: readonly number[]) => Promise<void>;
  /** This rank goes, of its own will. */
  readonly leave: () => void;
  /** Those of `awaited` that a call whose time is up takes out; absent where such a call poisons the group. */
  readonly findLate?: ((awaited: readonly number[], idleToo: boolean) => Promise<readonly number[]>) | undefined;
}

/** A call that ended well, whose data it had, and what they told of it. */
export interface Ended {
  readonly sequence: number;
  readonly contributors: readonly number[];
  readonly words: Words;
}
