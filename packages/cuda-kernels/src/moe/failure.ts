/** Why a call of a buffer for experts ended, in words. A rank that is late or dead is no failure, and never ends here. */
import { type EpCode, EpError, isEpError } from '@ep/core';
import { codeOfStatus, EP_STAGE_ARRIVAL, EP_STAGE_PLACE, type Outcome } from '@ep/native';
import { outcomeText } from '../outcome-text.js';

export function callFailure(name: string, outcome: Outcome): EpError {
  const code = codeOfStatus(outcome.status);
  const verb = code === 'EP_TIMEOUT' ? 'timed out waiting for' : 'ended while waiting for';
  const { rank, stage, expected, found } = outcome;
  const text = refusalText(code, outcome) ?? outcome.message ?? outcomeText(outcome, verb);
  return new EpError(code, `${name}: ${text}`, { context: { rank, stage, expected, found } });
}

/** Whether a call does not fit, or would meet late rows or results: all ranks refuse it alike, and the next one may go on. */
export const isRefusal = (reason: unknown): boolean =>
  isEpError(reason) && (reason.code === 'EP_CAPACITY' || reason.code === 'EP_BUSY');

/** Of a buffer that an earlier call has ended. */
export function poisonedBy(reason: unknown, where: string): EpError {
  const text = reason instanceof Error ? reason.message : String(reason);
  return new EpError('EP_POISONED', `${where}: an earlier call failed (${text}): close this buffer and open another`, {
    cause: reason,
  });
}

/** In words. */
function refusalText(code: EpCode, { rank, stage, expected, found }: Outcome): string | undefined {
  if (code === 'EP_CAPACITY') {
    // From a rank that this one had given up, others only pass on that it is full.
    const needed = found === 0n ? 'more' : found;
    return `rank ${rank} has room for ${expected} rows, ${needed} were to go there: send fewer, or open with more recvRows`;
  }
  if (code !== 'EP_BUSY') return undefined;
  const late = stage === EP_STAGE_ARRIVAL ? 'rows' : 'results';
  const why =
    stage === EP_STAGE_PLACE
      ? `rank ${rank} cannot use this call slot, into which one that was given up alive may still write`
      : `rank ${rank} was given up alive and may still write ${late} into this call slot`;
  return `${why}: refused on all ranks; the next call takes the next slot (option calls)`;
}
