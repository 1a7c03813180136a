/** The examples of the README print what the README says. */
import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, it } from 'vitest';

const readme = readFileSync(new URL('../README.md', import.meta.url), 'utf8');
const block = (language: string) => new RegExp(`\`\`\`${language}\n([^]*?)\`\`\``).exec(readme)?.[1] ?? '';
const built = (name: string) => JSON.stringify(new URL(`../../${name}/dist/index.js`, import.meta.url).href);

async function outputs(source: string, environments: readonly NodeJS.ProcessEnv[]): Promise<readonly string[]> {
  const directory = mkdtempSync(join(tmpdir(), 'ep-readme-'));
  try {
    const program = join(directory, 'example.mjs');
    writeFileSync(program, source.replace("'@ep/core'", built('core')).replace("'@ep/efa-gda'", built('efa-gda')));
    return await Promise.all(
      environments.map(async (added) => {
        const env = { ...process.env, NO_COLOR: '1', EP_STORE: `file:${join(directory, 'store')}`, ...added };
        return (await promisify(execFile)(process.execPath, [program], { env })).stdout;
      }),
    );
  } finally {
    rmSync(directory, { recursive: true });
  }
}

it('runs the example of the transport, on two ranks', async () => {
  const places = ['0', '1'].map((RANK) => ({ RANK, WORLD_SIZE: '2' }));
  expect((await outputs(block('js'), places)).join('')).toBe(block('text'));
});

it('runs the example of the wire', async () => {
  expect(await outputs(block('js wire'), [{}])).toEqual([block('text wire')]);
});
