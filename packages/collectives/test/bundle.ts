/** Node runs no TypeScript in forks and worker threads: what ranks load is bundled first, with the package's sources in it. */
import { join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { build } from 'tsup';

const here = fileURLToPath(new URL('.', import.meta.url));
/** Below the package, so that imports of other packages are found from there. */
const outDir = fileURLToPath(new URL('../.cache/programs', import.meta.url));

/** Bundles test/programs/NAME.ts; returns its URL. */
export async function bundleProgram(name: string): Promise<string> {
  await build({
    config: false,
    entry: { [name]: join(here, 'programs', `${name}.ts`) },
    outDir,
    format: 'esm',
    target: 'node20',
    outExtension: () => ({ js: '.mjs' }),
    external: [/^@ep\//],
    splitting: false,
    silent: true,
  });
  return pathToFileURL(join(outDir, `${name}.mjs`)).href;
}
