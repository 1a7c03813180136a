/** How collective calls end that nobody can carry on. */
import { checkAttached, EpError, formatRanks } from '@ep/core';
import { nameOf, type OrderedCall } from './ordered.js';
import type { PoisonRecord } from './records.js';

/** From the call of the record on, calls of this rank end with this. */
export interface Poison {
  readonly record: PoisonRecord;
  /** Of that call; those after it have it as their cause. */
  readonly error: EpError;
}

/** What another rank told. */
export function poisonOf(from: number, record: PoisonRecord): Poison {
  const { code, text, context, sequence } = record;
  if (code === 'EP_MISMATCH') return { record, error: new EpError(code, text, { context }) };
  const error = new EpError('EP_ABORTED', `call ${sequence}: rank ${from} gave up: ${text}`, {
    context: { ...context, ranks: [from], sequence, reason: code },
  });
  return { record, error };
}

export function poisonedError({ record, error }: Poison, sequence: number): EpError {
  if (sequence === record.sequence) return error;
  return new EpError('EP_POISONED', `call ${sequence}: call ${record.sequence} failed before: ${error.message}`, {
    context: { sequence, failed: record.sequence },
    cause: error,
  });
}

/** Throws where memory of a call was transferred or resized since it was made. */
export function checkArrays(call: OrderedCall): void {
  const { sequence } = call;
  const where = `${nameOf(call)} ${sequence}`;
  try {
    for (const array of call.inputs) checkAttached(array, where);
    for (const array of call.outputs) checkAttached(array, where);
  } catch (cause) {
    const text = `${where}: an array of it was transferred or resized before the call ended`;
    throw new EpError('EP_DETACHED', text, { context: { sequence }, cause });
  }
}

export function lostError(kind: string, sequence: number, lost: readonly number[]): EpError<'EP_PEER_LOST'> {
  return new EpError(
    'EP_PEER_LOST',
    `${kind} ${sequence}: ${formatRanks(lost)} died or left; the next call is made without`,
    {
      context: { sequence, lost },
    },
  );
}
