/** Which ranks have died, and the transport's `failed` signal that says so. */
import { EpError, formatRanks, isEpError, type Rank } from '@ep/core';
import { EP_LIFE_ABSENT, EP_LIFE_DEAD } from '../abi.gen.js';
import type { NativeRankContext } from '../binding.js';

/** What is refused towards a place into which nobody has come. */
export const emptyPlace = (where: string, peer: Rank): EpError =>
  new EpError(
    'EP_NOT_READY',
    `${where}: nobody is in the place of rank ${peer} yet: those that are here let it in by readmit()`,
    {
      context: { ranks: [peer] },
    },
  );

export class Liveness {
  readonly #context: NativeRankContext;
  readonly #rank: Rank;
  readonly worldSize: number;
  #failed = new AbortController();
  #watching = true;
  #coming: readonly Rank[] = [];

  constructor(context: NativeRankContext, rank: Rank, worldSize: number) {
    this.#context = context;
    this.#rank = rank;
    this.worldSize = worldSize;
  }

  /** Fires when a rank was found dead, or by `fail`. */
  get failed(): AbortSignal {
    return this.#failed.signal;
  }

  isDead(rank: Rank): boolean {
    return rank !== this.#rank && !this.#coming.includes(rank) && this.#context.life(rank) === EP_LIFE_DEAD;
  }

  /** Nobody is in its place. */
  isAbsent(rank: Rank): boolean {
    return rank >= 0 && rank !== this.#rank && this.#watching && this.#context.life(rank) === EP_LIFE_ABSENT;
  }

  /** Ranks whose thread or process has died (not those that closed in order). Two loads per rank, no system call. */
  lostRanks(): Rank[] {
    const lost: Rank[] = [];
    for (let rank = 0; rank < this.worldSize; rank++) if (this.isDead(rank)) lost.push(rank);
    if (lost.length > 0 && !this.#failed.signal.aborted) {
      this.#failed.abort(new EpError('EP_PEER_LOST', `${formatRanks(lost)} died`, { context: { lost } }));
    }
    return lost;
  }

  /** Something else than a death ended what the transport promised. */
  fail(error: EpError): void {
    if (this.#watching && !this.#failed.signal.aborted) this.#failed.abort(error);
  }

  /** Returns `error`; one that tells of a lost peer makes `failed` fire. */
  notice<E>(error: E): E {
    if (this.#watching && isEpError(error) && error.code === 'EP_PEER_LOST') this.lostRanks();
    return error;
  }

  /** Until it is called again: these are on their way into empty places, and none of the world yet. */
  expect(coming: readonly Rank[]): void {
    this.#coming = coming;
  }

  /** Who was dead is here again: `failed` is another signal from now on, unless somebody else still is. */
  renew(): void {
    if (this.#failed.signal.aborted) this.#failed = new AbortController();
  }

  /** The context is about to be closed: it can no longer be asked. */
  stop(): void {
    this.#watching = false;
  }
}
