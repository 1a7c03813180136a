/** Who may come in the place of dead ranks. */
import { EpError } from '@ep/core';
import type { ResolvedIbgdaConfig } from './config.js';

/** Throws `EP_UNSUPPORTED` for worlds that nobody can join again. */
export function checkRenewable({ network, device }: ResolvedIbgdaConfig, where: string): void {
  const why =
    network !== undefined
      ? 'ranks that a network joins share no memory, through which they would meet'
      : device !== undefined
        ? 'memory of a GPU is not connected anew'
        : undefined;
  if (why === undefined) return;
  throw new EpError('EP_UNSUPPORTED', `${where}: no rank comes back: ${why}; close, and open another world`);
}
