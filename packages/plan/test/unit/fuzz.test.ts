import { describe, expect, it } from 'vitest';
import { readCorpus } from '../../fuzz/corpus.js';
import { generator, mutate } from '../../fuzz/mutate.js';
import { targets } from '../../fuzz/targets.js';

describe.each(targets.map((target) => [target.name, target] as const))('fuzz target %s', (_, target) => {
  const corpus = readCorpus(target.name);

  it('replays its corpus: every input is used or refused with a PlanError', () => {
    const outcomes = corpus.map(([, text]) => target.run(text));
    expect(new Set(outcomes)).toEqual(new Set(['used', 'refused']));
  });

  it('and 2000 mutations of it, always the same ones', () => {
    const pick = generator(20261120);
    const outcomes = { used: 0, refused: 0 };
    for (let i = 0; i < 2000; i++)
      outcomes[target.run(mutate(corpus[pick(corpus.length)]![1], corpus[pick(corpus.length)]![1], pick))]++;
    expect(outcomes.used + outcomes.refused).toBe(2000);
    expect(outcomes.refused).toBeGreaterThan(1000);
  });
});
