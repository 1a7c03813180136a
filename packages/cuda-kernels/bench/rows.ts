/** Rows whose every word says which rank sent it, where it lay there, and in which round: what an earlier round or another row left behind is found. */
import type { DispatchPlan } from '@ep/plan';

/** Word 0 of row 0; consecutive words of all rows follow by counting. Rounds and ranks begin far apart. */
const baseOf = (home: number, round: number): number =>
  (Math.imul(home + 1, 0x9e3779b1) + Math.imul(round, 0x85ebca77)) >>> 0;

/** All words of this rank's rows, for `round`. */
export function fillRows(data: Uint32Array, home: number, round: number): void {
  const base = baseOf(home, round);
  for (let i = 0; i < data.length; i++) data[i] = base + i;
}

/** Compares every word of every row that `rank` receives, of `words` each. Throws at the first that is not the one of `round`, and if rows are missing. */
export function checkRows(received: Uint32Array, plan: DispatchPlan, rank: number, words: number, round: number): void {
  let rows = 0;
  for (let home = 0; home < plan.worldSize; home++) {
    const base = baseOf(home, round);
    for (let e = plan.entryOffsets[home]!; e < plan.entryOffsets[home + 1]!; e++) {
      if (plan.dstRank[e] !== rank) continue;
      const [from, to] = [plan.srcOffset[e]! * words, plan.dstOffset[e]! * words];
      const count = plan.length[e]! * words;
      for (let i = 0; i < count; i++) {
        const expected = (base + from + i) >>> 0;
        if (received[to + i] !== expected) {
          const row = plan.dstOffset[e]! + Math.floor(i / words);
          throw new Error(
            `rank ${rank} row ${row} word ${i % words}, from rank ${home}: found ${received[to + i]}, expected ${expected} of round ${round}`,
          );
        }
      }
      rows += plan.length[e]!;
    }
  }
  if (rows !== plan.recvTokens[rank]) throw new Error(`rank ${rank} received ${rows} of ${plan.recvTokens[rank]} rows`);
}
