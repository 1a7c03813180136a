/** Making teams out of a team. */
import { createHash } from 'node:crypto';
import { checkInteger, EpError, formatRanks, invalid, type Rank, type WaitOptions } from '@ep/core';
import { type NativeRankContext, segmentHandleLayout } from '@ep/native';
import { type Liveness, RankTeam } from '@ep/native/ranks';
import type { ResolvedShmConfig } from './config.js';

export interface Splitter {
  readonly rank: Rank;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly config: ResolvedShmConfig;
}

const DIGEST_BYTES = 16;

function checkMembers(ranks: readonly Rank[], parent: RankTeam): Int32Array<ArrayBuffer> {
  const where = 'createTeam';
  if (!Array.isArray(ranks)) throw invalid('ranks', { where, expected: 'a list of ranks', found: ranks });
  if (!(parent instanceof RankTeam)) throw invalid('parent', { where, expected: 'a team', found: parent });
  const members = Int32Array.from(ranks);
  for (const [i, rank] of ranks.entries()) {
    checkInteger(rank, `ranks[${i}]`, where);
    if (!parent.ranks.includes(rank)) {
      throw invalid(`ranks[${i}]`, {
        where,
        expected: `one of the parent's ${formatRanks(parent.ranks)}`,
        found: rank,
      });
    }
    if (members.indexOf(rank) !== i) {
      throw invalid(`ranks[${i}]`, { where, expected: 'named once', found: rank });
    }
  }
  return members;
}

/** Collective over `parent`; see `ShmTransport.createTeam`. */
export async function splitTeam(
  splitter: Splitter,
  ranks: readonly Rank[],
  parent: RankTeam,
  options: WaitOptions,
): Promise<RankTeam | undefined> {
  const { rank, context, liveness, config } = splitter;
  const members = checkMembers(ranks, parent);
  const own = members.includes(rank);
  const digest = createHash('sha256').update(members).digest().subarray(0, DIGEST_BYTES);
  // What goes wrong here is reported at the end, when the others have heard of it.
  let failure: unknown;
  const attempt = <T>(body: () => T): T | undefined => {
    try {
      return body();
    } catch (error) {
      failure ??= error;
      return undefined;
    }
  };
  const blob = new Uint8Array(DIGEST_BYTES + segmentHandleLayout.byteLength);
  blob.set(digest);
  if (members[0] === rank) {
    const handle = attempt(() => context.createTeamSegment(members.length));
    if (handle) blob.set(handle, DIGEST_BYTES);
  }
  const blobs = await parent.allGather(blob, options);
  const of = (member: Rank): Uint8Array => blobs[parent.ranks.indexOf(member)]!;
  const odd = own ? [...members].filter((member) => Buffer.compare(of(member).subarray(0, DIGEST_BYTES), digest)) : [];
  if (odd.length > 0) {
    failure ??= new EpError(
      'EP_MISMATCH',
      `createTeam: ${formatRanks(odd)} gave other members than this rank, which gave ${[...members].join(', ')}`,
      { context: { odd, members: [...members] } },
    );
  }
  const handle = own && failure === undefined ? of(members[0]!).slice(DIGEST_BYTES) : undefined;
  const team =
    handle &&
    attempt(
      () => new RankTeam({ context, liveness, worldRank: rank, handle, ranks: members, timeoutMs: config.timeoutMs }),
    );
  try {
    // Also the barrier before which the first member may not close: all have mapped its segment now.
    const joined = await parent.allGather(Uint8Array.of(own && failure !== undefined ? 0 : 1), options);
    const failed = own ? [...members].filter((member) => joined[parent.ranks.indexOf(member)]![0] === 0) : [];
    if (failure !== undefined) throw failure;
    if (failed.length > 0) {
      throw new EpError('EP_MISMATCH', `createTeam: ${formatRanks(failed)} could not join`, {
        context: { ranks: failed },
      });
    }
  } catch (error) {
    await team?.close();
    throw error;
  }
  return team;
}
