/** The second half of a call that was begun, which runs once. */
import { EpError } from '@ep/core';
import { checkRunOptions } from '../options.js';
import type { MoeCallOptions } from './options.js';
import type { MoeHook } from './received.js';

/** HAZARD: a second half that ran twice would take what belongs to the slot's next call, and give credit for it. `checkUsable` throws where the buffer takes no calls. */
export function hookOf<T>(
  where: string,
  checkUsable: (where: string) => void,
  second: (limits: MoeCallOptions) => ReturnType<MoeHook<T>['receive']>,
): MoeHook<T> {
  let begun = false;
  return {
    receive: (limits = {}) => {
      checkUsable(where);
      if (begun)
        throw new EpError('EP_INVALID_ARGUMENT', `${where}: it was called before, expected once for each call`);
      checkRunOptions(limits, where);
      limits.signal?.throwIfAborted();
      const work = second(limits);
      begun = true;
      return work;
    },
  };
}
