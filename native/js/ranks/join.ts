/** How ranks of one host find each other: by an introduction, then through shared control segments. */
import { createHash } from 'node:crypto';
import type { Member, Rank, WaitOptions } from '@ep/core';
import { segmentHandleLayout } from '../abi.gen.js';
import type { NativeRankContext } from '../binding.js';
import { native } from '../native.js';
import type { Introduction } from './introduction.js';
import { Liveness } from './liveness.js';
import { RankTeam } from './team.js';

const HANDLE_BYTES = segmentHandleLayout.byteLength;
const ID_DIGITS = 16;

export interface JoinOptions extends Omit<Member, 'store'> {
  /** Of the transport, for example `nvshmem:shm`: names it to the other ranks. */
  readonly transport: string;
  readonly version: string;
  /** Who is here at first, ascending; all ranks unless given. Nobody is in the other places until some are let in (`Members.readmit`). */
  readonly activeRanks?: readonly Rank[] | undefined;
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
  /** By rank, `ep_segment_handle` of the control segment; empty for a place in which nobody is. */
  readonly controls: readonly Uint8Array[];
  /** How often the world had let ranks in. */
  readonly round: number;
  /** Names the world: no other one has this name. */
  readonly id: string;
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
  const here = options.activeRanks ?? Array.from({ length: worldSize }, (_, one) => one);
  await introduction.compare({ agree: agreementOf(options) }, limits);
  const context = new binding.RankContext(rank, worldSize, ranksOnHost);
  try {
    const handle = context.handle();
    // Of the first one's alone; the others' stays empty.
    const team = rank === here[0] ? context.createTeamSegment(here.length) : new Uint8Array(HANDLE_BYTES);
    const told = await introduction.tell('control', { handle, team }, limits);
    const controls: Uint8Array[] = Array.from({ length: worldSize }, () => new Uint8Array(0));
    for (const [at, theirs] of told.entries()) controls[here[at]!] = theirs.handle.slice();
    connectControls(context, controls);
    const ranks = Int32Array.from(here);
    const liveness = new Liveness(context, rank, worldSize);
    const world = new RankTeam({ context, liveness, worldRank: rank, handle: told[0]!.team, ranks, timeoutMs });
    try {
      // From here on nobody needs the introduction: all ranks have mapped each other.
      await world.barrier(limits);
    } catch (error) {
      await world.close();
      throw error;
    }
    const id = createHash('sha256').update(told[0]!.team).digest('hex').slice(0, ID_DIGITS);
    return { context, liveness, world, controls, round: 0, id };
  } catch (error) {
    context.close();
    throw error;
  }
}

/** Maps the control segments of all that are here; see `JoinedRanks.controls`. */
export function connectControls(context: NativeRankContext, controls: readonly Uint8Array[]): void {
  const handles = new Uint8Array(controls.length * HANDLE_BYTES);
  for (const [rank, handle] of controls.entries()) handles.set(handle, rank * HANDLE_BYTES);
  context.connect(handles);
}
