/** Operations towards one peer, on a connection of JS's own. */
import type { NativeIbgdaNic } from '@ep/native';
import { NicEndpoint, type NicEndpointInit } from '@ep/native/ranks';
import { pairError } from './failure.js';
import type { IbgdaNeeds } from './probe.js';

export interface IbgdaEndpointInit extends Omit<NicEndpointInit<IbgdaNeeds>, 'broken'> {
  readonly nic: NativeIbgdaNic;
}

/** Requests are carried out in the order in which they were made, so signals are of `prior` order whichever was asked for. */
export class IbgdaEndpoint extends NicEndpoint<IbgdaNeeds> {
  constructor(init: IbgdaEndpointInit) {
    const { nic, peer, context } = init;
    super({ ...init, broken: (where) => pairError(where, peer, nic.failure(peer), context.life(peer)) });
  }
}
