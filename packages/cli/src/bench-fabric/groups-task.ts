/** What the ranks of `ep bench fabric` call as process groups on two hosts, and what they tell back. */

export interface GroupCall {
  readonly op: 'all-reduce' | 'all-to-all';
  /** Of a rank's array. */
  readonly bytes: number;
  /** Timed together, in each turn. */
  readonly calls: number;
}

/** All-reduces of 8 bytes before anything is timed: so many, or what can be made in this time. All ranks stop after the same one. */
export interface WarmUp {
  readonly calls: number;
  readonly ms: number;
  /** Then so many of each longer kind, or what can be made in this time, of arrays that are short. A turn has few of those, and compilers need thousands. */
  readonly longer: number;
  /** Of each kind, before those that count: the code around the calls is compiled anew in the first of them. */
  readonly turns: number;
}

export interface GroupTask {
  readonly store: string;
  readonly rank: number;
  readonly worldSize: number;
  readonly address: string;
  /** Of all hosts: namespaces share the cores. */
  readonly ranksOnHost: number;
  /** Of each rank the lowest one of its host; those of a host share memory. */
  readonly hosts: readonly number[];
  readonly warmUp: WarmUp;
  readonly turns: number;
  readonly calls: readonly GroupCall[];
}

/** Microseconds of a call: for each of the calls one entry a turn. */
export type GroupTimes = readonly (readonly number[])[];

export const GROUP_RANKS = 4;
