/** How ranks of one host find each other: by an introduction, then through shared control segments. */
import { createHash } from 'node:crypto';
import {
  EpError,
  type FactTable,
  formatRanks,
  hostFacts,
  isEpError,
  type Member,
  type Rank,
  type WaitOptions,
} from '@ep/core';
import { segmentHandleLayout } from '../abi.gen.js';
import type { NativeRankContext } from '../binding.js';
import { native } from '../native.js';
import type { Introduction } from './introduction.js';
import { Liveness } from './liveness.js';
import { hostOfProcess, hostsOf } from './secret.js';
import { RankTeam } from './team.js';

const HANDLE_BYTES = segmentHandleLayout.byteLength;
const ID_DIGITS = 16;

export interface JoinOptions extends Omit<Member, 'store'> {
  /** Of the transport, for example `nvshmem:shm`: names it to the other ranks. */
  readonly transport: string;
  readonly version: string;
  /** Who is here at first, ascending; all ranks unless given. Nobody is in the other places until some are let in (`Members.readmit`). */
  readonly activeRanks?: readonly Rank[] | undefined;
  /**
   * Which ranks share a host: for each the lowest one of its host, or `found`: as they find when they meet. Then all meet, and each is joined to those of its own host; there are no `activeRanks`. All of
   * one host unless given.
   */
  readonly hosts?: readonly Rank[] | 'found' | undefined;
  /** What all ranks must have chosen alike, beside transport, version, ABI, `ranksOnHost` and `hosts`. */
  readonly agree?: Readonly<Record<string, string | number | boolean>>;
  /** Undefined: as many as are joined. */
  readonly ranksOnHost: number | undefined;
  /** Of the world's own calls that give none, in milliseconds. */
  readonly timeoutMs: number;
}

export interface JoinedRanks {
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  /** All ranks that are here, in order: of this host. */
  readonly world: RankTeam;
  /** By rank, `ep_segment_handle` of the control segment; empty for a place in which nobody is, and for ranks of other hosts. */
  readonly controls: readonly Uint8Array[];
  /** For each rank the lowest one of its host, where that was asked for. */
  readonly hosts?: readonly Rank[] | undefined;
  /** How often the world had let ranks in. */
  readonly round: number;
  /** Names the world: no other one has this name. */
  readonly id: string;
}

type Agreed = Pick<JoinOptions, 'transport' | 'version' | 'ranksOnHost' | 'hosts' | 'agree'>;

const agreementOf = ({ transport, version, ranksOnHost, hosts, agree }: Agreed): FactTable => ({
  transport,
  version,
  abi: native().binding.abi,
  ranksOnHost: ranksOnHost ?? 'as many as there are',
  ...(hosts && { hosts: typeof hosts === 'string' ? hosts : hosts.join(' ') }),
  ...agree,
});

/** What all ranks must have chosen alike, as one text. */
export const agreedFacts = (options: Agreed): string => JSON.stringify(agreementOf(options));

/**
 * Collective. An introduction serves one call of one world and transport. Rejects with `EP_RENDEZVOUS` naming the odd ranks. The caller closes `world`, then
 * `context`.
 */
export async function joinRanks(
  options: JoinOptions,
  introduction: Introduction,
  limits: WaitOptions,
): Promise<JoinedRanks> {
  const { rank, worldSize } = options;
  const all = options.activeRanks ?? Array.from({ length: worldSize }, (_, one) => one);
  const host = options.hosts && { host: { ...hostFacts(), place: hostOfProcess() } };
  const peers = await introduction.compare({ agree: agreementOf(options), ...host }, limits);
  const hosts = options.hosts === 'found' ? hostsOf(peers) : options.hosts;
  const here = all.filter((one) => hosts === undefined || hosts[one] === hosts[rank]);
  if (hosts === undefined) return join(options, { all, here }, introduction, limits);
  let joined: JoinedRanks | undefined;
  let failure: unknown;
  try {
    joined = await join(options, { all, here }, introduction, limits);
  } catch (error) {
    failure = error;
    // The others' time is up, too, or soon.
    if (limits.signal?.aborted === true || (isEpError(error) && error.code === 'EP_TIMEOUT')) throw error;
  }
  try {
    // Of which those of other hosts know nothing.
    const told = await introduction.tell('joined', { well: Uint8Array.of(joined === undefined ? 0 : 1) }, limits);
    if (joined === undefined) throw failure;
    const failed = all.filter((_, at) => told[at]!.well[0] !== 1);
    if (failed.length === 0) return { ...joined, hosts };
    const text = `${options.transport}: ${formatRanks(failed)} could not join those of their hosts`;
    throw new EpError('EP_RENDEZVOUS', text, { context: { ranks: failed } });
  } catch (error) {
    await joined?.world.close();
    joined?.context.close();
    throw failure ?? error;
  }
}

/** `all`: who is introduced; `here`: who shares this host. Both ascending. */
async function join(
  options: JoinOptions,
  { all, here }: { readonly all: readonly Rank[]; readonly here: readonly Rank[] },
  introduction: Introduction,
  limits: WaitOptions,
): Promise<JoinedRanks> {
  const { rank, worldSize, ranksOnHost, timeoutMs } = options;
  const context = new (native().binding.RankContext)(rank, worldSize, ranksOnHost ?? here.length);
  try {
    const handle = context.handle();
    // Of the first one's alone; the others' stays empty.
    const team = rank === here[0] ? context.createTeamSegment(here.length) : new Uint8Array(HANDLE_BYTES);
    const told = await introduction.tell('control', { handle, team }, limits);
    const controls: Uint8Array[] = Array.from({ length: worldSize }, () => new Uint8Array(0));
    for (const one of here) controls[one] = told[all.indexOf(one)]!.handle.slice();
    connectControls(
      context,
      controls,
      all.filter((one) => !here.includes(one)),
    );
    const ranks = Int32Array.from(here);
    const first = told[all.indexOf(here[0]!)]!.team;
    const liveness = new Liveness(context, rank, worldSize);
    const world = new RankTeam({ context, liveness, worldRank: rank, handle: first, ranks, timeoutMs });
    try {
      // From here on nobody needs the introduction: all ranks have mapped each other.
      await world.barrier(limits);
    } catch (error) {
      await world.close();
      throw error;
    }
    const id = createHash('sha256').update(first).digest('hex').slice(0, ID_DIGITS);
    return { context, liveness, world, controls, round: 0, id };
  } catch (error) {
    context.close();
    throw error;
  }
}

/** Maps the control segments of all that are here; see `JoinedRanks.controls`. `elsewhere`: on other hosts. */
export function connectControls(
  context: NativeRankContext,
  controls: readonly Uint8Array[],
  elsewhere: readonly Rank[] = [],
): void {
  const handles = new Uint8Array(controls.length * HANDLE_BYTES);
  for (const [rank, handle] of controls.entries()) handles.set(handle, rank * HANDLE_BYTES);
  context.connect(handles, Int32Array.from(elsewhere));
}
