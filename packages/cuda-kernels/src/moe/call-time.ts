/** How long the halves of a call wait for ranks. */
import { checkTimeout } from '@ep/core';
import type { MoeCallOptions, ResolvedMoe } from './options.js';

/**
 * HAZARD: a rank without experts awaits nobody in dispatch, so its combine begins while others still await a rank that has stalled there: with one limit for both it would
 * give all of them up.
 */
export const COMBINE_TIMEOUTS = 2;

/** In milliseconds for the addon; -1 for no limit. */
export function callTimeout(moe: ResolvedMoe, { timeoutMs }: MoeCallOptions, where: string, times = 1): number {
  const limit = timeoutMs === undefined ? moe.timeoutMs * times : checkTimeout(timeoutMs, where);
  return Number.isFinite(limit) ? limit : -1;
}
