/** Who takes part in the calls of a buffer, and who does not any more. */
import { formatRanks, invalid, type Rank } from '@ep/core';
import { codeOfStatus, EP_MOE_RANK_LEAVES, EP_MOE_RANK_MASKED } from '@ep/native';
import type { RankMask } from '@ep/plan/moe';
import type { Culprit } from './culprits.js';
import type { RoutingArrays } from './routing.js';

/** Why a rank takes no part, in the words of error codes; `EP_EVICTED` if it was left out by `leaveOut`, `EP_NOT_READY` if nobody is in its place yet. */
export type MoeLoss = 'EP_TIMEOUT' | 'EP_PEER_LOST' | 'EP_EVICTED' | 'EP_NOT_READY';

/** In a call's report: known before the call. */
const MASKED = EP_MOE_RANK_MASKED;
/** The same: found dead after the half had ended, which has all that came from it. */
const LEAVES = BigInt(EP_MOE_RANK_LEAVES);

export class Losses {
  readonly #rank: Rank;
  readonly #worldSize: number;
  readonly #isEmpty: (rank: Rank) => boolean;
  readonly #why = new Map<Rank, MoeLoss>();

  /** `isEmpty`: nobody is in that rank's place. */
  constructor(rank: Rank, worldSize: number, isEmpty: (rank: Rank) => boolean = () => false) {
    this.#rank = rank;
    this.#isEmpty = isEmpty;
    this.#worldSize = worldSize;
  }

  get all(): ReadonlyMap<Rank, MoeLoss> {
    return new Map(this.#why);
  }

  has(rank: Rank): boolean {
    return this.#why.has(rank);
  }

  /** Throws `EP_INVALID_ARGUMENT`, before any of them is left out. */
  leaveOut(ranks: Iterable<Rank>): void {
    const named = [...ranks];
    for (const rank of named) {
      if (Number.isSafeInteger(rank) && rank >= 0 && rank < this.#worldSize && rank !== this.#rank) continue;
      throw invalid('ranks', { where: 'leaveOut', expected: `other ranks of ${this.#worldSize}`, found: rank });
    }
    for (const rank of named) if (!this.#why.has(rank)) this.#why.set(rank, 'EP_EVICTED');
  }

  /** All ranks have agreed on who is here: those take part again, and nobody else. */
  agreed(present: readonly Rank[]): void {
    for (let rank = 0; rank < this.#worldSize; rank++) {
      if (present.includes(rank)) this.#why.delete(rank);
      else if (rank !== this.#rank && !this.#why.has(rank)) {
        this.#why.set(rank, this.#isEmpty(rank) ? 'EP_NOT_READY' : 'EP_EVICTED');
      }
    }
  }

  /** Who takes part in a call that leaves out those of `mask`. Throws `EP_INVALID_ARGUMENT` for a mask of another length, or one without this rank. */
  active(mask: RankMask | undefined, where: string): Uint8Array {
    if (mask !== undefined && mask?.length !== this.#worldSize) {
      const expected = `${this.#worldSize} elements, one for each rank`;
      throw invalid('activeRanks', { where, expected, found: mask?.length });
    }
    if (mask !== undefined && !mask[this.#rank]) {
      throw invalid('activeRanks', { where, expected: `with this rank, ${this.#rank}, in it`, found: mask });
    }
    return Uint8Array.from({ length: this.#worldSize }, (_, rank) =>
      !this.#why.has(rank) && (mask === undefined || mask[rank]) ? 1 : 0,
    );
  }

  /** For the second half of a call that began with ranks which were found missing since: they need not be awaited once more. */
  mask(ranks: BigUint64Array): void {
    for (const rank of this.#why.keys()) if (ranks[rank] === 0n) ranks[rank] = MASKED;
  }

  /** Remembers whom a call that failed has named. */
  noteCulprit({ rank, code }: Culprit): void {
    if (rank !== this.#rank && rank < this.#worldSize && !this.#why.has(rank)) this.#why.set(rank, code);
  }

  /** Remembers who was found missing in a call. */
  note(ranks: BigUint64Array): void {
    for (let rank = 0; rank < this.#worldSize; rank++) {
      const why = ranks[rank]!;
      if (why === 0n || why === MASKED || this.#why.has(rank)) continue;
      const late = why !== LEAVES && codeOfStatus(Number(why)) === 'EP_TIMEOUT';
      this.#why.set(rank, late ? 'EP_TIMEOUT' : 'EP_PEER_LOST');
    }
  }
}

/** HAZARD: rows of a rank whose runs a layout has dropped would lie where it says that nothing is. Throws `EP_INVALID_ARGUMENT` if one of those takes part. */
export function checkLayout({ dropped }: RoutingArrays, active: Uint8Array, where: string): void {
  const back = [...dropped].filter((rank) => active[rank] === 1);
  if (back.length === 0) return;
  throw invalid('choices', {
    where,
    expected: `a layout with the rows of ${formatRanks(back)}, which a call with this one has left out: dispatch the choices themselves`,
    found: 'a layout without them',
  });
}

/** Writes into a call's report who takes part. */
export function reportActive(ranks: BigUint64Array, active: Uint8Array): void {
  for (let rank = 0; rank < ranks.length; rank++) ranks[rank] = active[rank] === 1 ? 0n : MASKED;
}

/** A mask of who took no part, whatever the reason. */
export const lostOf = (ranks: BigUint64Array): Uint8Array =>
  Uint8Array.from(ranks, (why) => (why === 0n || why === LEAVES ? 0 : 1));

/** `rank 3 (EP_TIMEOUT), rank 5 (EP_PEER_LOST)`, for people. */
export function lossesText(losses: ReadonlyMap<Rank, MoeLoss>): string {
  if (!(losses instanceof Map)) {
    throw invalid('losses', { where: 'lossesText', expected: 'a map from ranks to reasons', found: losses });
  }
  return [...losses].map(([rank, why]) => `${formatRanks([rank])} (${why})`).join(', ') || 'nobody';
}
