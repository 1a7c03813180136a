/** The example of the README prints what the README says, on four ranks. */
import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, onTestFinished, test } from 'vitest';

test('runs the example', async () => {
  const readme = readFileSync(new URL('../README.md', import.meta.url), 'utf8');
  const block = (language: string): string => new RegExp(`\`\`\`${language}\n([^]*?)\`\`\``).exec(readme)?.[1] ?? '';
  const folder = mkdtempSync(join(tmpdir(), 'ep-readme-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const program = join(folder, 'sum.mjs');
  const built = JSON.stringify(new URL('../dist/index.js', import.meta.url).href);
  writeFileSync(program, block('js').replace("'@ep/collectives'", built));
  const worldSize = 4;
  const outputs = await Promise.all(
    Array.from({ length: worldSize }, async (_, rank) => {
      const place = { RANK: `${rank}`, WORLD_SIZE: `${worldSize}`, EP_STORE: `file:${join(folder, 'store')}` };
      const { stdout } = await promisify(execFile)(process.execPath, [program], { env: { ...process.env, ...place } });
      return `[rank ${rank}] ${stdout}`;
    }),
  );
  expect(`$ ep run -n 4 -- node sum.mjs\n${outputs.join('')}`).toBe(block('text'));
}, 60_000);
