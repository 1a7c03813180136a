/** Cutting off ranks that have died or closed: nothing that they had under way is to land here any more. */
import { setTimeout } from 'node:timers/promises';
import { checkInteger, type Rank } from '@ep/core';
import { EP_LIFE_ALIVE } from '../abi.gen.js';
import type { NativeRankContext } from '../binding.js';

const LOOK_MS = 5;
/** A process that was killed is given so long to end: the system takes back its memory first. */
const LONGEST_MS = 4000;

export interface Fencing {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  /** Of a rank that does not live: whether nothing of it can land here any more. May do something for it; asked again where it is not so yet. */
  readonly isOver: (rank: Rank) => boolean;
  /** Ends it: `closing` of the transport. */
  readonly signal: AbortSignal;
}

/** As `Transport.fence`. Those for which it takes too long are not among what it resolves with, and may be asked for again. */
export async function fenceRanks(ranks: readonly Rank[], fencing: Fencing): Promise<readonly Rank[]> {
  const { rank: self, worldSize, context, isOver, signal } = fencing;
  for (const rank of ranks) checkInteger(rank, 'ranks', 'fence', 0, worldSize - 1);
  let left = ranks.filter((rank) => rank !== self && context.life(rank) !== EP_LIFE_ALIVE);
  const over = new Set<Rank>();
  const until = performance.now() + LONGEST_MS;
  for (;;) {
    for (const rank of left) if (isOver(rank)) over.add(rank);
    left = left.filter((rank) => !over.has(rank));
    if (left.length === 0 || performance.now() > until) return ranks.filter((rank) => over.has(rank));
    await setTimeout(LOOK_MS); // without the signal: its end would be Node's error, not that of the transport
    signal.throwIfAborted();
  }
}
