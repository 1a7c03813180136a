/** Listening to a signal that many calls share. */
import { linkSignals } from '@ep/core';

/** Calls `listener` once if `signal` fires later; returns how to stop. Through a link, which knows how to keep Node from warning of a leak. */
export function listenToAbort(signal: AbortSignal | undefined, listener: () => void): () => void {
  if (signal === undefined || signal.aborted) return () => {};
  const linked = linkSignals(signal);
  linked.signal.addEventListener('abort', listener, { once: true });
  return linked.unlink;
}
