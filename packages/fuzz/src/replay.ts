import { type FuzzSuite, readCorpus } from './corpus.js';
import { generator } from './mutate.js';
import type { FuzzTarget } from './target.js';

export interface Outcomes {
  used: number;
  refused: number;
}

/** The kept inputs, then `mutations` of them, always the same for one seed. Throws the first finding. */
export function replay(
  suite: FuzzSuite,
  target: FuzzTarget,
  { mutations, seed }: { readonly mutations: number; readonly seed: number },
  onFinding: (input: Buffer, run: number, error: unknown) => void = (_, run, error) => {
    throw new Error(`${target.name}: run ${run} of seed ${seed}`, { cause: error });
  },
): Outcomes {
  const corpus = readCorpus(suite, target);
  const pick = generator(seed);
  const outcomes: Outcomes = { used: 0, refused: 0 };
  for (let run = 0; run < corpus.length + mutations; run++) {
    const kept = corpus[run];
    const input = kept ?? target.mutate(corpus[pick(corpus.length)]!, corpus[pick(corpus.length)]!, pick);
    try {
      outcomes[target.run(input)]++;
    } catch (error) {
      onFinding(input, run, error);
    }
  }
  return outcomes;
}
