// What the loader does with a file that is named: it is taken, or it is refused by name and nothing behind it is tried.
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { isEpError } from '@ep/core';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { abiVersion } from '../../js/abi.gen.js';
import { type LoadAttempt, loadBinding } from '../../js/load.js';

let folder: string;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'ep-load-'));
});
afterAll(() => rm(folder, { recursive: true }));

async function fileOf(name: string, content: string | Uint8Array): Promise<string> {
  const path = join(folder, name);
  await writeFile(path, content);
  return path;
}

function refusalOf(path: string) {
  try {
    loadBinding({ EP_NATIVE_PATH: path });
  } catch (error) {
    if (isEpError(error)) return error;
    throw error;
  }
  throw new Error(`${path} was loaded`);
}

it.each([
  ['no binary at all', 'this is no addon\n'],
  ['empty', ''],
  ['an ELF header and nothing behind it', Uint8Array.of(0x7f, 0x45, 0x4c, 0x46, 2, 1, 1, 0)],
])('a file that is %s stops the search', async (_what, content) => {
  const path = await fileOf('broken.node', content);
  const error = refusalOf(path);
  expect(error.code).toBe('EP_NATIVE_LOAD');
  // Nothing behind it was tried, though this build's own addon would load.
  const attempts = error.context.attempts as readonly LoadAttempt[];
  expect(attempts.map((attempt) => attempt.path)).toEqual([path]);
  expect(attempts[0]!.error).not.toBe('');
  expect(error.message).toContain(`${path}: ${attempts[0]!.error}`);
  expect(error.message).toContain('remedies:\n1. ');
  expect(error.cause).toBeInstanceOf(Error);
});

it('a path that names no file stops the search, too', () => {
  const path = join(folder, 'missing.node');
  const error = refusalOf(path);
  expect(error.code).toBe('EP_NATIVE_LOAD');
  expect((error.context.attempts as readonly LoadAttempt[]).map((attempt) => attempt.path)).toEqual([path]);
});

it.each(['0.9', `${abiVersion}.1`, Number(abiVersion), undefined])(
  'an addon of ABI %s is refused with both numbers',
  async (abi) => {
    const path = await fileOf(`abi-${abi}.cjs`, `module.exports = { abi: ${JSON.stringify(abi)} };\n`);
    const error = refusalOf(path);
    expect(error.code).toBe('EP_ABI_MISMATCH');
    expect(error.message).toBe(`addon ${path} has ABI ${abi}, this package needs ${abiVersion}`);
    expect(error.context).toEqual({ path, found: abi, expected: abiVersion });
  },
);

it('an addon of this ABI is taken from where it was named', async () => {
  const path = await fileOf(
    'same.cjs',
    `module.exports = { abi: ${JSON.stringify(abiVersion)}, who: 'the one that was named' };\n`,
  );
  expect(loadBinding({ EP_NATIVE_PATH: path })).toMatchObject({ who: 'the one that was named' });
});
