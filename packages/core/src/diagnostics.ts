/** What core reports on `node:diagnostics_channel`. A channel nobody listens to costs one check. */
import { type Channel, channel, subscribe, unsubscribe } from 'node:diagnostics_channel';

/** Channel -> message. Other packages add their channels by declaration merging (`declare module '@ep/core'`). */
export interface DiagnosticMessages {
  /** A rank finished meeting the others, or failed to. */
  'ep:rendezvous': {
    readonly rank: number;
    readonly worldSize: number;
    readonly durationMs: number;
    readonly error?: unknown;
  };
  /** The server of a TCP store ended a connection; the others go on. */
  'ep:store:dropped': { readonly server: string; readonly peer: string; readonly reason: string };
  /** A Work failed while nobody was waiting for it; its owner reports it later. */
  'ep:work:unobserved': {
    readonly owner: string;
    readonly op: string;
    readonly sequence: number;
    readonly reason: unknown;
  };
}

export type DiagnosticChannel = keyof DiagnosticMessages;

// Held here: Node forgets a channel that nobody holds or listens to, and finding it again is a lookup.
const channels = new Map<string, Channel>();

/** Publishes what `message` returns; it is not called if nobody listens. */
export function publish<N extends DiagnosticChannel>(name: N, message: () => DiagnosticMessages[N]): void {
  let found = channels.get(name);
  if (found === undefined) {
    found = channel(name);
    channels.set(name, found);
  }
  if (found.hasSubscribers) found.publish(message());
}

/** Listens until the returned function is called. */
export function listen<N extends DiagnosticChannel>(
  name: N,
  listener: (message: DiagnosticMessages[N]) => void,
): () => void {
  const handler = (message: unknown): void => listener(message as DiagnosticMessages[N]);
  subscribe(name, handler);
  return () => unsubscribe(name, handler);
}
