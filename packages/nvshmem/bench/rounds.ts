/** Rounds of a barrier from JS, timed one by one, in which every rank shows that it has entered: one that returned at once would be the fastest of all. */

/** A count per rank of the rounds that it has entered, where all can read it. */
export interface RoundMarks {
  readonly worldSize: number;
  /** Before this rank enters. */
  enter(round: number): void;
  /** The last round that `peer` has entered. */
  entered(peer: number): number;
}

/**
 * Nanoseconds of each of `out.length` rounds, of which `first` have been run with these marks before. Throws when a rank had not entered a round that this one left.
 *
 * HAZARD: a series that is warmed up with must run every statement that the one that counts runs. A branch that is first taken there makes V8 throw its code away and
 * compile it again, 5 to 7 ms on a core that the ranks want: the slowest barrier.
 */
export async function timedRounds(
  out: Float64Array,
  first: number,
  marks: RoundMarks,
  barrier: () => Promise<void>,
): Promise<void> {
  for (let i = 0; i < out.length; i++) {
    const round = first + i + 1;
    marks.enter(round);
    const begin = process.hrtime.bigint();
    await barrier();
    out[i] = Number(process.hrtime.bigint() - begin);
    for (let peer = 0; peer < marks.worldSize; peer++) {
      const entered = marks.entered(peer);
      if (entered < round) throw new Error(`left barrier ${round} while rank ${peer} had entered ${entered}`);
    }
  }
}
