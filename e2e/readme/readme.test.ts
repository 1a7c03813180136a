/** The examples in READMEs and pages that need the addon or a transport print what is said there. */
import { execFile } from 'node:child_process';
import { mkdir, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { expect, it } from 'vitest';

/** In this package, so that the others resolve. */
const scratch = fileURLToPath(new URL('../.cache/', import.meta.url));

const pages = ['native/README.md', 'packages/cuda-kernels/README.md', 'docs/deepep.md'];

it.each(pages)('%s', { timeout: 120_000 }, async (page) => {
  const readme = await readFile(new URL(`../../${page}`, import.meta.url), 'utf8');
  const printing = /```ts\n((?:(?!```)[\s\S])*)```\n\nprints\n\n```text\n([\s\S]*?)```/g;
  const examples = [...readme.matchAll(printing)];
  expect(examples.length).toBe(readme.match(/^```ts$/gm)?.length);
  await mkdir(scratch, { recursive: true });
  const directory = await mkdtemp(join(scratch, 'readme-'));
  const program = join(directory, 'example.mts');
  try {
    for (const [, source, output] of examples) {
      await writeFile(program, source!);
      const { stdout } = await promisify(execFile)(process.execPath, ['--import', 'tsx', program], { timeout: 50_000 });
      expect(stdout).toBe(output);
    }
  } finally {
    await rm(directory, { recursive: true });
  }
});
