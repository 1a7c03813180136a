/** Why a call of a buffer for experts ended, in words. A rank that is late or dead is no failure, and never ends here. */
import { EpError } from '@ep/core';
import { codeOfStatus, type Outcome } from '@ep/native';
import { outcomeText } from '../outcome-text.js';

export function callFailure(name: string, outcome: Outcome): EpError {
  const code = codeOfStatus(outcome.status);
  const verb = code === 'EP_TIMEOUT' ? 'timed out waiting for' : 'ended while waiting for';
  const { rank, stage, expected, found } = outcome;
  // From a rank that this one had given up, others only pass on that it is full.
  const needed = found === 0n ? 'more' : found;
  const text =
    code === 'EP_CAPACITY'
      ? `rank ${rank} has room for ${expected} rows, ${needed} were to go there: send fewer, or open with more recvRows`
      : (outcome.message ?? outcomeText(outcome, verb));
  return new EpError(code, `${name}: ${text}`, { context: { rank, stage, expected, found } });
}
