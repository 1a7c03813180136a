/** How probes and `open()` say alike that a backing is not to be had on this machine. */
import { EpError, isEpError } from '@ep/core';

/** What the system has not, or refuses, while a device is opened, is `EP_UNAVAILABLE`, with the text and the errno that it came with. All else is as it was. */
export function unavailable(error: unknown): unknown {
  if (!isEpError(error) || error.code !== 'EP_SYSTEM') return error;
  const { message, context, native } = error;
  return new EpError('EP_UNAVAILABLE', message, { context, cause: error, ...(native && { native }) });
}

/** The same of whatever was thrown, for a probe, which never throws. */
export function unavailableHere(error: unknown): EpError {
  return unavailable(isEpError(error) ? error : new EpError('EP_SYSTEM', String(error), { cause: error })) as EpError;
}
