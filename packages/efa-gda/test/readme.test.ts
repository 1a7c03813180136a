/** The example of the README prints what the README says. */
import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, it } from 'vitest';

it('runs the example', async () => {
  const readme = readFileSync(new URL('../README.md', import.meta.url), 'utf8');
  const block = (language: string) => new RegExp(`\`\`\`${language}\n([^]*?)\`\`\``).exec(readme)?.[1] ?? '';
  const directory = mkdtempSync(join(tmpdir(), 'ep-readme-'));
  const program = join(directory, 'example.mjs');
  const built = JSON.stringify(new URL('../dist/index.js', import.meta.url).href);
  writeFileSync(program, block('js').replace("'@ep/efa-gda'", built));
  const { stdout } = await promisify(execFile)(process.execPath, [program], {
    env: { ...process.env, NO_COLOR: '1' },
  });
  rmSync(directory, { recursive: true });
  expect(stdout).toBe(block('text'));
});
