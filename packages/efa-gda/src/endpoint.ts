/** Operations towards one peer, on a queue pair of JS's own. */
import { EpError, type SignalUpdate } from '@ep/core';
import type { NativeEfaNic } from '@ep/native';
import { NicEndpoint, type NicEndpointInit } from '@ep/native/ranks';
import { pairError } from './failure.js';
import type { EfaNeeds } from './probe.js';

export interface EfaEndpointInit extends Omit<NicEndpointInit<EfaNeeds>, 'broken' | 'checkSignal'> {
  readonly nic: NativeEfaNic;
}

/** The types say it; who went past them hears it. */
function checkSignal(update: SignalUpdate<EfaNeeds>): void {
  const { op, order }: { readonly op?: unknown; readonly order?: unknown } = update;
  if (order === 'prior') {
    throw new EpError(
      'EP_UNSUPPORTED',
      'EFA delivers in no order, so no signal can speak of earlier puts; count completions, or flush() before the signal',
    );
  }
  if (op === 'set') {
    throw new EpError('EP_UNSUPPORTED', 'EFA counts arrivals, so a signal cannot be set; add() and keep an offset');
  }
}

/** A put and its signal are seen together ('bundled'); two of them in any order. */
export class EfaEndpoint extends NicEndpoint<EfaNeeds> {
  constructor(init: EfaEndpointInit) {
    const { nic, peer, context } = init;
    super({
      ...init,
      broken: (where) => pairError(where, peer, nic.failure(peer), context.life(peer)),
      checkSignal,
    });
  }
}
