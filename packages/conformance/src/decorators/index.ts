/** Decorators around any transport: they must change nothing that a case can see, as long as no fault is planned. */
import { EpError, type Need, type Rank, type TransportProvider } from '@ep/core';
import { hostile } from '../hostile/index.js';
import { wrapProvider } from './wrap.js';

export interface TraceEntry {
  readonly rank: Rank;
  readonly peer: Rank;
  readonly op: string;
  /** Of the Work within its endpoint; absent for flush. */
  readonly sequence?: number;
}

/** Records every operation towards a peer, in the order of the calls. */
export function withTrace<C extends Need, Config extends object>(
  provider: TransportProvider<C, Config>,
  trace: (entry: TraceEntry) => void,
): TransportProvider<C, Config> {
  return wrapProvider(provider, (rank) => ({
    before: () => {},
    after: (op, peer, work) => trace({ rank, peer, op, ...(work === undefined ? {} : { sequence: work.sequence }) }),
  }));
}

/** The call with this number, counted per rank from 0, fails instead of being made. */
export interface Fault {
  readonly rank: Rank;
  readonly call: number;
}

/** An empty plan changes nothing. */
export function withFaults<C extends Need, Config extends object>(
  provider: TransportProvider<C, Config>,
  plan: readonly Fault[],
): TransportProvider<C, Config> {
  return wrapProvider(provider, (rank) => {
    let calls = 0;
    return {
      before: (op, peer) => {
        const call = calls++;
        if (!plan.some((fault) => fault.rank === rank && fault.call === call)) return;
        throw new EpError(
          'EP_TRANSPORT_FAILED',
          `${op} to rank ${peer}: planned fault of call ${call} of rank ${rank}`,
        );
      },
      after: () => {},
    };
  });
}

/** What the suite runs to show that decorators are transparent. */
export const decorated = withTrace(withFaults(hostile, []), () => {});
