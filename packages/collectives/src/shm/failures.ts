/** What an operation of the addon that did not end well means. */
import { type DType, EpError, formatRanks } from '@ep/core';
import { codeOfStatus, type NativeCallFailure, type Outcome } from '@ep/native';
import type { EngineCall, MembershipCall } from '../engine.js';
import { differentCalls } from '../portable/signature.js';
import { REDUCE_OPS } from '../reduce-op.js';
import { KINDS, MEMBERSHIP, TYPES } from './codes.js';

const FIELDS = 7;

/** Who is to be taken out by a membership call, as the addon keeps it: a bit for each rank in two words. Undefined where the first does not fit a number. */
function leavingIn(low: number, high: number): readonly number[] | undefined {
  if (low > Number.MAX_SAFE_INTEGER) return undefined;
  const words = [BigInt(low), new BigUint64Array(Float64Array.of(high).buffer)[0]!];
  return words.flatMap((word, i) =>
    Array.from({ length: 64 }, (_, bit) => 64 * i + bit).filter((rank) => ((word >> BigInt(rank % 64)) & 1n) !== 0n),
  );
}

/** As the portable engine describes a call, from what the addon keeps of it. */
function describeNative(numbers: Float64Array): string {
  const [, kind, type, op, root, bytes, factor] = numbers;
  if (kind === MEMBERSHIP) {
    const leaving = leavingIn(bytes!, factor!);
    const out = leaving?.length === 0 ? '' : ` without ${leaving === undefined ? 'some' : formatRanks(leaving)}`;
    // The rest, whom it takes in and of how many ranks the group is to be, differs where the words do not.
    return `a change or a question of who takes part${out}`;
  }
  const name = KINDS[kind!]!;
  const dtype = TYPES[type!]!;
  const words: string[] = [name];
  if (name !== 'barrier') words.push(dtype);
  if (name === 'all-reduce' || name === 'reduce' || name === 'reduce-scatter') {
    words.push(REDUCE_OPS[op!]!);
    if (factor !== 0) words.push(`by ${factor}`);
  }
  if (name !== 'barrier' && name !== 'all-to-all') words.push(`of ${bytes} bytes`);
  if (root! >= 0) words.push(`root ${root}`);
  return words.join(' ');
}

/** What failures say of a call. */
export interface NamedCall {
  readonly sequence: number;
  readonly kind: EngineCall['kind'] | 'membership';
  readonly dtype?: DType;
  /** Of a membership call: what it asks for. */
  readonly change?: Pick<MembershipCall, 'evicted' | 'admitted' | 'size'>;
  readonly timeoutMs: number;
}

function describeChange({ evicted, admitted, size }: NonNullable<NamedCall['change']>): string {
  const parts = [
    ...(evicted.length > 0 ? [`${formatRanks(evicted)} to be taken out`] : []),
    ...(admitted.length > 0 ? [`${formatRanks(admitted)} to be taken in`] : []),
    ...(size > 0 ? [`a group of ${size} ranks`] : []),
  ];
  return parts.length === 0 ? 'no change' : parts.join(' and ');
}

/** All that the addon tells of such calls that have the same words is who asked otherwise. */
function differentChange({ sequence, change }: NamedCall, other: number): EpError<'EP_MISMATCH'> {
  const expected = describeChange(change!);
  const found = 'another change';
  return new EpError(
    'EP_MISMATCH',
    `call ${sequence}: ranks ask for different changes of who takes part: this one for ${expected}, ${formatRanks([other])} for another`,
    { context: { ranks: [other], sequence, expected, found } },
  );
}

function mismatch(rank: number, call: NamedCall, outcome: Outcome, { active, calls }: NativeCallFailure): EpError {
  const own = [...active].indexOf(rank);
  // Of the call that differed: it may be one that ended here before this one, because nobody was awaited.
  const sequence = own < 0 ? call.sequence : calls[own * FIELDS]!;
  const texts = new Map<number, string>();
  for (const [i, rank] of active.entries()) {
    // What those do that are taken out does not matter.
    if (call.change?.evicted.includes(rank)) continue;
    const numbers = calls.subarray(i * FIELDS, (i + 1) * FIELDS);
    const at = numbers[0] === sequence ? '' : ` as its call ${numbers[0]}`;
    texts.set(rank, `${describeNative(numbers)}${at}`);
  }
  const found = differentCalls(sequence, texts);
  if (found !== undefined) return found;
  if (call.change !== undefined) return differentChange(call, outcome.rank);
  const expected = `${outcome.expected} bytes`;
  const given = `${outcome.found} bytes`;
  return new EpError(
    'EP_MISMATCH',
    `call ${sequence}: all-to-all ${call.dtype ?? ''}: rank ${outcome.rank} gives ${given}, ${expected} are taken from it`,
    { context: { ranks: [outcome.rank], sequence, expected, found: given } },
  );
}

