/** Queue pairs between ranks of which some have come in the place of dead ones. */
import { EpError, type WaitOptions } from '@ep/core';
import type { NativeIbgdaNic } from '@ep/native';
import { byRank, type RankTeam, reportStep, type SetUpStep, together } from '@ep/native/ranks';
import type { ResolvedIbgdaConfig } from './config.js';

export interface Meeting {
  /** All that are here. */
  readonly world: RankTeam;
  readonly worldSize: number;
  /** For messages. */
  readonly where: string;
  /** Makes this rank's queue pairs ready to be connected to those of the others. */
  readonly prepare: () => NativeIbgdaNic;
  /** Given what each rank said, by rank; empty for ranks that are not here. */
  readonly connect: (nic: NativeIbgdaNic, connections: readonly Uint8Array[]) => void;
  /** What `prepare` has made is of no use. */
  readonly undo: (nic: NativeIbgdaNic) => void;
}

/** Collective over `world`, by those that come and those that stay. Rejects on all ranks where one cannot. */
export async function meetAnew(meeting: Meeting, limits: WaitOptions): Promise<NativeIbgdaNic> {
  const { world, worldSize, where, prepare, connect, undo } = meeting;
  const step = (what: string): SetUpStep => ({ where, what, code: 'EP_TRANSPORT_FAILED' });
  const nic = await together(world, step('make its queue pairs ready'), limits, prepare, undo);
  try {
    const said = await reportStep(world, step('tell its queue pairs'), nic.connection(), undefined, limits);
    // HAZARD: until all have done it, a peer's queue pair may not be ready to receive: what is sent there waits for a whole timeout.
    await together(world, step('connect to the others'), limits, () => connect(nic, byRank(world, worldSize, said)));
    return nic;
  } catch (error) {
    undo(nic);
    throw error;
  }
}

/** Throws `EP_UNSUPPORTED` for worlds that nobody can join again. */
export function checkRenewable({ network, device }: ResolvedIbgdaConfig, where: string): void {
  const why =
    network !== undefined
      ? 'ranks that a network joins share no memory, through which they would meet'
      : device !== undefined
        ? 'memory of a GPU is not connected anew'
        : undefined;
  if (why === undefined) return;
  throw new EpError('EP_UNSUPPORTED', `${where}: no rank comes back: ${why}; close, and open another world`);
}
