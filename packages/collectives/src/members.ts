/** What the ranks of a group agree on before some of them make another one. */
import { createHash } from 'node:crypto';
import { checkInteger, EpError, formatRanks, invalid, type Rank } from '@ep/core';
import type { CallLimits, Lane } from './lane.js';

const LARGEST = 2 ** 31 - 1;
const NO_COLOR = -1;

/** Throws unless they are ranks below `end`, each named once. */
export function checkRanks(ranks: readonly Rank[], where: string, end: number): void {
  if (!Array.isArray(ranks)) throw invalid('ranks', { where, expected: 'a list of ranks', found: ranks });
  const seen = new Set<Rank>();
  for (const [i, rank] of ranks.entries()) {
    checkInteger(rank, `ranks[${i}]`, where, 0, end - 1);
    if (seen.has(rank)) throw invalid(`ranks[${i}]`, { where, expected: 'named once', found: rank });
    seen.add(rank);
  }
}

/** As `checkRanks`, of at least one. */
export function checkMembers(ranks: readonly Rank[], where: string, size: number): void {
  if (!Array.isArray(ranks) || ranks.length === 0) {
    throw invalid('ranks', { where, expected: 'a list of at least one rank', found: ranks });
  }
  checkRanks(ranks, where, size);
}

/** The numbers of every rank that takes part. */
async function gatherNumbers(
  lane: Lane,
  op: string,
  numbers: Int32Array,
  limits: CallLimits,
): Promise<ReadonlyMap<Rank, Int32Array>> {
  const outputs = Array.from({ length: lane.engine.size }, () => new Int32Array(numbers.length));
  const call = { kind: 'all-gather', sequence: 0, dtype: 'i32', root: -1, inputs: [numbers], outputs } as const;
  const work = lane.run(op, { ...call, ...limits }, numbers.length);
  await work;
  return new Map(work.contributors.map((rank) => [rank, outputs[rank]!]));
}

interface Proposal {
  readonly ranks: readonly Rank[];
  /** Undefined: none was given. */
  readonly label: string | undefined;
  /** Which group of this rank's it would be. */
  readonly made: number;
}

/** HAZARD: a rank whose call was refused, or that others waited for in vain, has counted otherwise: the group's is the highest number that any has. */
const agreedNumber = (numbers: Iterable<number>): number => Math.max(...numbers);

/** What all ranks that made the call know alike of a group that is about to be opened. */
export interface Agreed {
  readonly made: number;
  /** Who has agreed to it: nobody waits for others. */
  readonly contributors: readonly Rank[];
}

/** The number of the group. Throws `EP_MISMATCH` on all ranks alike unless all propose the same: names those outside of the majority, or everybody where there is none. */
export async function agreeOnMembers(lane: Lane, op: string, proposal: Proposal, limits: CallLimits): Promise<Agreed> {
  const { size } = lane.engine;
  const { ranks, label } = proposal;
  const label32 = label === undefined ? 0 : createHash('sha256').update(label).digest().readInt32LE() | 1;
  const gathered = await gatherNumbers(
    lane,
    op,
    Int32Array.of(proposal.made, label32, ranks.length, ...ranks, ...new Array<number>(size - ranks.length).fill(0)),
    limits,
  );
  const all = new Map([...gathered].map(([rank, row]) => [rank, row.subarray(1)]));
  const camps = new Map<string, Rank[]>();
  for (const [rank, row] of all) {
    const key = row.join();
    const camp = camps.get(key);
    if (camp === undefined) camps.set(key, [rank]);
    else camp.push(rank);
  }
  if (camps.size === 1) {
    return { made: agreedNumber([...gathered.values()].map(([made]) => made!)), contributors: [...gathered.keys()] };
  }
  const [largest, ...others] = [...camps.values()].sort((a, b) => b.length - a.length || a[0]! - b[0]!) as [
    Rank[],
    ...Rank[][],
  ];
  const majority = 2 * largest.length > all.size;
  const describe = ([rank]: readonly Rank[]): string => {
    const [digest, count, ...members] = all.get(rank!)!;
    const name = digest === all.get(largest[0]!)![0] ? '' : ' under another name';
    return `[${members.slice(0, count).join(', ')}]${name}`;
  };
  const odd = majority ? others : [largest, ...others];
  const shown = odd.map((camp) => `${describe(camp)} on ${formatRanks(camp)}`);
  const rest = majority ? `, ${describe(largest)} on the others` : '';
  throw new EpError('EP_MISMATCH', `${op}: members are ${shown.join(', ')}${rest}`, {
    context: { ranks: odd.flat().sort((a, b) => a - b), given: [...ranks] },
  });
}

export function checkColor(color: number | undefined, key: number, op: string): void {
  if (color !== undefined) checkInteger(color, 'color', op, 0, LARGEST);
  checkInteger(key, 'key', op, -LARGEST, LARGEST);
}

/** The number of the groups, and the ranks of this rank's colour in the order of their keys; undefined without one. */
export async function agreeOnColors(
  lane: Lane,
  op: string,
  { color, key, made }: { readonly color: number | undefined; readonly key: number; readonly made: number },
  limits: CallLimits,
): Promise<{ readonly made: number; readonly ranks: readonly Rank[] | undefined }> {
  const all = await gatherNumbers(lane, op, Int32Array.of(color ?? NO_COLOR, key, made), limits);
  const agreed = agreedNumber([...all.values()].map(([, , its]) => its!));
  if (color === undefined) return { made: agreed, ranks: undefined };
  const same = [...all].filter(([, [its]]) => its === color);
  const ranks = same.sort(([a, [, keyA]], [b, [, keyB]]) => keyA! - keyB! || a - b).map(([rank]) => rank);
  return { made: agreed, ranks };
}
