/** Who may come in the place of dead ranks. */
import { EpError } from '@ep/core';
import type { ResolvedEfaConfig } from './config.js';

/** Throws `EP_UNSUPPORTED` for worlds that nobody can join again. */
export function checkRenewable({ network }: ResolvedEfaConfig, where: string): void {
  if (network === undefined) return;
  const why = 'ranks that a network joins share no memory, through which they would meet';
  throw new EpError('EP_UNSUPPORTED', `${where}: no rank comes back: ${why}; close, and open another world`);
}
