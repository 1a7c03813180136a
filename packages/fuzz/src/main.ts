import { parseArgs } from 'node:util';
import { type FuzzSuite, keepInput } from './corpus.js';
import { replay } from './replay.js';

/**
 * Goes on where the corpus ends: `[--target NAME] [--runs N] [--seed N]`. A finding is kept in the corpus, printed with its seed, and ends the
 * process with status 1.
 */
export function runFuzzers(suite: FuzzSuite, args: readonly string[] = process.argv.slice(2)): void {
  const { values } = parseArgs({
    // pnpm hands a `--` through.
    args: args.filter((arg) => arg !== '--'),
    options: {
      target: { type: 'string' },
      runs: { type: 'string', default: '1000000' },
      seed: { type: 'string', default: String(Date.now() % 2 ** 31) },
    },
  });
  const runs = Number(values.runs);
  const seed = Number(values.seed);
  const chosen = suite.targets.filter((target) => values.target === undefined || target.name === values.target);
  if (!Number.isSafeInteger(runs) || runs < 1 || !Number.isSafeInteger(seed) || chosen.length === 0) {
    const names = suite.targets.map((target) => target.name).join('|');
    process.stderr.write(`usage: fuzz [--target ${names}] [--runs N] [--seed N]\n`);
    process.exit(2);
  }
  for (const target of chosen) {
    const { used, refused } = replay(suite, target, { mutations: runs, seed }, (input, run, error) => {
      const kept = keepInput(suite, target, `finding-${seed}-${run}`, input);
      const text = error instanceof Error ? (error.stack ?? error.message) : String(error);
      process.stderr.write(`${target.name}: run ${run} of seed ${seed}: ${text}\nkept as ${kept}\n`);
      process.exit(1);
    });
    process.stdout.write(
      `${target.name}: ${runs} runs of seed ${seed}, ${used} used, ${refused} refused, no findings\n`,
    );
  }
}
