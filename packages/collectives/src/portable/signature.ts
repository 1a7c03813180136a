/** What must be the same in one call of all ranks, and who is wrong if it is not. */
import { EpError, formatRanks } from '@ep/core';
import type { EngineCall } from '../engine.js';
import { reduceOpName } from '../reduce.js';
import type { ReduceOp } from '../reduce-op.js';
import { nameOf, type OrderedCall } from './ordered.js';
import type { CallRecord } from './records.js';

/** What ranks tell each other of a call in words. */
type NamedCall = Pick<EngineCall, 'kind' | 'dtype' | 'root'> & {
  readonly membership?: { readonly admitted: readonly number[] } | undefined;
  readonly reduceOp?: ReduceOp | undefined;
  readonly inputs: readonly { readonly length: number }[];
  readonly outputs: readonly { readonly length: number }[];
};

/** Elements of one of the arrays that the table of `EngineCall` calls n. */
function elements(call: NamedCall): number {
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
  return words.join(' ');
}

export function callRecord(call: OrderedCall, peer: number): CallRecord {
  const record: CallRecord = {
    kind: 'call',
    sequence: call.sequence,
    call: describeCall(call),
    ...(call.membership && { found: call.membership.found }),
  };
  if (call.kind !== 'all-to-all') return record;
  return { ...record, gives: call.inputs[peer]!.length, takes: call.outputs[peer]!.length };
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

/** all-to-all: what one rank gives must be what the other takes. */
function differentLengths(
  call: EngineCall,
  rank: number,
  records: ReadonlyMap<number, CallRecord>,
): EpError<'EP_MISMATCH'> | undefined {
  if (call.kind !== 'all-to-all') return undefined;
  for (const [peer, { gives, takes }] of [...records].sort(([a], [b]) => a - b)) {
    const pairs = [
      { from: rank, to: peer, sent: call.inputs[peer]!.length, taken: takes },
      { from: peer, to: rank, sent: gives, taken: call.outputs[peer]!.length },
    ];
    for (const { from, to, sent, taken } of pairs) {
      if (sent === taken) continue;
      const expected = `rank ${from} gives ${sent} elements to rank ${to}`;
      const found = `rank ${to} takes ${taken}`;
      return new EpError('EP_MISMATCH', `call ${call.sequence}: all-to-all ${call.dtype}: ${expected}, but ${found}`, {
        context: { ranks: [from, to].sort((a, b) => a - b), sequence: call.sequence, expected, found },
      });
    }
  }
  return undefined;
}

/** `records`: of the peers that have come. */
export function findMismatch(
  call: OrderedCall,
  rank: number,
  records: ReadonlyMap<number, CallRecord>,
): EpError<'EP_MISMATCH'> | undefined {
  const calls = new Map([...records].map(([peer, record]) => [peer, record.call]));
  calls.set(rank, describeCall(call));
  return differentCalls(call.sequence, calls) ?? differentLengths(call, rank, records);
}
