// The pages for those who change the code name files, functions and words: what they name is there.
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { root } from '../workspace.mjs';

const listed = execFileSync('git', ['ls-files', '-z', '--cached', '--others', '--exclude-standard'], { cwd: root });
const files = [...new Set(listed.toString().split('\0'))].filter((file) => file !== '' && existsSync(join(root, file)));
const isSource = /^(?:packages|native|e2e)\/.*\.(?:[cm]?ts|mjs|[ch](?:pp)?|cu|inc|json)$/;
const source = files
  .filter((file) => isSource.test(file))
  .map((file) => readFileSync(join(root, file), 'utf8'))
  .join('\n');
const words = new Set(source.match(/[A-Za-z_]\w*/g));

/** Names that are somebody else's. */
const foreign = new Set(['napi.h', 'cuda.h', 'cuda_runtime.h', 'ldar', 'fabric']);

/** @param {string} page */
const codeOf = (page) =>
  Array.from(
    readFileSync(join(root, page), 'utf8')
      .replace(/^```[\s\S]*?^```$/gm, '')
      .matchAll(/`([^`\n]+)`/g),
    ([, code = '']) => code,
  );

/** @param {string} path may have a star in it, or lack its first folders */
function isThere(path) {
  const pattern = path.replace(/\/$/, '').replace(/[.+]/g, '\\$&').replace(/\*/g, '[^/]*');
  return files.some((file) => new RegExp(`(?:^|/)${pattern}(?:/|$)`).test(file));
}

/** Everything in the code span that looks like a path, or like a name of ours. */
function missingOf(/** @type {string} */ code) {
  if (/^@ep\/|^p?npm |^\/proc\/|[·=]/.test(code)) return [];
  return code.split(/[\s,]+/).filter((word) => {
    if (foreign.has(word)) return false;
    if (/\/|\.(?:[cm]?[jt]s|md|h|hpp|cpp)$/.test(word)) return !isThere(word);
    const names = word.match(/[A-Za-z_]\w*/g) ?? [];
    return names.some((name) => !words.has(name));
  });
}

test.each(['ARCHITECTURE.md', 'docs/memory-model.md'])('%s names what is there', (page) => {
  const code = codeOf(page);
  expect(code.length).toBeGreaterThan(20);
  expect(code.filter((span) => missingOf(span).length > 0)).toEqual([]);
});

test.each(['core/gone.hpp', 'Dispatcher.#goneAway', 'gone_away::drain', 'packages/gone/src', 'gone.ts'])(
  '%s is noticed to be gone',
  (word) => expect(missingOf(word)).toEqual([word]),
);

test('the layers of ARCHITECTURE.md are those of the layer rule', () => {
  const { forbidden } = createRequire(import.meta.url)('../../.dependency-cruiser.cjs');
  const diagram =
    readFileSync(join(root, 'ARCHITECTURE.md'), 'utf8').match(/^## Layers\n\n```\n([\s\S]*?)^```/m)?.[1] ?? '';
  const drawn = Array.from(diagram.matchAll(/@ep\/(\S+).*imports (.+)$/gm), ([, name, imports]) => [name, imports]);
  /** @type {Record<string, string>} */
  const said = Object.fromEntries(drawn);
  for (const [name, imports] of Object.entries(said)) {
    const folder = name === 'native' ? 'native' : `packages/${name}`;
    const rule = forbidden.find((/** @type {{ name: string }} */ one) => one.name === `layer ${folder}`);
    const allowed = rule.comment
      .split(': ')[1]
      .replace(/packages\/|,/g, '')
      .split(' ')
      .sort();
    const drawnOnes =
      imports === 'everything below'
        ? ['[^/]+', 'native']
        : imports.startsWith('nothing')
          ? ['nothing']
          : imports.split(', ').sort();
    expect([name, allowed]).toEqual([name, drawnOnes.sort()]);
  }
  const packages = files.filter((file) => /^(?:packages\/[^/]+|native)\/package\.json$/.test(file));
  const names = packages
    .map((file) => JSON.parse(readFileSync(join(root, file), 'utf8')))
    .filter((manifest) => !manifest.private);
  expect(
    Object.keys(said)
      .map((name) => `@ep/${name}`)
      .sort(),
  ).toEqual(names.map(({ name }) => name).sort());
});
