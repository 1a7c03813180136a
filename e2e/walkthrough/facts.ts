/** What one rank saw in each phase. */

/** Of one rank's own signal words, by lease. */
export interface Counters {
  /** [lease][source]: chunks that have come from it since the dispatcher was opened. */
  readonly arrivals: readonly (readonly number[])[];
  /** [lease][destination]: how often that rank has released this lease. */
  readonly credits: readonly (readonly number[])[];
}

/** One call: the token ids of the rows in each received tensor, and the counters when all ranks were done. */
export interface Arrived {
  readonly ids: Readonly<Record<string, readonly number[]>>;
  readonly stagedBytes: number;
  readonly counters: Counters;
}

export interface Facts {
  readonly rank: number;
  readonly digests: { readonly q: string; readonly kv: string };
  readonly memory: { readonly leaseBytes: number; readonly signalSlots: number };
  readonly forwardBytes: { readonly bytesSent: number; readonly bytesReceived: number };
  readonly before: Counters;
  readonly forward: Arrived;
  readonly output: Arrived;
  readonly released: Counters;
  readonly gradients: Arrived;
  readonly summed: Arrived;
  readonly absence: { readonly outcome: string; readonly poisoned: boolean; readonly counters: Counters };
  /** `revoked`: of the rank that held a result when the epoch ended. */
  readonly resync: { readonly epoch: number; readonly revoked: boolean | undefined };
  readonly repeated: Arrived;
}
