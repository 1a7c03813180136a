import { parseArgs } from 'node:util';
import { keepInput, readCorpus } from './corpus.js';
import { generator, mutate } from './mutate.js';
import { targets } from './targets.js';

/**
 * Goes on where the corpus ends: `tsx fuzz/main.ts [--target NAME] [--runs N] [--seed N]`. A finding is kept in the corpus, printed
 * with its seed, and ends the run with exit code 1.
 */
const { values } = parseArgs({
  options: {
    target: { type: 'string' },
    runs: { type: 'string', default: '1000000' },
    seed: { type: 'string', default: String(Date.now() % 2 ** 31) },
  },
});
const runs = Number(values.runs);
const seed = Number(values.seed);
const chosen = targets.filter((t) => values.target === undefined || t.name === values.target);
if (!Number.isSafeInteger(runs) || runs < 1 || !Number.isSafeInteger(seed) || chosen.length === 0) {
  process.stderr.write(`usage: fuzz [--target ${targets.map((t) => t.name).join('|')}] [--runs N] [--seed N]\n`);
  process.exit(2);
}
for (const target of chosen) {
  const corpus = readCorpus(target.name).map(([, text]) => text);
  const pick = generator(seed);
  const outcomes = { used: 0, refused: 0 };
  for (let i = 0; i < runs; i++) {
    const text = mutate(corpus[pick(corpus.length)]!, corpus[pick(corpus.length)]!, pick);
    try {
      outcomes[target.run(text)]++;
    } catch (error) {
      const kept = keepInput(target.name, `finding-${seed}-${i}`, text);
      process.stderr.write(`${target.name}: run ${i} of seed ${seed}: ${String(error)}\nkept as ${kept}\n`);
      process.exit(1);
    }
  }
  process.stdout.write(
    `${target.name}: ${runs} runs of seed ${seed}, ${outcomes.used} used, ${outcomes.refused} refused, no findings\n`,
  );
}
