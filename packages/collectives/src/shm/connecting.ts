/** Meeting the members: every rank publishes its segment, and maps the others' as they appear. Nobody waits for who is not needed. */
import type { Rank, Store } from '@ep/core';
import type { NativeCollectiveGroup } from '@ep/native';

const FIRST_PAUSE_MS = 1;
const LONGEST_PAUSE_MS = 50;

export type Connection = 'self' | 'connecting' | 'connected' | 'lost';

const keyOf = (rank: Rank): string => `shm/${rank}`;

export class Connecting {
  readonly #group: NativeCollectiveGroup;
  readonly #store: Store;
  readonly #rank: Rank;
  readonly #awaited: Set<Rank>;
  readonly #details = new Map<Rank, string>();
  #timer: NodeJS.Timeout | undefined;
  #closed = false;
  /** Settles when nothing of this uses the store any more. */
  #round: Promise<void>;

  constructor(group: NativeCollectiveGroup, store: Store, rank: Rank, size: number) {
    this.#group = group;
    this.#store = store;
    this.#rank = rank;
    this.#awaited = new Set(Array.from({ length: size }, (_, peer) => peer).filter((peer) => peer !== rank));
    this.#round = this.#begin();
  }

  stateOf(rank: Rank): { readonly state: Connection; readonly detail?: string } {
    if (rank === this.#rank) return { state: 'self' };
    const detail = this.#details.get(rank);
    const state = this.#awaited.has(rank) ? 'connecting' : detail === undefined ? 'connected' : 'lost';
    return { state, ...(detail !== undefined && { detail }) };
  }

  async close(): Promise<void> {
    this.#closed = true;
    clearTimeout(this.#timer);
    await this.#round;
  }

  async #begin(): Promise<void> {
    try {
      await this.#store.set(keyOf(this.#rank), this.#group.handle());
    } catch (error) {
      this.#noteAll(error);
    }
    await this.#look(FIRST_PAUSE_MS);
  }

  async #look(pauseMs: number): Promise<void> {
    let found = 0;
    for (const peer of [...this.#awaited]) {
      if (this.#closed) return;
      try {
        if (!(await this.#store.check([keyOf(peer)]))) continue;
        const handle = await this.#store.get(keyOf(peer));
        if (this.#closed) return;
        this.#attach(peer, handle);
        found++;
      } catch (error) {
        // The store may come back; what needs the peer has a deadline of its own.
        this.#details.set(peer, String(error));
      }
    }
    if (this.#awaited.size === 0 || this.#closed) return;
    const next = found > 0 ? FIRST_PAUSE_MS : Math.min(LONGEST_PAUSE_MS, 2 * pauseMs);
    // Not a timer that keeps the process: an operation that waits for the peer does.
    this.#timer = setTimeout(() => {
      this.#round = this.#look(next);
    }, pauseMs).unref();
  }

  #attach(peer: Rank, handle: Uint8Array): void {
    this.#awaited.delete(peer);
    try {
      this.#group.attach(peer, handle);
      this.#details.delete(peer);
    } catch (error) {
      // Its process is gone, or is none that shares memory with this one.
      this.#details.set(peer, String(error));
      this.#group.lose(peer);
    }
  }

  #noteAll(error: unknown): void {
    for (const peer of this.#awaited) this.#details.set(peer, String(error));
  }
}
