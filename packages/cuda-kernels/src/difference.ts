/** Do all ranks say the same? Where not, finds the first line that differs, in a number of small rounds that is the same on every rank. */
import { createHash } from 'node:crypto';
import { EpError, formatRanks, type Rank } from '@ep/core';

/** Bytes that one rank contributes to one round. */
export const RECORD_BYTES = 64;
/** Bytes of the line that differs, which is all that an error shows of it. */
const SHOWN_BYTES = 4 * RECORD_BYTES;
const DIGEST_BYTES = 32;
const CAMPS_SHOWN = 4;
const REFUSED = 'refused: ';

/** The record of every rank that takes part, in their order. */
export type Round = (record: Uint8Array) => Promise<readonly Uint8Array[]>;

/** What a rank says that cannot do what all were asked to do: its peers hear why instead of waiting for it. */
export function refusal(reason: unknown): readonly string[] {
  return [`${REFUSED}${reason instanceof Error ? reason.message : String(reason)}`];
}

function digestRecord(lines: readonly string[]): Uint8Array {
  const record = new Uint8Array(RECORD_BYTES);
  record.set(createHash('sha256').update(JSON.stringify(lines)).digest());
  new DataView(record.buffer).setUint32(DIGEST_BYTES, lines.length, true);
  return record;
}

const countOf = (record: Uint8Array): number =>
  new DataView(record.buffer, record.byteOffset).getUint32(DIGEST_BYTES, true);

/** Ranks by what they said, the largest camp first. */
function campsOf(
  said: readonly string[],
  of: readonly Rank[],
): { readonly text: string; readonly ranks: readonly Rank[] }[] {
  const camps = new Map<string, Rank[]>();
  for (const [at, text] of said.entries()) camps.set(text, [...(camps.get(text) ?? []), of[at]!]);
  return [...camps].map(([text, ranks]) => ({ text, ranks })).sort((a, b) => b.ranks.length - a.ranks.length);
}

const textsOf = (records: readonly Uint8Array[]): string[] =>
  records.map((bytes) => Buffer.from(bytes).toString('hex'));

/** Index of the first line that is not the same everywhere. */
async function firstDifference(lines: readonly string[], most: number, round: Round): Promise<number> {
  let [low, high] = [0, most - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    const heads = textsOf(await round(digestRecord(lines.slice(0, middle + 1))));
    if (heads.every((head) => head === heads[0])) low = middle + 1;
    else high = middle;
  }
  return low;
}

async function exchangeLine(line: string | undefined, count: number, round: Round): Promise<string[]> {
  const own = new Uint8Array(SHOWN_BYTES);
  new TextEncoder().encodeInto(line ?? '', own);
  const lines = Array.from({ length: count }, () => Buffer.alloc(SHOWN_BYTES));
  for (let at = 0; at < SHOWN_BYTES; at += RECORD_BYTES) {
    for (const [i, part] of (await round(own.slice(at, at + RECORD_BYTES))).entries()) lines[i]!.set(part, at);
  }
  return lines.map((bytes) => bytes.toString('utf8').replace(/\0+$/, ''));
}

function describe(
  where: string,
  lines: readonly string[],
  { of, odd, majority }: { readonly of: readonly Rank[]; readonly odd: readonly Rank[]; readonly majority: boolean },
): string {
  const camps = campsOf(lines, of);
  const refused = camps.filter(({ text }) => text.startsWith(REFUSED));
  if (refused.length > 0) {
    const who = refused.map(({ text, ranks }) => `${formatRanks(ranks)} (${text.slice(REFUSED.length)})`);
    return `${where}: refused by ${who.slice(0, CAMPS_SHOWN).join(', ')}`;
  }
  const show = (text: string): string => (text === '' ? 'nothing' : JSON.stringify(text));
  const standard = majority ? lines[lines.findIndex((_, at) => !odd.includes(of[at]!))]! : undefined;
  const others = camps
    .filter(({ text }) => text !== standard)
    .map(({ text, ranks }) => `${show(text)} on ${formatRanks(ranks)}`);
  const found = `${others.slice(0, CAMPS_SHOWN).join(', ')}${others.length > CAMPS_SHOWN ? `, ${others.length - CAMPS_SHOWN} more` : ''}`;
  return standard === undefined
    ? `${where}: ranks differ: found ${found}`
    : `${where}: ${formatRanks(odd)} of ${lines.length} differ: expected ${show(standard)} as on the others, found ${found}`;
}

/**
 * Collective. Throws `EP_MISMATCH` on every rank unless all give the same lines: names the ranks outside of the majority (or, without one, those that
 * differ from this rank) and the first line that differs, as expected and as found. `ranks`: whose records they are, in their order; all ranks unless given.
 */
export async function compareLines(
  where: string,
  given: readonly string[],
  rank: Rank,
  round: Round,
  ranks?: readonly Rank[],
): Promise<void> {
  const lines = [`call: ${where}`, ...given];
  const records = await round(digestRecord(lines));
  const said = textsOf(records);
  const of = ranks ?? [...said.keys()];
  const camps = campsOf(said, of);
  if (camps.length === 1) return;
  // Every rank has seen the same records, so all of them go on with the same rounds.
  const at = await firstDifference(lines, Math.max(...records.map(countOf)), round);
  const differing = await exchangeLine(lines[at], records.length, round);
  const [largest] = camps;
  const majority = 2 * largest!.ranks.length > said.length;
  const standard = majority ? largest!.text : said[of.indexOf(rank)]!;
  const odd = said.flatMap((text, at) => (text === standard ? [] : [of[at]!]));
  throw new EpError('EP_MISMATCH', describe(where, differing, { of, odd, majority }), {
    context: { ranks: odd, line: at, found: differing, own: lines },
  });
}
