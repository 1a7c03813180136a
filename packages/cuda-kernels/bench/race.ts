/** Takes turns between ways of moving one payload, and compares what they moved. */

/** One way of moving the payload, called in this order: run, check in some rounds, release; close at last. */
export interface Contender {
  run(): Promise<void>;
  /** Throws if anything of the last run's result is not the payload of `round`. */
  check(round: number): void;
  /** Gives back what the last run's result lies in. */
  release(): void;
  close(): Promise<void>;
}

export interface Race {
  readonly repeats: number;
  /** Of all ranks. */
  readonly barrier: () => Promise<void>;
  /** Makes this rank's payload of `round`, in which no byte is where it was in another round. */
  readonly fill: (round: number) => void;
}

const WARM_UP = 2;

/**
 * Milliseconds of each repeat, of running and releasing. The contenders take turns: a machine whose speed drifts, as a shared one does, slows all of them alike, and ratios
 * within a repeat stay true. The payload changes before the last repeat, of which every contender's whole result is compared: what an earlier one left there would not pass.
 * So is it in the last round of the warm-up, or the last repeat would be the first to run that code.
 */
export async function race<K extends string>(
  contenders: Readonly<Record<K, Contender>>,
  { repeats, barrier, fill }: Race,
): Promise<Record<K, number[]>> {
  const entries = Object.entries<Contender>(contenders);
  const times = Object.fromEntries(entries.map(([name]) => [name, [] as number[]])) as Record<K, number[]>;
  fill(0);
  for (let i = -WARM_UP; i < repeats; i++) {
    const compared = i === -1 || i === repeats - 1;
    if (compared) fill(i + WARM_UP);
    for (const [name, contender] of entries) {
      await barrier();
      const begin = performance.now();
      await contender.run();
      const moved = performance.now();
      if (compared) contender.check(i + WARM_UP);
      const checked = performance.now();
      contender.release();
      if (i >= 0) times[name as K].push(moved - begin + performance.now() - checked);
    }
  }
  await barrier();
  for (const [, contender] of entries) await contender.close();
  return times;
}
