/** How long the halves of a call wait for ranks. */
import { checkRunOptions } from '../options.js';
import type { MoeCallOptions, ResolvedMoe } from './options.js';

/**
 * HAZARD: a rank without experts awaits nobody in dispatch, so its combine begins while others still await a rank that has stalled there: with one limit for both it would
 * give all of them up.
 */
export const COMBINE_TIMEOUTS = 2;

/** In milliseconds for the addon; -1 for no limit. Throws `EP_INVALID_ARGUMENT` for limits that are none. */
export function callTimeout(moe: ResolvedMoe, options: MoeCallOptions, where: string, times = 1): number {
  checkRunOptions(options, where);
  const limit = options.timeoutMs ?? moe.timeoutMs * times;
  return Number.isFinite(limit) ? limit : -1;
}
