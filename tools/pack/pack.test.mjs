import { expect, test } from 'vitest';
import { tarballProblems } from './pack.mjs';

const good = {
  name: '@ep/sample',
  tarball: 'sample.tgz',
  files: ['package.json', 'LICENSE', 'dist/index.js'],
  manifest: {
    name: '@ep/sample',
    license: 'Apache-2.0',
    engines: { node: '>=20.19' },
    os: ['linux'],
    dependencies: { '@ep/native': '1.0.0' },
    publishConfig: { access: 'public' },
  },
};

test('a whole package has no problems', () => {
  expect(tarballProblems(good)).toEqual([]);
});

test.each([
  ['no licence text', { files: ['package.json'] }, 'no LICENSE'],
  ['sources', { files: [...good.files, 'src/index.ts'] }, 'files of the repository: src/index.ts'],
  ['tests', { files: [...good.files, 'dist/a.test.js'] }, 'files of the repository: dist/a.test.js'],
  [
    'a workspace range',
    { manifest: { ...good.manifest, dependencies: { '@ep/core': 'workspace:*' } } },
    'means nothing outside',
  ],
  ['no os', { manifest: { ...good.manifest, os: [] } }, 'os should be'],
  ['private by default', { manifest: { ...good.manifest, publishConfig: {} } }, 'access should be public'],
  ['another Node', { manifest: { ...good.manifest, engines: { node: '>=18' } } }, 'engines.node'],
  ['another licence', { manifest: { ...good.manifest, license: 'MIT' } }, 'license should be'],
])('%s is refused', (_, change, expected) => {
  const problems = tarballProblems({ ...good, ...change });
  expect(problems).toHaveLength(1);
  expect(problems[0]).toContain(expected);
});

/** A prebuilt addon, as native/platforms has it. */
const platform = {
  ...good,
  name: '@ep/native-linux-x64-gnu',
  files: ['package.json', 'LICENSE', 'ep.node'],
  manifest: { ...good.manifest, name: '@ep/native-linux-x64-gnu', dependencies: {}, cpu: ['x64'], libc: ['glibc'] },
};

test('a whole platform package has no problems', () => {
  expect(tarballProblems(platform)).toEqual([]);
});

test.each([
  ['another cpu', platform, { cpu: ['arm64'] }, 'cpu should be ["x64"], found ["arm64"]'],
  ['every cpu', platform, { cpu: undefined }, 'cpu should be ["x64"], found undefined'],
  ['another libc', platform, { libc: ['musl'] }, 'libc should be ["glibc"], found ["musl"]'],
  ['every libc', platform, { libc: undefined }, 'libc should be ["glibc"], found undefined'],
  ['one cpu for what has no binary', good, { cpu: ['x64'] }, 'cpu should be absent, found ["x64"]'],
])('%s is refused', (_, whole, change, expected) => {
  const manifest = /** @type {import('./pack.mjs').PackedManifest} */ (Object.assign({}, whole.manifest, change));
  const problems = tarballProblems({ ...whole, manifest });
  expect(problems).toEqual([`${whole.name}: ${expected}`]);
});
