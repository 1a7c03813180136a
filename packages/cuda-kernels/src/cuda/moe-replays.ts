/** Calls of one buffer for experts that are parts of graphs: the captures that they are made in, the replays of them, and what refuses those. */
import { EpError, formatRanks, type Rank, type Work } from '@ep/core';
import type { GraphMember } from '@ep/native';
import { checkLayout, type Losses, lostOf } from '../moe/losses.js';
import type { HeldCall } from '../moe/received.js';
import type { DeviceLaunches } from './moe-launches.js';
import type { KeptLayout } from './moe-layouts.js';
import type { DeviceMoeSlot } from './moe-slot.js';
import type { DeviceMoeSlots } from './moe-slots.js';
import type { DeviceSource } from './operand.js';

/** A call that a graph is made of. */
export interface CapturedCall {
  readonly call: HeldCall;
  readonly slot: DeviceMoeSlot;
  /** Who took part when it was captured. */
  readonly active: Uint8Array;
  /** Where each replay finds its choices; or the layout that all of them go by. */
  readonly routes: { readonly choices: DeviceSource } | { readonly layout: KeptLayout };
}

const layoutOf = ({ routes }: CapturedCall): KeptLayout | undefined => ('layout' in routes ? routes.layout : undefined);

export class MoeReplays {
  readonly #launches: DeviceLaunches;
  readonly #losses: Losses;
  readonly #slots: DeviceMoeSlots;
  /** Launched ones that have not ended, and where they run. */
  #replays = 0;
  #replayedOn: object | undefined;
  readonly #calls = new WeakMap<HeldCall, CapturedCall>();
  /** Why graphs with these calls are of no use. */
  readonly #useless = new WeakMap<HeldCall, string>();
  /** Calls whose capture has ended. */
  readonly #ended = new WeakSet<HeldCall>();

  constructor(launches: DeviceLaunches, losses: Losses, slots: DeviceMoeSlots) {
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

  /** The call takes its slot, and its layout, until its combine was captured. */
  take(captured: CapturedCall): void {
    this.#calls.set(captured.call, captured);
    this.#slots.take(captured.slot, captured.call);
    layoutOf(captured)?.hold();
  }

  /** Of a call that is to be captured further. Throws `EP_INVALID_ARGUMENT` once the capture that it began in has ended. */
  capturedOf(call: HeldCall, where: string): CapturedCall {
    if (!this.#ended.has(call)) return this.#calls.get(call)!;
    const why = `${where}: the call began in a capture that has ended: all of a call is in one graph`;
    throw new EpError('EP_INVALID_ARGUMENT', why, { context: { slot: call.slot } });
  }

  /** All of the call was captured, or none of it will be used: others may have its slot and its layout. */
  drop(captured: CapturedCall): void {
    const { call, slot } = captured;
    call.stage = 'released';
    if (slot.held !== call) return;
    slot.held = undefined;
    layoutOf(captured)?.letGo();
  }

  /** A captured call that no combine will follow: its graph is of no use. */
  forget(call: HeldCall): Work {
    const captured = this.#calls.get(call);
    if (captured?.slot.held === call) {
      this.#useless.set(call, 'was released before a combine of it was captured');
      this.drop(captured);
    }
    call.stage = 'released';
    return this.#launches.done('release');
  }

  /** Refuses replays while calls are under way, beside replays on another stream, and once somebody is lost whom the graph counts on, or the layout that it goes by. */
  member(captured: CapturedCall): GraphMember {
    return {
      endCapture: (failed) => this.#endCapture(captured, failed),
      beginReplay: (operation, queue) => {
        this.#launches.checkUsable(operation);
        this.#checkGraph(captured, operation);
        this.#checkQueue(operation, queue);
        const replay = this.#launches.beginReplay(operation);
        this.#replays++;
        this.#replayedOn = queue;
        return {
          cuts: replay.cuts,
          end: (failure) => {
            this.#replays--;
            this.#noteLosses(captured);
            replay.end(failure);
          },
        };
      },
    };
  }

  #endCapture(captured: CapturedCall, failed: boolean): void {
    const { call } = captured;
    this.#ended.add(call);
    if (failed) {
      // As if it had never been: other ranks may not have captured it.
      this.drop(captured);
      this.#slots.uncount();
      return;
    }
    if (call.stage !== 'dispatching' && call.stage !== 'combining') return;
    const of = call.stage === 'dispatching' ? 'dispatch' : 'combine';
    this.#useless.set(call, `has the first half of a ${of} in this graph and not the second, receive()`);
    this.drop(captured);
  }

  /** Throws where the graph is of no use, or not any more. */
  #checkGraph(captured: CapturedCall, operation: string): void {
    const { call, active } = captured;
    const { slot } = call;
    const useless = this.#useless.get(call);
    if (useless !== undefined) {
      const why = `${operation}: a captured call of experts ${useless}: capture all of it anew`;
      throw new EpError('EP_INVALID_ARGUMENT', why, { context: { slot } });
    }
    const layout = layoutOf(captured);
    if (layout?.released === true) {
      const why = `${operation}: the layout that a captured call of experts goes by was released: keep another one, and capture the call anew`;
      throw new EpError('EP_INVALID_ARGUMENT', why, { context: { slot } });
    }
    const now = this.#losses.active(undefined, operation);
    const lost = [...active.keys()].filter((rank) => active[rank] !== now[rank]);
    if (lost.length > 0) {
      const why = `${operation}: ${formatRanks(lost)} ${lost.length > 1 ? 'were' : 'was'} lost since calls of experts were captured: capture them anew`;
      throw new EpError('EP_PEER_LOST', why, { context: { ranks: lost } });
    }
    if (layout !== undefined) checkLayout(layout.routing, active, operation);
  }

  /** Throws `EP_BUSY` while calls or other replays are in the way. */
  #checkQueue(operation: string, queue: object): void {
    if (this.#replays > 0 && this.#replayedOn !== queue) {
      const why = `${operation}: a graph with calls of this buffer is being replayed on another stream: await that first`;
      throw new EpError('EP_BUSY', why, { context: { replays: this.#replays } });
    }
    const { held } = this.#slots;
    if (held === 0) return;
    const why = `${operation}: ${held} calls of a buffer for experts in this graph are held: combine or release them first`;
    throw new EpError('EP_BUSY', why, { context: { held } });
  }

  #noteLosses(captured: CapturedCall): void {
    const { routing } = captured.call;
    this.#losses.note(routing.ranks);
    if (layoutOf(captured) === undefined) return;
    for (const [rank, lost] of lostOf(routing.ranks).entries()) if (lost === 1) routing.dropped.add(rank as Rank);
  }
}
