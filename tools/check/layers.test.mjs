// The layer rule catches what it is for: each case is a small tree with one import, checked by the real configuration.
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { cruise } from 'dependency-cruiser';
import { afterEach, beforeEach, expect, test } from 'vitest';

const config = createRequire(import.meta.url)('../../.dependency-cruiser.cjs');

/** @type {string} */
let dir;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'ep-layers-'));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

/**
 * @param {string} path
 * @param {string} text
 */
function write(path, text) {
  mkdirSync(dirname(join(dir, path)), { recursive: true });
  writeFileSync(join(dir, path), text);
}

const packages = {
  core: 'packages/core',
  native: 'native',
  plan: 'packages/plan',
  nvshmem: 'packages/nvshmem',
  ibgda: 'packages/ibgda',
  'efa-gda': 'packages/efa-gda',
  conformance: 'packages/conformance',
  fuzz: 'packages/fuzz',
};

/**
 * Names of the rules that a file with this text breaks.
 * @param {string} file
 * @param {string} text
 */
async function violations(file, text) {
  for (const [name, folder] of Object.entries(packages)) {
    write(
      `${folder}/package.json`,
      JSON.stringify({ name: `@ep/${name}`, type: 'module', exports: './dist/index.js' }),
    );
    write(`${folder}/dist/index.js`, 'export const one = 1;\n');
    mkdirSync(join(dir, 'node_modules/@ep'), { recursive: true });
    symlinkSync(join(dir, folder), join(dir, 'node_modules/@ep', name));
  }
  write('tools/tool.mjs', 'export const one = 1;\n');
  write('e2e/a.mjs', 'export const one = 1;\n');
  write(file, text);
  const { tsConfig: _, ...options } = config.options;
  const rules = { ruleSet: { forbidden: config.forbidden }, validate: true };
  const { output } = await cruise([file], { ...options, ...rules, baseDir: dir }, options.enhancedResolveOptions);
  if (typeof output === 'string') throw new Error(`expected a result object, found ${output}`);
  return output.summary.violations.map((violation) => violation.rule.name);
}

/** @param {string} name */
const importing = (name) => `import { one } from '${name}';\nexport const two = one + 1;\n`;

test.each([
  ['packages/plan/src/a.ts', '@ep/core', ['layer packages/plan', 'plan depends on nothing']],
  ['packages/plan/src/a.ts', 'node:fs', ['plan depends on nothing']],
  ['packages/core/src/a.ts', '@ep/native', ['layer packages/core']],
  ['native/js/a.ts', '@ep/plan', ['layer native']],
  ['packages/core/src/a.ts', '@ep/fuzz', ['layer packages/core']],
  ['packages/core/fuzz/a.ts', '@ep/native', ['layer of tests packages/core']],
  ['packages/nvshmem/src/a.ts', '@ep/ibgda', ['layer packages/nvshmem']],
  ['packages/nvshmem/test/a.ts', '@ep/ibgda', ['layer of tests packages/nvshmem']],
  ['packages/ibgda/test/a.ts', '@ep/nvshmem', ['layer of tests packages/ibgda']],
  ['packages/efa-gda/src/a.ts', '@ep/ibgda', ['layer packages/efa-gda']],
  ['packages/efa-gda/test/a.ts', '@ep/ibgda', ['layer of tests packages/efa-gda']],
  ['packages/cuda-kernels/src/a.ts', '@ep/nvshmem', ['layer packages/cuda-kernels']],
  ['packages/core/src/a.ts', '../../../tools/tool.mjs', ['nothing imports e2e or tools']],
  ['native/js/a.ts', '../../tools/tool.mjs', ['nothing imports e2e or tools']],
  ['native/tests/core/a.mjs', '../../../e2e/a.mjs', ['scripts of C++ tests import no e2e']],
  ['packages/core/src/a.ts', '@ep/absent', ['every import resolves']],
])('%s may not import %s', async (file, name, expected) => {
  expect((await violations(file, importing(name))).sort()).toEqual(expected);
});

test.each([
  ['packages/nvshmem/src/a.ts', '@ep/core'],
  ['packages/nvshmem/src/a.ts', '@ep/native'],
  ['packages/nvshmem/test/a.ts', '@ep/conformance'],
  ['packages/nvshmem/fuzz/a.ts', '@ep/fuzz'],
  ['packages/core/test/a.ts', '@ep/fuzz'],
  ['packages/cuda-kernels/src/a.ts', '@ep/plan'],
  ['packages/cuda-kernels/test/a.ts', '@ep/nvshmem'],
  ['packages/cli/src/a.ts', '@ep/nvshmem'],
  ['native/tests/core/a.mjs', '../../../tools/tool.mjs'],
])('%s may import %s', async (file, name) => {
  expect(await violations(file, importing(name))).toEqual([]);
});

test('a type alone is an import too', async () => {
  const text = "import type { one } from '@ep/native';\nexport type Two = typeof one;\n";
  expect(await violations('packages/core/src/a.ts', text)).toEqual(['layer packages/core']);
});
