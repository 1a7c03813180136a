/** The call slots of a buffer for experts on a GPU: which one is due, and whose call holds which. */
import { EpError, invalid } from '@ep/core';
import type { ResolvedMoe } from '../moe/options.js';
import { type CallStage, HeldCall, type MoeHandle } from '../moe/received.js';
import { type DeviceMoePlace, DeviceMoeSlot } from './moe-slot.js';

export class DeviceMoeSlots {
  readonly all: readonly DeviceMoeSlot[];
  readonly #moe: ResolvedMoe;
  #calls = 0;

  constructor(place: DeviceMoePlace) {
    this.#moe = place.moe;
    this.all = Array.from({ length: place.moe.calls }, (_, i) => new DeviceMoeSlot(i, place));
  }

  /** How many are taken. */
  get held(): number {
    return this.all.filter(({ held }) => held !== undefined).length;
  }

  /** Of the call that takes the slot which is due. */
  get epoch(): number {
    return Math.floor(this.#calls / this.#moe.calls) + 1;
  }

  /** The slot that is due. Throws `EP_BUSY`. */
  due(where: string): DeviceMoeSlot {
    const { calls } = this.#moe;
    const index = this.#calls % calls;
    const slot = this.all[index]!;
    if (slot.held === undefined) return slot;
    throw new EpError(
      'EP_BUSY',
      `${where}: call slot ${index} of ${calls} is still taken: combine or release an earlier call, or open with more calls (at most 4)`,
      { context: { slot: index, calls } },
    );
  }

  /** The call counts from here on. */
  take(slot: DeviceMoeSlot, call: HeldCall): void {
    slot.held = call;
    this.#calls++;
  }

  /** As if the last call had never been. */
  uncount(): void {
    this.#calls--;
  }

  /** The call of a handle, at that stage. Throws `EP_INVALID_ARGUMENT`. */
  callOf(
    handle: MoeHandle,
    where: string,
    stage: CallStage = 'received',
  ): { readonly call: HeldCall; readonly slot: DeviceMoeSlot } {
    const slot = this.all.find(({ held }) => held !== undefined && held === handle);
    if (slot !== undefined && handle instanceof HeldCall) {
      handle.expect(stage, where);
      return { call: handle, slot };
    }
    const expected = 'that of a call of this buffer which was not combined yet';
    throw invalid('handle', { where, expected, found: handle });
  }

  async close(): Promise<void> {
    for (const slot of this.all) await slot.close();
  }
}
