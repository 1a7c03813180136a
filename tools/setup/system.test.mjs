import { expect, test } from 'vitest';
import { ensureSystem, missingText, requirements } from './system.mjs';

const absent = { probe: async () => null };

test('names what is missing and the one line that installs it', () => {
  const text = missingText([
    { ...absent, what: 'cmake >= 3.25', apt: 'cmake' },
    { ...absent, what: 'ninja', apt: 'ninja-build' },
  ]);
  expect(text).toContain('missing: cmake >= 3.25; ninja\n');
  expect(text).toMatch(/cmake ninja-build\)?\n/);
});

test('asks apt for nothing when no package helps', async () => {
  const found = requirements(null);
  const wanted = { ...found, cxx: { ...absent, what: 'a C++20 compiler: CXX is nothing' } };
  await expect(ensureSystem(wanted, () => {})).rejects.toThrow(
    'missing: a C++20 compiler: CXX is nothing\nthen repeat',
  );
});

test('finds what this machine has, with one version line each', async () => {
  const found = await ensureSystem(requirements(null), () => {});
  expect(found.cmake).toMatch(/^cmake version \d+\.\d+/);
  expect(found.ninja).toMatch(/^\d+\.\d+/);
  expect(found.cxx).not.toContain('\n');
});
