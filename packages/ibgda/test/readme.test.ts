/** The example of the README prints what the README says, on two ranks. */
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
  const program = join(directory, 'ring.mjs');
  const built = (name: string) => JSON.stringify(new URL(`../../${name}/dist/index.js`, import.meta.url).href);
  writeFileSync(program, block('js').replace("'@ep/core'", built('core')).replace("'@ep/ibgda'", built('ibgda')));
  const outputs = await Promise.all(
    ['0', '1'].map(async (RANK) => {
      const place = { RANK, WORLD_SIZE: '2', EP_STORE: `file:${join(directory, 'store')}` };
      const { stdout } = await promisify(execFile)(process.execPath, [program], { env: { ...process.env, ...place } });
      return stdout;
    }),
  );
  rmSync(directory, { recursive: true });
  expect(outputs.join('')).toBe(block('text'));
});