/** Whether this rank has ever found a process of that one in this group. */
export type HasCome = (rank: number) => boolean;

function describeLost(lost: readonly number[], hasCome: HasCome): string {
  const gone = lost.filter(hasCome);
  const awaited = lost.filter((rank) => !hasCome(rank));
  const parts = [];
  if (gone.length > 0) {
    parts.push(`${formatRanks(gone)} died, closed the group or ${gone.length === 1 ? 'was' : 'were'} taken out of it`);
  }
  if (awaited.length > 0)
    parts.push(`${formatRanks(awaited)} ${awaited.length === 1 ? 'has' : 'have'} not come to the group`);
  return parts.join('; ');
}

/** Why a collective call of `rank` failed. `lost` members leave the group in order; every other failure poisons it. */
export function callError(
  rank: number,
  call: NamedCall,
  outcome: Outcome,
  details: NativeCallFailure,
  hasCome: HasCome,
): EpError {
  const where = `call ${call.sequence}: ${call.kind}`;
  const code = codeOfStatus(outcome.status);
  const missing = [...details.missing];
  const arrived = [...details.active].filter((rank) => !missing.includes(rank));
  const context = { sequence: call.sequence, kind: call.kind };
  switch (code) {
    case 'EP_TIMEOUT':
      return new EpError(
        code,
        `${where}: ${outcome.rank >= 0 ? `the deadline of ${formatRanks([outcome.rank])} passed` : `timed out after ${call.timeoutMs} ms`}; awaited ${formatRanks(missing)}; ${formatRanks(arrived)} arrived`,
        { context: { ...context, arrived, awaited: missing, timeoutMs: call.timeoutMs } },
      );
    case 'EP_PEER_LOST': {
      const lost = details.lost.length > 0 ? [...details.lost] : [outcome.rank];
      return new EpError(code, `${where}: ${describeLost(lost, hasCome)}`, {
        context: { ...context, lost, active: [...details.active].filter((rank) => !lost.includes(rank)) },
      });
    }
    case 'EP_MISMATCH':
      return mismatch(rank, call, outcome, details);
    case 'EP_ABORTED':
      return new EpError(code, `${where}: ${formatRanks([outcome.rank])} gave up this call, or an earlier one`, {
        context: { ...context, ranks: [outcome.rank] },
      });
    case 'EP_CLOSED':
      return new EpError(code, `${where}: the group was closed`, { context });
    case 'EP_EVICTED':
      return new EpError(code, `${where}: the others took this rank out of the group and went on without it`, {
        context,
      });
    default:
      return new EpError(code, `${where}: ${outcome.message ?? 'failed'}`, { context });
  }
}

/** `peer` -1: any. */
export function messageError(
  op: 'send' | 'recv',
  message: { readonly peer: number; readonly tag: number; readonly timeoutMs: number },
  outcome: Outcome,
  hasCome: HasCome,
): EpError {
  const code = codeOfStatus(outcome.status);
  const who = message.peer < 0 ? 'any rank' : formatRanks([message.peer]);
  const where = `${op} ${op === 'send' ? 'to' : 'from'} ${who}, tag ${message.tag}`;
  const awaited = message.peer < 0 ? [] : [message.peer];
  const context = { peer: message.peer, tag: message.tag };
  switch (code) {
    case 'EP_TIMEOUT':
      return new EpError(code, `${where}: timed out after ${message.timeoutMs} ms`, {
        context: { ...context, arrived: [], awaited, timeoutMs: message.timeoutMs },
      });
    case 'EP_PEER_LOST':
      return new EpError(code, `${where}: ${describeLost([outcome.rank], hasCome)}`, {
        context: { ...context, lost: [outcome.rank] },
      });
    case 'EP_MISMATCH':
      return new EpError(
        code,
        op === 'send'
          ? `${where}: ${outcome.expected} bytes did not fit what was to be received, or have another dtype`
          : `${where}: a message of ${outcome.found} bytes, or of another dtype, for room of ${outcome.expected}`,
        {
          context: {
            ...context,
            ranks: [outcome.rank],
            expected: Number(outcome.expected),
            found: Number(outcome.found),
          },
        },
      );
    case 'EP_CLOSED':
      return new EpError(code, `${where}: the group was closed`, { context });
    default:
      return new EpError(code, `${where}: ${outcome.message ?? 'failed'}`, { context });
  }
}
