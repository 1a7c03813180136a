// node e2e/gpu/bundle-suite.mjs: bundles the cases of process groups (packages/collectives/test/conformance), so that suite.mjs runs them where there is no compiler: on a machine with a GPU, to
// which e2e/.cache has to be taken.
import { fileURLToPath } from 'node:url';
import { build } from 'tsup';

const path = (/** @type {string} */ name) => fileURLToPath(new URL(`../../${name}`, import.meta.url));

/** Below e2e, so that imports of other packages are found from there. */
export async function bundleSuite() {
  await build({
    config: false,
    entry: { cases: path('packages/collectives/test/programs/conformance.ts') },
    outDir: path('e2e/.cache/group-suite'),
    format: 'esm',
    target: 'node20',
    outExtension: () => ({ js: '.mjs' }),
    external: [/^@ep\//],
    splitting: false,
    silent: true,
  });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await bundleSuite();
