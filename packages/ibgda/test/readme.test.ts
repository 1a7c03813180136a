/** The examples of the README print what the README says. */
import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, expect, it } from 'vitest';

const readme = readFileSync(new URL('../README.md', import.meta.url), 'utf8');
const blocks = (language: string): readonly string[] =>
  [...readme.matchAll(new RegExp(`\`\`\`${language}\n([^]*?)\`\`\``, 'g'))].map(([, text]) => text!);
const built = (name: string): string => JSON.stringify(new URL(`../../${name}/dist/index.js`, import.meta.url).href);

let directory: string;
const programOf = (example: number): string => join(directory, `${example}.mjs`);
beforeAll(() => {
  directory = mkdtempSync(join(tmpdir(), 'ep-readme-'));
  blocks('js').forEach((text, example) => {
    const program = text.replace("'@ep/core'", built('core')).replace("'@ep/ibgda'", built('ibgda'));
    writeFileSync(programOf(example), program);
  });
});
afterAll(() => rmSync(directory, { recursive: true }));

/** Runs the example of that number, and returns what it printed. */
async function run(example: number, env: Readonly<Record<string, string>>): Promise<string> {
  const how = { env: { ...process.env, ...env }, timeout: 60_000 };
  const { stdout } = await promisify(execFile)(process.execPath, [programOf(example)], how);
  return stdout;
}

it('on two ranks with a store', async () => {
  const outputs = await Promise.all(
    ['0', '1'].map((RANK) => run(0, { RANK, WORLD_SIZE: '2', EP_STORE: `file:${join(directory, 'store')}` })),
  );
  expect(outputs.join('')).toBe(blocks('text')[0]);
});

it('on two ranks without one', async () => {
  expect(await run(1, {})).toBe(blocks('text')[1]);
});
