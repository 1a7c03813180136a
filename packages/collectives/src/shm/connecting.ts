/** Meeting the members: every rank publishes its segment, and maps the others' as they appear. Nobody waits for who is not needed. */
import type { Rank, Store } from '@ep/core';
import type { NativeCollectiveGroup } from '@ep/native';
import type { LookLimits } from '../engine.js';
import { Look } from '../look.js';

const FIRST_PAUSE_MS = 1;
const LONGEST_PAUSE_MS = 50;
/** How many peers that are not there a rank asks for before it pauses: 128 ranks that ask for all of the others keep each other, and the store, from starting. */
const MISSES_IN_A_LOOK = 8;

export type Connection = 'self' | 'connecting' | 'connected' | 'lost';

/** What a rank publishes: which of the processes that have had the rank it is, as four bytes, then the handle of its segment. */
const keyOf = (rank: Rank): string => `shm/${rank}`;
const COUNT_BYTES = 4;
/** Of the processes that were there from the beginning. */
const FIRST_LIFE = 1;
const GONE_BEFORE = 'it died or closed the group that this one was made from before it opened this one';

/** The number of a process that comes after those that were there from the beginning, which all are 1. */
export async function nextIncarnation(store: Store, rank: Rank): Promise<number> {
  return 1 + (await store.add(`shm/${rank}/lives`, 1));
}

export class Connecting {
  readonly #group: NativeCollectiveGroup;
  readonly #store: Store;
  readonly #rank: Rank;
  readonly #incarnation: number;
  readonly #lost: () => readonly Rank[];
  /** Looked for until they are there; who was asked for in vain goes to the end. */
  readonly #awaited: Set<Rank>;
  /** Of each rank the latest process that was found. */
  readonly #known = new Map<Rank, number>();
  readonly #details = new Map<Rank, string>();
  #timer: NodeJS.Timeout | undefined;
  #closed = false;
  /** Settles when nothing of this uses the store any more. */
  #round: Promise<void>;

  constructor(
    group: NativeCollectiveGroup,
    store: Store,
    {
      rank,
      incarnation,
      awaited,
      lost,
    }: {
      rank: Rank;
      incarnation: number;
      awaited: readonly Rank[];
      /** Of whom it is known otherwise that they do not come any more. */
      lost: () => readonly Rank[];
    },
  ) {
    this.#group = group;
    this.#store = store;
    this.#rank = rank;
    this.#incarnation = incarnation;
    this.#lost = lost;
    this.#awaited = new Set(awaited.filter((peer) => peer !== rank));
    this.#round = this.#begin();
  }

  stateOf(rank: Rank): { readonly state: Connection; readonly detail?: string } {
    if (rank === this.#rank) return { state: 'self' };
    const detail = this.#details.get(rank);
    const connected = this.#known.has(rank) && detail === undefined;
    const state = connected ? 'connected' : this.#awaited.has(rank) ? 'connecting' : 'lost';
    return { state, ...(detail !== undefined && { detail }) };
  }

  /** Whether a process of it was ever found here. */
  hasCome(rank: Rank): boolean {
    return rank === this.#rank || this.#known.has(rank);
  }

  /** Looks once for processes of `ranks` that have come since. A store that fails is noted, as in the background. */
  async refresh(ranks: readonly Rank[], limits?: LookLimits): Promise<void> {
    const look = new Look(limits);
    for (const peer of ranks) {
      if (this.#closed || look.hasEnded) return;
      if (peer !== this.#rank) await look.for(this.#find(peer)).catch(() => {});
    }
  }

  async close(): Promise<void> {
    this.#closed = true;
    clearTimeout(this.#timer);
    await this.#round;
  }

  async #begin(): Promise<void> {
    const handle = this.#group.handle();
    const published = new Uint8Array(COUNT_BYTES + handle.length);
    new DataView(published.buffer).setUint32(0, this.#incarnation, true);
    published.set(handle, COUNT_BYTES);
    try {
      await this.#store.set(keyOf(this.#rank), published);
    } catch (error) {
      this.#noteAll(error);
    }
    await this.#look(FIRST_PAUSE_MS);
  }

  async #look(pauseMs: number): Promise<void> {
    const before = this.#awaited.size;
    let misses = 0;
    // HAZARD: asked before the store: what one has published that is gone since is found there, and it is lost with what it did.
    const lost = this.#lost();
    for (const peer of [...this.#awaited]) {
      if (this.#closed) return;
      const isLost = lost.includes(peer);
      await this.#find(peer);
      if (this.#closed || !this.#awaited.delete(peer)) continue;
      if (isLost) {
        this.#details.set(peer, GONE_BEFORE);
        this.#group.lose(peer, FIRST_LIFE);
        continue;
      }
      this.#awaited.add(peer);
      if (++misses === MISSES_IN_A_LOOK) break;
    }
    if (this.#awaited.size === 0 || this.#closed) return;
    const next = this.#awaited.size < before ? FIRST_PAUSE_MS : Math.min(LONGEST_PAUSE_MS, 2 * pauseMs);
    // Not a timer that keeps the process: an operation that waits for the peer does.
    this.#timer = setTimeout(() => {
      this.#round = this.#look(next);
    }, pauseMs).unref();
  }

  async #find(peer: Rank): Promise<void> {
    try {
      if (!(await this.#store.check([keyOf(peer)]))) return;
      const published = await this.#store.get(keyOf(peer));
      if (this.#closed) return;
      const incarnation = new DataView(published.buffer, published.byteOffset).getUint32(0, true);
      if (incarnation > (this.#known.get(peer) ?? 0)) this.#attach(peer, incarnation, published.slice(COUNT_BYTES));
    } catch (error) {
      // The store may come back; what needs the peer has a deadline of its own.
      this.#details.set(peer, String(error));
    }
  }

  #attach(peer: Rank, incarnation: number, handle: Uint8Array): void {
    this.#awaited.delete(peer);
    this.#known.set(peer, incarnation);
    try {
      this.#group.attach(peer, handle, incarnation);
      this.#details.delete(peer);
    } catch (error) {
      // Its process is gone, or is none that shares memory with this one.
      this.#details.set(peer, String(error));
      this.#group.lose(peer, incarnation);
    }
  }

  #noteAll(error: unknown): void {
    for (const peer of this.#awaited) this.#details.set(peer, String(error));
  }
}
