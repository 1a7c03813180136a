import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

const root = join(import.meta.dirname, 'corpus');

/** The kept inputs of a target, by file name. */
export function readCorpus(target: string): readonly (readonly [string, string])[] {
  const folder = join(root, target);
  return readdirSync(folder)
    .sort()
    .map((name) => [name, readFileSync(join(folder, name), 'utf8')] as const);
}

/** Keeps an input; the name says what it is for. */
export function keepInput(target: string, name: string, text: string): string {
  const folder = join(root, target);
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, `${name}.txt`), text);
  return `fuzz/corpus/${target}/${name}.txt`;
}
