/** What ranks of a buffer for experts tell each other when some come back into it, and what follows from that. */
import { createHash } from 'node:crypto';
import {
  type EpCode,
  EpError,
  ERROR_TABLE,
  formatRanks,
  isEpError,
  type Rank,
  type RankSaid,
  type RenewOptions,
  type SymmetricMemory,
  type Transport,
  type WaitOptions,
} from '@ep/core';
import type { NativeMoeBuffer } from '@ep/native';
import { moeLines, type ResolvedMoe } from './options.js';
import { farewellSlot } from './place.js';

export interface MemberFacts {
  /** Calls that the rank has begun; of a rank that is new: none. */
  readonly calls: number;
  /** Of all that ranks must have chosen alike. */
  readonly options: string;
  /** Whom it goes on without. */
  readonly lost: readonly Rank[];
  /** Why nothing can come of it. */
  readonly refused?: { readonly code: EpCode; readonly message: string };
}

/** What all ranks find alike. */
export interface Membership {
  readonly calls: number;
  /** Ranks that are here. */
  readonly present: readonly Rank[];
  /** Those of them that come back: new ones, and ones that some rank had given up alive. */
  readonly back: readonly Rank[];
  /** Those of them that had nothing of the buffer before. */
  readonly joined: readonly Rank[];
}

export const optionsDigest = (moe: ResolvedMoe): string =>
  createHash('sha256').update(moeLines(moe).join('\n')).digest('hex').slice(0, 32);

export const formatMember = (facts: MemberFacts): Uint8Array => new TextEncoder().encode(JSON.stringify(facts));

/** Throws `EP_MISMATCH` for bytes that no rank of this version sends. */
export function parseMember(bytes: Uint8Array, rank: Rank): MemberFacts {
  try {
    const { calls, options, lost, refused } = JSON.parse(new TextDecoder().decode(bytes)) as Record<string, unknown>;
    const sound =
      Number.isSafeInteger(calls) &&
      (calls as number) >= 0 &&
      typeof options === 'string' &&
      Array.isArray(lost) &&
      lost.every((one) => Number.isSafeInteger(one));
    const { code, message } = (refused ?? {}) as Record<string, unknown>;
    const known = refused === undefined || (Object.hasOwn(ERROR_TABLE, String(code)) && typeof message === 'string');
    if (sound && known) {
      const facts = { calls: calls as number, options: options as string, lost: lost as Rank[] };
      return refused === undefined
        ? facts
        : { ...facts, refused: { code: code as EpCode, message: message as string } };
    }
  } catch {
    // Said below.
  }
  throw new EpError('EP_MISMATCH', `rank ${rank} sent ${bytes.byteLength} bytes of another version`, {
    context: { odd: [rank] },
  });
}

/** The ranks of `of` that are not like most of them. */
function oddOnes<T>(of: ReadonlyMap<Rank, T>): Rank[] {
  const count = new Map<T, number>();
  for (const value of of.values()) count.set(value, (count.get(value) ?? 0) + 1);
  const [most] = [...count].sort((a, b) => b[1] - a[1])[0] ?? [];
  return [...of].filter(([, value]) => value !== most).map(([rank]) => rank);
}

/**
 * Throws on all ranks alike: what one of them refuses, `EP_MISMATCH` for ranks that were opened otherwise or, unless the buffer `beginsAgain` on all of them, are at another call.
 */
export function membershipOf(said: ReadonlyMap<Rank, RankSaid>, where: string, beginsAgain: boolean): Membership {
  const facts = new Map([...said].map(([rank, { facts }]) => [rank, parseMember(facts, rank)]));
  for (const [rank, { refused }] of facts) {
    if (refused === undefined) continue;
    throw new EpError(refused.code, `${where}: rank ${rank}: ${refused.message}`, { context: { ranks: [rank] } });
  }
  const odd = oddOnes(new Map([...facts].map(([rank, { options }]) => [rank, options])));
  if (odd.length > 0) {
    throw new EpError('EP_MISMATCH', `${where}: ${formatRanks(odd)} opened the buffer with other options`, {
      context: { odd },
    });
  }
  const stayed = new Map([...facts].filter(([rank]) => !said.get(rank)!.isNew));
  if (stayed.size === 0) {
    throw new EpError('EP_MISMATCH', `${where}: no rank is left that had the buffer; open another one`);
  }
  const calls = new Map([...stayed].map(([rank, one]) => [rank, one.calls]));
  // A rank may have failed in a call that another had ended, or begun no more.
  const astray = beginsAgain ? [] : oddOnes(calls);
  if (astray.length > 0) {
    const text = [...calls].map(([rank, count]) => `rank ${rank} has begun ${count}`).join(', ');
    throw new EpError('EP_MISMATCH', `${where}: ranks are at different calls: ${text}`, { context: { odd: astray } });
  }
  const present = [...facts.keys()];
  const joined = present.filter((rank) => said.get(rank)!.isNew);
  const givenUp = new Set([...stayed.values()].flatMap(({ lost }) => lost));
  const back = present.filter((rank) => joined.includes(rank) || givenUp.has(rank));
  return { calls: Math.max(...calls.values()), present, back, joined };
}

