/** Calls of a group in a native loop: what a collective costs without JS. A group of its own, because its calls are counted there. */
import { exchange, type Store } from '@ep/core';
import { type NativeCollectiveGroup, native } from '@ep/native';
import type { Run } from './protocol.js';

/** What the addon's loop does, by its numbers. */
const ALL_REDUCES = 0;
const BARRIERS = 1;
const EXCHANGES = 2;

/** What exchanges go through. */
const EXCHANGE_BYTES = 4096;

/** Equal on all ranks, and of no other group of this run. */
const NONCE = 0x6e61746976656cn;

export class NativeLoop {
  readonly #group: NativeCollectiveGroup;
  #calls = 0;

  private constructor(group: NativeCollectiveGroup) {
    this.#group = group;
  }

  /** All ranks call it. */
  static async open(store: Store, rank: number, size: number, timeoutMs: number): Promise<NativeLoop> {
    const group = new (native().binding.CollectiveGroup)(
      rank,
      size,
      size,
      NONCE,
      size,
      new Int32Array(),
      false,
      1,
      false,
    );
    group.allocate(EXCHANGE_BYTES);
    const handles = await exchange(
      store,
      { key: 'native-loop', rank, worldSize: size, bytes: group.handle() },
      { timeoutMs },
    );
    handles.forEach((handle, peer) => {
      if (peer !== rank) group.attach(peer, handle, 1);
    });
    return new NativeLoop(group);
  }

  /** Nanoseconds of a row of calls on this thread; all ranks at one time. Throws if a sum was wrong. */
  row({ variant, op, calls }: Pick<Run, 'variant' | 'op' | 'calls'>): number {
    const what = variant === 'exchange' ? EXCHANGES : op === 'barrier' ? BARRIERS : ALL_REDUCES;
    const samples = this.#group.measure(what, this.#calls + 1, calls);
    if (what !== EXCHANGES) this.#calls += calls;
    return samples.reduce((sum, nanoseconds) => sum + nanoseconds, 0);
  }

  close(): void {
    this.#group.close();
  }
}
