/** How ranks of one host find each other: through a store, then through shared control segments. */
import { EpError, exchange, type Member, rendezvous, type WaitOptions } from '@ep/core';
import { segmentHandleLayout } from '../abi.gen.js';
import type { NativeRankContext } from '../binding.js';
import { native } from '../native.js';
import { Liveness } from './liveness.js';
import { RankTeam } from './team.js';

const HANDLE_BYTES = segmentHandleLayout.byteLength;

export interface JoinOptions extends Member {
  /** Of the transport, for example `nvshmem:shm`: names it to the other ranks and prefixes its keys in the store. */
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
 * Collective. A store serves one call of one world and transport. Rejects with `EP_RENDEZVOUS` naming the odd ranks. The caller closes `world`, then
 * `context`.
 */
export async function joinRanks(options: JoinOptions, limits: WaitOptions): Promise<JoinedRanks> {
  const { rank, worldSize, store, transport, ranksOnHost, timeoutMs } = options;
  const { binding } = native();
  await rendezvous(
    store,
    {
      rank,
      worldSize,
      facts: { agree: agreementOf(options) },
      key: `${transport}/rendezvous`,
    },
    limits,
  );
  const context = new binding.RankContext(rank, worldSize, ranksOnHost);
  try {
    const blob = new Uint8Array(2 * HANDLE_BYTES);
    blob.set(context.handle());
    if (rank === 0) blob.set(context.createTeamSegment(worldSize), HANDLE_BYTES);
    const blobs = await exchange(store, { rank, worldSize, key: `${transport}/control`, bytes: blob }, limits);
    const handles = new Uint8Array(worldSize * HANDLE_BYTES);
    for (const [peer, bytes] of blobs.entries()) {
      if (bytes.byteLength !== blob.byteLength) {
        throw new EpError(
          'EP_RENDEZVOUS',
          `rank ${peer} published ${bytes.byteLength} bytes of handles, expected ${blob.byteLength}`,
        );
      }
      handles.set(bytes.subarray(0, HANDLE_BYTES), peer * HANDLE_BYTES);
    }
    context.connect(handles);
    const ranks = Int32Array.from({ length: worldSize }, (_, peer) => peer);
    const liveness = new Liveness(context, rank, worldSize);
    const handle = blobs[0]!.subarray(HANDLE_BYTES);
    const world = new RankTeam({ context, liveness, worldRank: rank, handle, ranks, timeoutMs });
    try {
      // From here on nobody needs the store: all ranks have mapped each other.
      await world.barrier(limits);
    } catch (error) {
      await world.close();
      throw error;
    }
    const controls = blobs.map((bytes) => bytes.slice(0, HANDLE_BYTES));
    return { context, liveness, world, controls, round: 0 };
  } catch (error) {
    context.close();
    throw error;
  }
}
