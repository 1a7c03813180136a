/** How commands are stopped before they have done their work: by a signal, or since nobody takes their output. */
import { constants } from 'node:os';
import { CommandExit, stoppedBy } from './failure.js';
import { OutputLost, watchOutput } from './output.js';

/** The signal that processes are to get where an AbortSignal has this reason: the one that it names, else SIGTERM. */
export function signalOf(reason: unknown): NodeJS.Signals {
  return typeof reason === 'string' && Object.hasOwn(constants.signals, reason)
    ? (reason as NodeJS.Signals)
    : 'SIGTERM';
}

/** What a command ends with that was stopped for this reason: 128 + the number of the signal, or what the reason says. */
export function stopStatus(reason: unknown): number {
  return reason instanceof CommandExit ? reason.status : 128 + constants.signals[signalOf(reason)];
}

/**
 * Runs `body`, whose AbortSignal SIGINT and SIGTERM abort (the reason is their name), and the loss of stdout or stderr (the reason is an `OutputLost`).
 * Whatever it then rejects with, this rejects with the `CommandExit` of what stopped it.
 */
export async function untilStopped<T>(command: string, body: (signal: AbortSignal) => Promise<T>): Promise<T> {
  const stop = new AbortController();
  const onSignal = (signal: NodeJS.Signals): void => stop.abort(signal);
  process.on('SIGINT', onSignal).on('SIGTERM', onSignal);
  const unwatch = watchOutput((lost) => stop.abort(lost));
  try {
    return await body(stop.signal);
  } catch (error) {
    if (!stop.signal.aborted) throw error;
    const reason: unknown = stop.signal.reason;
    throw reason instanceof OutputLost ? reason : stoppedBy(command, signalOf(reason));
  } finally {
    process.off('SIGINT', onSignal).off('SIGTERM', onSignal);
    unwatch();
  }
}
