/** Who opens a world of which not all ranks are there from the beginning. */
import { checkInteger, invalid, type Rank } from '@ep/core';

/** Ascending; undefined: all ranks. Throws `EP_INVALID_ARGUMENT`. `where`: of which transport's configuration. */
export function resolveActiveRanks(ranks: unknown, worldSize: number, where: string): readonly Rank[] | undefined {
  if (ranks === undefined) return undefined;
  if (!Array.isArray(ranks) || ranks.length === 0 || new Set(ranks).size !== ranks.length) {
    throw invalid('activeRanks', { where, expected: 'a list of at least one rank, each named once', found: ranks });
  }
  const active = ranks.map((rank, i) => checkInteger(rank, `activeRanks[${i}]`, where, 0, worldSize - 1));
  return active.length === worldSize ? undefined : active.sort((a, b) => a - b);
}

/** Throws `EP_INVALID_ARGUMENT` on a rank that opens a world without it. */
export function checkAmong(activeRanks: readonly Rank[] | undefined, rank: Rank, where: string): void {
  if (activeRanks?.includes(rank) !== false) return;
  const expected = `with this rank, ${rank}: one that comes later does so by rejoin()`;
  throw invalid('activeRanks', { where, expected, found: activeRanks });
}

/** By rank, what those that open the world told, in their order; empty for places in which nobody is. */
export function byPlace(
  told: readonly Uint8Array[],
  activeRanks: readonly Rank[] | undefined,
  worldSize: number,
): Uint8Array[] {
  const all: Uint8Array[] = Array.from({ length: worldSize }, () => new Uint8Array(0));
  for (const [at, bytes] of told.entries()) all[activeRanks?.[at] ?? at] = bytes;
  return all;
}
