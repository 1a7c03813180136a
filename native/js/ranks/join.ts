/** How ranks of one host find each other: by an introduction, then through shared control segments. */
import type { Member, WaitOptions } from '@ep/core';
import { segmentHandleLayout } from '../abi.gen.js';
import type { NativeRankContext } from '../binding.js';
import { native } from '../native.js';
import type { Introduction } from './introduction.js';
import { Liveness } from './liveness.js';
import { RankTeam } from './team.js';

const HANDLE_BYTES = segmentHandleLayout.byteLength;

export interface JoinOptions extends Omit<Member, 'store'> {
  /** Of the transport, for example `nvshmem:shm`: names it to the other ranks. */
  readonly transport: string;
  readonly version: string;
  /** What all ranks must have chosen alike, beside transport, version, ABI and `ranksOnHost`. */
  readonly agree?: Readonly<Record<string, string | number | boolean>>;
  readonly ranksOnHost: number;
  /** Of the world's own calls that give none, in milliseconds. */
  readonly timeoutMs: number;
}

export interface JoinedRanks {
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  /** All ranks that are here, in order. */
  readonly world: RankTeam;
  /** `ep_segment_handle` of each rank's control segment; empty for a rank that is not here. */
  readonly controls: readonly Uint8Array[];
  /** How often the world had let ranks in. */
  readonly round: number;
}

type Agreed = Pick<JoinOptions, 'transport' | 'version' | 'ranksOnHost' | 'agree'>;

const agreementOf = ({ transport, version, ranksOnHost, agree }: Agreed) => ({
  transport,
  version,
  abi: native().binding.abi,
  ranksOnHost,
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
  const { rank, worldSize, ranksOnHost, timeoutMs } = options;
  const { binding } = native();
  await introduction.compare({ agree: agreementOf(options) }, limits);
  const context = new binding.RankContext(rank, worldSize, ranksOnHost);
  try {
    const handle = context.handle();
    // Of rank 0's alone; the others' stays empty.
    const team = rank === 0 ? context.createTeamSegment(worldSize) : new Uint8Array(HANDLE_BYTES);
    const told = await introduction.tell('control', { handle, team }, limits);
    const handles = new Uint8Array(worldSize * HANDLE_BYTES);
    for (const [peer, theirs] of told.entries()) handles.set(theirs.handle, peer * HANDLE_BYTES);
    context.connect(handles);
    const ranks = Int32Array.from({ length: worldSize }, (_, peer) => peer);
    const liveness = new Liveness(context, rank, worldSize);
    const world = new RankTeam({ context, liveness, worldRank: rank, handle: told[0]!.team, ranks, timeoutMs });
    try {
      // From here on nobody needs the introduction: all ranks have mapped each other.
      await world.barrier(limits);
    } catch (error) {
      await world.close();
      throw error;
    }
    const controls = told.map((theirs) => theirs.handle.slice());
    return { context, liveness, world, controls, round: 0 };
  } catch (error) {
    context.close();
    throw error;
  }
}
