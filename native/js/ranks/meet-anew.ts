/** Queue pairs between ranks of which some have come in the place of dead ones. */
import type { WaitOptions } from '@ep/core';
import { byRank } from './allocate.js';
import { reportStep, type SetUpStep, together } from './gather.js';
import type { RankTeam } from './team.js';

export interface Meeting<Nic> {
  /** All that are here. */
  readonly world: RankTeam;
  readonly worldSize: number;
  /** For messages. */
  readonly where: string;
  /** Comes first, on all ranks or on none: what this rank has under way on the queue pairs of before lands. Nobody prepares before all have done it. */
  readonly land?: (limits: WaitOptions) => Promise<void>;
  /** Makes this rank's queue pairs ready to be connected to those of the others. */
  readonly prepare: () => Nic;
  /** What the others must know of this rank's; of one length on all ranks. */
  readonly say: (nic: Nic) => Uint8Array;
  /** Given what each rank said, by rank; empty for ranks that are not here. */
  readonly connect: (nic: Nic, connections: readonly Uint8Array[]) => void;
  /** What `prepare` has made is of no use. */
  readonly undo: (nic: Nic) => void;
}

/** Collective over `world`, by those that come and those that stay. Rejects on all ranks where one cannot. */
export async function meetAnew<Nic>(meeting: Meeting<Nic>, limits: WaitOptions): Promise<Nic> {
  const { world, worldSize, where, land, prepare, say, connect, undo } = meeting;
  const step = (what: string): SetUpStep => ({ where, what, code: 'EP_TRANSPORT_FAILED' });
  if (land !== undefined) {
    await together(world, step('let land what it had put'), limits, () => land(limits));
  }
  const nic = await together(world, step('make its queue pairs ready'), limits, prepare, undo);
  try {
    const said = await reportStep(world, step('tell its queue pairs'), say(nic), undefined, limits);
    // HAZARD: until all have done it, a peer's queue pair may not be ready to receive: what is sent there waits for a whole timeout.
    await together(world, step('connect to the others'), limits, () => connect(nic, byRank(world, worldSize, said)));
    return nic;
  } catch (error) {
    undo(nic);
    throw error;
  }
}
