/** What a case is. Bodies use the types of @ep/core only, so that one body serves every transport. */
import type { AbortOptions, Capabilities, Need, Rank, Store, Transport, TransportProvider } from '@ep/core';

/** Ranks as worker threads of one process, or as processes. */
export type Mode = 'threads' | 'processes';

/** Counts of what a process holds: before and after must be equal. */
export interface Resources {
  readonly fileDescriptors: number;
  /** Mappings of shared memory. */
  readonly mappings: number;
  /** Segments and pending operations that the addon counts itself. */
  readonly segments: number;
  readonly pending: number;
}

/** One rank's view of a running case. */
export interface CaseRank {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly mode: Mode;
  readonly next: Rank;
  readonly previous: Rank;
  readonly provider: TransportProvider<Need>;
  readonly config: object;
  /** As good as `config`, but ranks of the one and of the other must not meet. Undefined for a suite that gives none. */
  readonly otherConfig: object | undefined;
  /** The case's own store, shared by all ranks. */
  readonly store: Store;
  /** Fires when the time of the case is up. */
  readonly signal: AbortSignal;
  /** Opens a transport of the provider under test, with `config` unless given. Collective; each call a new one; closed with the case. */
  open(options?: AbortOptions & { readonly timeoutMs?: number; readonly config?: object }): Promise<Transport<Need>>;
  /** All ranks, or those given, meet through the store: what a case needs to arrange itself never uses the transport under test. */
  meet(ranks?: readonly Rank[]): Promise<void>;
  /** Each rank's value, JSON, in rank order. */
  share<T>(value: T): Promise<readonly T[]>;
  /** What this rank does now: shown when it does not finish. */
  report(text: string): void;
  /** In [0, 1), seeded: the same in every run of this case on this rank. */
  random(): number;
  /** Asks to be killed from outside: SIGKILL, or worker.terminate(). Code that does not await goes on until it happens. */
  die(): Promise<never>;
  /** Of this process, after a garbage collection. */
  resources(): Promise<Resources>;
}

export interface TransportCase {
  /** `topic/what`: the key in the committed outcomes. */
  readonly id: string;
  readonly sentence: string;
  /** Not applicable to a transport that lacks one of these. */
  readonly needs?: readonly Need[];
  /** Fewest ranks with which it says anything; 2 unless given. */
  readonly ranks?: number;
  /** How long the case may take, in ms: 60 000 unless given. Ranks wait for each other half as long where they meet, but 30 000 at least. */
  readonly limitMs?: number;
  /** A reason why it does not apply to a transport with these capabilities. */
  readonly inapplicable?: (capabilities: Capabilities) => string | undefined;
  readonly body: (rank: CaseRank) => Promise<void>;
}

/** Why the case says nothing about such a transport, or undefined. */
export function inapplicableBecause(one: TransportCase, capabilities: Capabilities): string | undefined {
  const lacking = (one.needs ?? []).filter((need) => !capabilities.needs.has(need));
  if (lacking.length > 0) return `does not offer ${lacking.join(', ')}`;
  return one.inapplicable?.(capabilities);
}
