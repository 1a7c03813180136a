/** What a case of a process group is. Bodies use the public API only, so that one body serves every engine. */
import type { CaseRank, Mode } from '@ep/conformance/cases';
import type { Store } from '@ep/core';
import type { InitOptions, ProcessGroup } from '../../../src/index.js';

/** One rank's view of a running case. */
export interface GroupRank {
  readonly rank: number;
  readonly worldSize: number;
  /** `inline`: all ranks in one thread, where only the cases themselves are under test. */
  readonly mode: Mode | 'inline';
  /** `shm`, or the name of the transport. */
  readonly backend: string;
  /** For each rank its host, where they are on several. */
  readonly hosts?: readonly number[];
  /** `full`: EP_TEST_FULL=1. `small`: where only the cases themselves are under test. */
  readonly sizes: 'small' | 'usual' | 'full';
  /** The case's own store, shared by all ranks. */
  readonly store: Store;
  /** A group of all ranks, a new one with each call; closed with the case. The options are the group's own. */
  open(
    options?: Pick<
      InitOptions,
      'timeoutMs' | 'onTimeout' | 'activeRanks' | 'isExtension' | 'worldSize' | 'maxGroupSize'
    >,
  ): Promise<ProcessGroup>;
  /** Destroys a group that `open` gave, and the transport that was opened for it. */
  release(group: ProcessGroup): Promise<void>;
  /** All ranks, or those given, meet through the store, never through the group under test. */
  meet(ranks?: readonly number[]): Promise<void>;
  /** Each rank's value, JSON, in rank order. */
  share<T>(value: T): Promise<readonly T[]>;
  /** What this rank does now: shown when it does not finish. */
  report(text: string): void;
  /** In [0, 1), seeded: the same in every run of this case on this rank. */
  random(): number;
  /** Killed from outside: SIGKILL, or worker.terminate(). */
  die(): Promise<never>;
  resources: CaseRank['resources'];
}

export interface GroupCase {
  /** `topic/what`: the key in the committed outcomes. */
  readonly id: string;
  readonly sentence: string;
  /** Fewest ranks with which it says anything; 1 unless given. */
  readonly ranks?: number;
  /** Kills ranks. */
  readonly mortal?: true;
  readonly body: (rank: GroupRank) => Promise<void>;
}
