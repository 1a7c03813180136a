/** What a native wait that did not succeed means, as an `EpError` that says who was awaited and what had arrived. */
import { EpError, type ErrorContext, formatRanks, type WaitOptions } from '@ep/core';
import { codeOfStatus, type Outcome } from '@ep/native';

/** `awaited` are the ranks that had not delivered when the wait ended. */
export function waitError(
  where: string,
  outcome: Outcome,
  details: { readonly awaited?: readonly number[]; readonly timeoutMs?: number; readonly progress: string },
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
    case 'EP_PEER_LOST':
      return new EpError(code, `${where}: ${formatRanks(lost)} died or closed; ${details.progress}${who}`, { context });
    case 'EP_CLOSED':
      return new EpError(code, `${where}: the transport was closed while waiting; ${details.progress}`, { context });
    default:
      return new EpError(code, `${where}: ${outcome.message ?? 'cut off'}; ${details.progress}`, { context });
  }
}

/** The timeout that native code understands: negative for none. */
export function nativeTimeout(options: WaitOptions | undefined, fallbackMs: number): number {
  const timeoutMs = options?.timeoutMs ?? fallbackMs;
  return Number.isFinite(timeoutMs) ? timeoutMs : -1;
}
