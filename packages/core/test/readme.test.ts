import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';

const root = fileURLToPath(new URL('..', import.meta.url));

it('the example of the README prints what the README says', () => {
  const readme = readFileSync(join(root, 'README.md'), 'utf8');
  const block = (language: string) => readme.match(new RegExp(`\`\`\`${language}\n([^]*?)\`\`\``))?.[1] ?? '';
  const directory = mkdtempSync(join(tmpdir(), 'ep-readme-'));
  const program = join(directory, 'example.mts');
  writeFileSync(program, block('ts').replace("'@ep/core'", JSON.stringify(join(root, 'src/index.ts'))));
  const output = execFileSync(process.execPath, ['--import', 'tsx', program], { cwd: root }).toString();
  rmSync(directory, { recursive: true });
  expect(output).toBe(block('text'));
});
