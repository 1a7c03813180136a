/** What must be the same in one call of all ranks, and who is wrong if it is not. */
import { EpError, formatRanks } from '@ep/core';
import type { EngineCall } from '../engine.js';
import { reduceOpName } from '../reduce.js';
import type { ReduceOp } from '../reduce-op.js';
import { bytesOfCall, givenBy, MOST_GIVEN_BYTES } from './given.js';
import { nameOf, type OrderedCall } from './ordered.js';
import { type CallRecord, RECORD_BYTES, recordBytes } from './records.js';

/** What ranks tell each other of a call in words. */
type NamedCall = Pick<EngineCall, 'kind' | 'dtype' | 'root'> & {
  readonly membership?: { readonly admitted: readonly number[]; readonly size: number } | undefined;
  readonly reduceOp?: ReduceOp | undefined;
  readonly inputs: readonly { readonly length: number }[];
  readonly outputs: readonly { readonly length: number }[];
};

/** Elements of one of the arrays that the table of `EngineCall` calls n. */
export function elements(call: NamedCall): number {
  return (call.inputs[0] ?? call.outputs[0])?.length ?? 0;
}

/** Readable, and equal on two ranks if and only if their calls fit together; lengths of an all-to-all are compared between pairs. */
export function describeCall(call: NamedCall): string {
  const { kind, dtype, reduceOp, root } = call;
  const words: string[] = [nameOf(call)];
  if (kind !== 'barrier') words.push(dtype);
  if (reduceOp !== undefined) {
    words.push(reduceOpName(reduceOp));
    if (typeof reduceOp !== 'string') words.push(`by ${reduceOp.factor}`);
  }
  if (kind !== 'barrier' && kind !== 'all-to-all') words.push(`of ${elements(call)}`);
  if (root >= 0) words.push(`root ${root}`);
  if (call.membership !== undefined && call.membership.admitted.length > 0) {
    words.push(`with ${formatRanks(call.membership.admitted)}`);
  }
  if (call.membership !== undefined && call.membership.size > 0) words.push(`of ${call.membership.size} ranks`);
  return words.join(' ');
}

const lengthsOf = (arrays: EngineCall['inputs']): readonly number[] => arrays.map(({ length }) => length);

/** What this rank tells all others of a call of `size` ranks that is not small; undefined where the call is. */
export function toldToAll(call: EngineCall, size: number): CallRecord | undefined {
  const { kind, sequence, inputs, outputs } = call;
  if (bytesOfCall(call, size) <= MOST_GIVEN_BYTES) return undefined;
  const told: CallRecord = { kind: 'call', sequence, call: describeCall(call) };
  return kind === 'all-to-all' ? { ...told, gives: lengthsOf(inputs), takes: lengthsOf(outputs) } : told;
}

/** The most that any rank gives in one array, where all have told that they can carry the call. */
export function longestCarried(
  words: ReadonlyMap<number, CallRecord>,
  contributors: readonly number[],
): number | undefined {
  const lengths = contributors.map((peer) => words.get(peer)!.carry);
  return lengths.includes(undefined) ? undefined : Math.max(...(lengths as readonly number[]));
}

/** What this rank tells of its call: to all the same, unless it is an all-to-all that is too long to be told in whole. */
export function callRecords(call: OrderedCall): (peer: number) => CallRecord {
  const { kind, sequence, inputs, outputs, membership } = call;
  const told: CallRecord = { kind: 'call', sequence, call: describeCall(call) };
  // HAZARD: who takes part changes only when all have said that they know, which nobody says of a small call.
  if (membership !== undefined) return () => ({ ...told, found: membership.found });
  const given = givenBy(call);
  if (kind !== 'all-to-all') {
    const record = given === undefined ? told : { ...told, given };
    return () => record;
  }
  if (given !== undefined) {
    const record: CallRecord = { ...told, gives: lengthsOf(inputs), takes: lengthsOf(outputs), given };
    // As long as it is where another rank passes it on.
    if (recordBytes({ ...record, of: inputs.length }) <= RECORD_BYTES) return () => record;
  }
  return (peer) => ({ ...told, gives: inputs[peer]!.length, takes: outputs[peer]!.length });
}

