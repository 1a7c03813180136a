/** Calls, ranks and times in words, the same in findings, tables and timelines. */
import type { TraceEntry } from '@ep/collectives/trace';

/** A name that cannot garble a terminal, and where it begins and ends is plain. */
export const nameText = (name: string): string =>
  /^[\w.:/#@+-]+$/.test(name)
    ? name
    : // HAZARD: JSON leaves these as they are, and some of them steer terminals.
      JSON.stringify(name).replace(
        /[\u007f-\u009f]/g,
        (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, '0')}`,
      );

/** `broadcast(f32[4], root 0)`, `allReduce(bf16[8], sum)`, `recv(u8[16] from any, tag 3)`. */
export function callText(entry: TraceEntry): string {
  const of = entry.kind === 'barrier' ? [] : [`${entry.dtype}[${entry.elements}]`];
  if (entry.kind === 'send') of[0] += ` to ${entry.peer}`;
  if (entry.kind === 'recv') of[0] += ` from ${entry.peer === -1 ? 'any' : entry.peer}`;
  if (entry.reduceOp !== undefined) of.push(entry.reduceOp);
  if (entry.root !== undefined) of.push(`root ${entry.root}`);
  if (entry.tag !== undefined) of.push(`tag ${entry.tag}`);
  return `${nameText(entry.op)}(${of.join(', ')})`;
}

/** `rank 3`, `ranks 0, 2-5`. */
export function ranksText(ranks: readonly number[]): string {
  const sorted = [...ranks].sort((a, b) => a - b);
  const runs: string[] = [];
  for (let i = 0; i < sorted.length; ) {
    let end = i;
    while (sorted[end + 1] === sorted[end]! + 1) end++;
    runs.push(end === i ? `${sorted[i]}` : `${sorted[i]}-${sorted[end]}`);
    i = end + 1;
  }
  return `${sorted.length === 1 ? 'rank' : 'ranks'} ${runs.join(', ')}`;
}

export const countText = (count: number, what: string): string => `${count} ${what}${count === 1 ? '' : 's'}`;

/** Four digits at most, in the unit that fits. */
export function durationText(us: number): string {
  for (const [unit, size] of [
    ['s', 1e6],
    ['ms', 1e3],
  ] as const)
    if (Math.abs(us) >= size) return `${Number((us / size).toPrecision(4))} ${unit}`;
  return `${Math.round(us)} us`;
}

/** How a call stands, behind its name: `, ended`, `, failed with EP_TIMEOUT`, `, queued`. */
export function stateText(entry: TraceEntry): string {
  switch (entry.state) {
    case 'done':
      return 'ended';
    case 'queued':
      return 'queued';
    case 'started':
      return 'under way';
    default:
      return `${entry.state} with ${nameText(entry.code ?? 'an unknown error')}`;
  }
}
