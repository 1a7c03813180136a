/** Replays of graphs with calls of one buffer for experts, and what refuses them. */
import { EpError, formatRanks, type Work } from '@ep/core';
import type { GraphMember } from '@ep/native';
import type { Losses } from '../moe/losses.js';
import type { HeldCall } from '../moe/received.js';
import type { DeviceLaunches } from './moe-launches.js';
import type { DeviceMoeSlot } from './moe-slot.js';

export class MoeReplays {
  readonly #launches: DeviceLaunches;
  readonly #losses: Losses;
  readonly #slots: readonly DeviceMoeSlot[];
  /** Launched ones that have not ended, and where they run. */
  #replays = 0;
  #replayedOn: object | undefined;
  /** Captured calls that were released before a combine followed. */
  readonly #forgotten = new WeakSet<HeldCall>();

  constructor(launches: DeviceLaunches, losses: Losses, slots: readonly DeviceMoeSlot[]) {
    this.#launches = launches;
    this.#losses = losses;
    this.#slots = slots;
  }

  /** Throws `EP_BUSY` while any runs. */
  checkNone(where: string): void {
    if (this.#replays === 0) return;
    const why = `${where}: a graph with calls of this buffer is being replayed: await that first`;
    throw new EpError('EP_BUSY', why, { context: { replays: this.#replays } });
  }

  /** A captured call that no combine will follow: its graph is of no use. */
  forget(call: HeldCall): Work {
    const slot = this.#slots.find(({ held }) => held === call);
    if (slot !== undefined) {
      slot.held = undefined;
      this.#forgotten.add(call);
    }
    call.stage = 'released';
    return this.#launches.done('release');
  }

  /** Refuses replays while calls are under way, beside replays on another stream, and once somebody is lost whom the graph counts on. */
  member(call: HeldCall, slot: DeviceMoeSlot, active: Uint8Array, uncounted: () => void): GraphMember {
    return {
      endCapture: (failed) => {
        if (!failed) return;
        // As if it had never been: other ranks may not have captured it.
        if (slot.held === call) slot.held = undefined;
        call.stage = 'released';
        uncounted();
      },
      beginReplay: (operation, queue) => {
        this.#launches.checkUsable(operation);
        if (this.#forgotten.has(call)) {
          const why = `${operation}: a captured call of experts was released before a combine of it was captured: capture both anew`;
          throw new EpError('EP_INVALID_ARGUMENT', why, { context: { slot: slot.index } });
        }
        if (this.#replays > 0 && this.#replayedOn !== queue) {
          const why = `${operation}: a graph with calls of this buffer is being replayed on another stream: await that first`;
          throw new EpError('EP_BUSY', why, { context: { replays: this.#replays } });
        }
        const held = this.#slots.filter((one) => one.held !== undefined).length;
        if (held > 0) {
          const why = `${operation}: ${held} calls of a buffer for experts in this graph are held: combine or release them first`;
          throw new EpError('EP_BUSY', why, { context: { held } });
        }
        const now = this.#losses.active(undefined, operation);
        const lost = [...active.keys()].filter((rank) => active[rank] !== now[rank]);
        if (lost.length > 0) {
          const why = `${operation}: ${formatRanks(lost)} ${lost.length > 1 ? 'were' : 'was'} lost since calls of experts were captured: capture them anew`;
          throw new EpError('EP_PEER_LOST', why, { context: { ranks: lost } });
        }
        const replay = this.#launches.beginReplay(operation);
        this.#replays++;
        this.#replayedOn = queue;
        return {
          cuts: replay.cuts,
          end: (failure) => {
            this.#replays--;
            for (const { routing } of this.#slots) this.#losses.note(routing.ranks);
            replay.end(failure);
          },
        };
      },
    };
  }
}
