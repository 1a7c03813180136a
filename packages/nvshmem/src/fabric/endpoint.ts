/** Operations towards one peer, which the rank's progress thread carries. */
import { EpError, type Rank, type RemoteRegion, type Request, type Work } from '@ep/core';
import type { NativeFabricNic } from '@ep/native';
import { AtomicEndpoint, type AtomicEndpointInit } from '@ep/native/ranks';
import type { FabricNeeds } from './probe.js';

export interface FabricEndpointInit extends Omit<AtomicEndpointInit<FabricNeeds>, 'broken' | 'checkSignal'> {
  readonly nic: NativeFabricNic;
}

/** Why nothing reaches the peer. */
export function linkError(where: string, peer: Rank, nic: NativeFabricNic): EpError {
  const failure = nic.failure(peer);
  if (failure === undefined) return new EpError('EP_CLOSED', `${where}: the transport was closed`);
  return new EpError('EP_PEER_LOST', `${where}: ${failure.text}`, { context: { peer, lost: [peer] } });
}

/**
 * Requests end when the peer has carried them out, in the order in which they were made; reads and atomics when the provider has, in no order with the others. Atomics are the provider's,
 * this rank's on its own words too: atomic against each other, and against nothing else.
 */
export class FabricEndpoint extends AtomicEndpoint<FabricNeeds> {
  constructor(init: FabricEndpointInit) {
    super({ ...init, broken: (where) => linkError(where, init.peer, init.nic) });
  }

  readonly compareSwap = (to: RemoteRegion, compare: bigint, swap: bigint): Work<bigint> =>
    this.swap(to, compare, swap);

  /** What was taken fails with the link alone, whose end every wait on the peer hears. */
  readonly post = (request: Request<FabricNeeds>): void => this.hand(request);
}
