/** Operations towards one peer, which the rank's progress thread carries. */
import { EpError, type Rank, type Request } from '@ep/core';
import type { NativeFabricNic } from '@ep/native';
import { NicEndpoint, type NicEndpointInit } from '@ep/native/ranks';
import type { FabricNeeds } from './probe.js';

export interface FabricEndpointInit extends Omit<NicEndpointInit<FabricNeeds>, 'broken' | 'checkSignal'> {
  readonly nic: NativeFabricNic;
}

/** Why nothing reaches the peer. */
export function linkError(where: string, peer: Rank, nic: NativeFabricNic): EpError {
  const failure = nic.failure(peer);
  if (failure === undefined) return new EpError('EP_CLOSED', `${where}: the transport was closed`);
  return new EpError('EP_PEER_LOST', `${where}: ${failure.text}`, { context: { peer, lost: [peer] } });
}

/** Requests end when the peer has carried them out, in the order in which they were made. */
export class FabricEndpoint extends NicEndpoint<FabricNeeds> {
  constructor(init: FabricEndpointInit) {
    super({ ...init, broken: (where) => linkError(where, init.peer, init.nic) });
  }

  /** What was taken fails with the link alone, whose end every wait on the peer hears. */
  readonly post = (request: Request<FabricNeeds>): void => this.hand(request);
}
