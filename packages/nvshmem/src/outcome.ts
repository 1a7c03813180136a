/** What a native wait that did not succeed means, as an `EpError` that says who was awaited and what had arrived. */
import { EpError, type ErrorContext, formatRanks, invalid, linkSignals, type WaitOptions } from '@ep/core';
import { codeOfStatus, type OperationId, type Operations, type Outcome } from '@ep/native';

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

/** The timeout that native code understands: negative for none. Throws `EP_INVALID_ARGUMENT`. */
export function nativeTimeout(options: WaitOptions | undefined, fallbackMs: number, where: string): number {
  const timeoutMs = options?.timeoutMs ?? fallbackMs;
  if (!(typeof timeoutMs === 'number' && timeoutMs >= 0)) {
    throw invalid('timeoutMs', {
      where,
      expected: 'a number of milliseconds of at least 0, or Infinity',
      found: timeoutMs,
    });
  }
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