/** What most ranks call, of several the one with the lowest rank, is expected; the others are named. Undefined if all agree. */
export function differentCalls(
  sequence: number,
  calls: ReadonlyMap<number, string>,
): EpError<'EP_MISMATCH'> | undefined {
  const ranksOf = new Map<string, number[]>();
  for (const [rank, call] of [...calls].sort(([a], [b]) => a - b)) {
    const ranks = ranksOf.get(call);
    if (ranks) ranks.push(rank);
    else ranksOf.set(call, [rank]);
  }
  if (ranksOf.size <= 1) return undefined;
  const [most, ...others] = [...ranksOf].sort(([, a], [, b]) => b.length - a.length || a[0]! - b[0]!);
  const [expected, callers] = most!;
  const ranks = others.flatMap(([, odd]) => odd).sort((a, b) => a - b);
  const found = others.map(([call, odd]) => `${formatRanks(odd)}: ${call}`).join('; ');
  return new EpError(
    'EP_MISMATCH',
    `call ${sequence}: ranks made different calls; ${formatRanks(callers)}: ${expected}; ${found}`,
    { context: { ranks, sequence, expected, found } },
  );
}

/** all-to-all: what one rank gives must be what the other takes. Of all pairs of which both are known, so that ranks that know the same name the same. */
function differentLengths(
  call: EngineCall,
  rank: number,
  records: ReadonlyMap<number, CallRecord>,
  all: boolean,
): EpError<'EP_MISMATCH'> | undefined {
  if (call.kind !== 'all-to-all') return undefined;
  const ranks = [...records.keys()].sort((a, b) => a - b);
  const told = (lengths: CallRecord['gives'], other: number): number | undefined =>
    typeof lengths === 'object' ? lengths[other] : other === rank ? lengths : undefined;
  const given = (from: number, to: number): number | undefined =>
    from === rank ? call.inputs[to]!.length : told(records.get(from)!.gives, to);
  const takenBy = (to: number, from: number): number | undefined =>
    to === rank ? call.outputs[from]!.length : told(records.get(to)!.takes, from);
  // Until all have come, this is asked at each arrival: of the pairs of this rank alone.
  const pairs = all
    ? ranks.flatMap((from) => ranks.map((to) => [from, to] as const))
    : ranks.flatMap((peer) => [[rank, peer] as const, [peer, rank] as const]);
  for (const [from, to] of pairs) {
    const [sent, taken] = [given(from, to), takenBy(to, from)];
    if (from === to || sent === undefined || taken === undefined || sent === taken) continue;
    const expected = `rank ${from} gives ${sent} elements to rank ${to}`;
    const found = `rank ${to} takes ${taken}`;
    return new EpError('EP_MISMATCH', `call ${call.sequence}: all-to-all ${call.dtype}: ${expected}, but ${found}`, {
      context: { ranks: [from, to].sort((a, b) => a - b), sequence: call.sequence, expected, found },
    });
  }
  return undefined;
}

/** As it nearly always is: found without an object for each rank. */
function isOneCall(records: ReadonlyMap<number, CallRecord>): boolean {
  let first: string | undefined;
  for (const { call } of records.values()) {
    first ??= call;
    if (call !== first) return false;
  }
  return true;
}

/** `records`: of the ranks that have come, this one's own among them; `all`: that is everyone. */
export function findMismatch(
  call: OrderedCall,
  rank: number,
  records: ReadonlyMap<number, CallRecord>,
  all: boolean,
): EpError<'EP_MISMATCH'> | undefined {
  if (call.kind !== 'all-to-all' && isOneCall(records)) return undefined;
  const calls = new Map([...records].map(([peer, record]) => [peer, record.call]));
  return differentCalls(call.sequence, calls) ?? differentLengths(call, rank, records, all);
}
