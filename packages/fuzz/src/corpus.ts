import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { FuzzTarget } from './target.js';

/** The fuzzers of a package. */
export interface FuzzSuite {
  readonly targets: readonly FuzzTarget[];
  /** Holds a folder of kept inputs for each target. */
  readonly corpus: string;
}

/** The kept inputs of a target, in an order that does not depend on the file system. */
export function readCorpus({ corpus }: FuzzSuite, { name }: FuzzTarget): readonly Buffer[] {
  const folder = join(corpus, name);
  const inputs = readdirSync(folder)
    .sort()
    .map((file) => readFileSync(join(folder, file)));
  if (inputs.length === 0) throw new Error(`${folder} holds no inputs to begin with`);
  return inputs;
}

/** Keeps an input; the name says what it is for. */
export function keepInput({ corpus }: FuzzSuite, target: FuzzTarget, name: string, input: Buffer): string {
  const folder = join(corpus, target.name);
  mkdirSync(folder, { recursive: true });
  const path = join(folder, `${name}.${target.ending}`);
  writeFileSync(path, input);
  return path;
}