/** Nobody is in this place of the transport yet. */
export const isEmptyPlace = ({ isEmpty, rank: self }: Transport<never>, rank: Rank): boolean =>
  rank !== self && isEmpty?.(rank) === true;

/** Nothing that was sent before lands any more, on any rank: calls that were under way are over, and the buffer begins again. */
export const beginsAgain = ({ renews }: Transport<never>): boolean => renews === 'all';

/** Throws `EP_UNSUPPORTED` for transports over which a rank that died may still write. */
export function renewOf(
  transport: Transport<never>,
  where: string,
): (options: RenewOptions) => Promise<SymmetricMemory> {
  if (transport.renew !== undefined) return transport.renew;
  throw new EpError(
    'EP_UNSUPPORTED',
    `${where}: ${transport.name} lets no rank in anew: the ways to a dead rank are not opened again; close, and open another world`,
  );
}

/** What a rank tells the others in place of its reason: only errors of this project have a code. */
export function refusedBy(reason: unknown): NonNullable<MemberFacts['refused']> {
  const text = reason instanceof Error ? reason.message : String(reason);
  return { code: isEpError(reason) ? reason.code : 'EP_ABORTED', message: text.slice(0, 200) };
}

/** What ranks meet by. */
export interface MeetingPlace {
  readonly transport: Transport<never>;
  readonly memory: SymmetricMemory;
  readonly moe: ResolvedMoe;
  readonly native: Pick<NativeMoeBuffer, 'forget'>;
}

/** Where a rank is when it comes to the meeting. */
export interface Meeting {
  readonly where: string;
  readonly renew: ReturnType<typeof renewOf>;
  readonly options: WaitOptions;
  /** That it has begun, and that it still holds. */
  readonly calls: number;
  readonly held: number;
  /** Whom it goes on without. */
  readonly lost: readonly Rank[];
  /** Of the buffer. */
  readonly failure?: { readonly reason: unknown };
}

/** Collective over all ranks that are here, in memory that the transport renews for them. Resolves with what they find alike, and rejects on all of them; what came of those who come back before is forgotten. */
export async function meetMembers(
  { transport, memory, moe, native }: MeetingPlace,
  { where, renew, options, calls, held, lost, failure }: Meeting,
): Promise<Membership> {
  const again = beginsAgain(transport);
  const holds = `it holds ${held} ${held === 1 ? 'call' : 'calls'}: combine or release them first`;
  const poisoned =
    failure === undefined || again ? undefined : { ...refusedBy(failure.reason), code: 'EP_POISONED' as const };
  const refused = poisoned ?? (held === 0 || again ? undefined : { code: 'EP_BUSY' as const, message: holds });
  const facts: MemberFacts = { calls, options: optionsDigest(moe), lost, ...(refused && { refused }) };
  let membership: Membership | undefined;
  await renew({
    memory,
    byteLength: memory.byteLength,
    signalSlots: memory.signals.slots,
    facts: formatMember(facts),
    timeoutMs: moe.timeoutMs,
    ...options,
    check: (said) => {
      membership = membershipOf(said, where, again);
    },
    settle: () => {
      const { present, back } = membership!;
      const everybody = Array.from({ length: transport.worldSize }, (_, rank) => rank);
      const others = (back.includes(transport.rank) ? present : back).filter((rank) => rank !== transport.rank);
      for (const rank of again ? everybody : others) native.forget(rank, farewellSlot(moe) + rank);
    },
  });
  return membership!;
}
