/** What a native wait that did not succeed means, as an `EpError` that says who was awaited and what had arrived. */
import {
  checkInteger,
  checkSignal,
  checkTimeout,
  EpError,
  type ErrorContext,
  formatRanks,
  invalid,
  linkSignals,
  type WaitOptions,
} from '@ep/core';
import type { OperationId, Outcome } from '../binding.js';
import { codeOfStatus, type Operations } from '../operations.js';

/** `awaited` are the ranks that had not delivered when the wait ended. */
export function waitError(
  where: string,
  outcome: Outcome,
  details: {
    readonly awaited?: readonly number[];
    readonly timeoutMs?: number;
    readonly progress: string;
    /** Who is lost was never there. */
    readonly absent?: boolean;
  },
): EpError {
  const code = codeOfStatus(outcome.status);
  const awaited = details.awaited ?? [];
  const lost = outcome.rank >= 0 ? [outcome.rank] : [];
  const context: ErrorContext = {
    awaited,
    lost: code === 'EP_PEER_LOST' ? lost : [],
    expected: outcome.expected,
    found: outcome.found,
  };
  const who = awaited.length > 0 ? `; awaited ${formatRanks(awaited)}` : '';
  switch (code) {
    case 'EP_TIMEOUT':
      return new EpError(code, `${where}: timed out after ${details.timeoutMs} ms; ${details.progress}${who}`, {
        context: { ...context, timeoutMs: details.timeoutMs },
      });
    case 'EP_PEER_LOST': {
      const why =
        details.absent === true
          ? `nobody is in the place of ${formatRanks(lost)} yet`
          : `${formatRanks(lost)} died or closed`;
      return new EpError(code, `${where}: ${why}; ${details.progress}${who}`, { context });
    }
    case 'EP_CLOSED':
      return new EpError(code, `${where}: the transport was closed while waiting; ${details.progress}`, { context });
    default:
      return new EpError(code, `${where}: ${outcome.message ?? 'cut off'}; ${details.progress}`, { context });
  }
}

/**
 * Refuses limits that are none with `EP_INVALID_ARGUMENT`. HAZARD: before a collective call counts, or a slip of one rank would leave the others
 * waiting for it and its team unusable.
 */
export function checkLimits(options: WaitOptions | undefined, where: string, worldSize: number): void {
  if (options === undefined || options === null) return;
  if (typeof options !== 'object') {
    throw invalid('options', { where, expected: 'an object or undefined', found: options });
  }
  const { signal, timeoutMs, peers } = options;
  checkSignal(signal, where);
  checkTimeout(timeoutMs ?? undefined, where);
  if (peers === undefined || peers === null) return;
  if (!Array.isArray(peers)) throw invalid('peers', { where, expected: 'a list of ranks', found: peers });
  for (const peer of peers) checkInteger(peer, 'peer', where, 0, worldSize - 1);
}

/** The timeout that native code understands: negative for none. Throws `EP_INVALID_ARGUMENT`. */
export function nativeTimeout(options: WaitOptions | undefined, fallbackMs: number, where: string): number {
  const timeoutMs = checkTimeout(options?.timeoutMs ?? fallbackMs, where);
  return Number.isFinite(timeoutMs) ? timeoutMs : -1;
}

/** Runs a native wait that ends also when `closing` fires, which is the object that the wait belongs to going away. */
export async function runWait(
  operations: Operations,
  start: () => OperationId,
  closing: AbortSignal,
  signal: AbortSignal | undefined,
): Promise<Outcome> {
  return withClosing(signal && { signal }, closing, (limits) => operations.run(start, limits.signal));
}

/** Runs `body` with limits that end also when `closing` fires. */
export async function withClosing<T>(
  options: WaitOptions | undefined,
  closing: AbortSignal,
  body: (limits: WaitOptions) => Promise<T>,
): Promise<T> {
  const linked = linkSignals(options?.signal, closing);
  try {
    return await body({ ...options, signal: linked.signal });
  } finally {
    linked.unlink();
  }
}
