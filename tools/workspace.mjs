// Where things are in this repository, and what the tools' child processes see. Plain Node: setup imports this
// before anything is installed.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { delimiter, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

/**
 * @typedef {{ name: string, version?: string, private?: boolean, scripts?: Record<string, string>,
 *   engines?: { node?: string }, dependencies?: Record<string, string>, devDependencies?: Record<string, string>,
 *   optionalDependencies?: Record<string, string>, os?: string[], cpu?: string[], license?: string,
 *   exports?: unknown, publishConfig?: { access?: string, directory?: string } }} Manifest
 * @typedef {{ dir: string, name: string, manifest: Manifest }} WorkspacePackage dir is relative to the root
 */

export const root = dirname(dirname(fileURLToPath(import.meta.url)));
/** Everything the tools make lies here; deleting the folder is always safe. */
export const cacheDir = join(root, '.cache');
export const resultsDir = join(cacheDir, 'test-results');

/**
 * @param {string} path
 * @returns {any}
 */
export const readJson = (path) => JSON.parse(readFileSync(path, 'utf8'));

/** The one place that names pnpm's version is devEngines in the root package.json. */
export const pnpmVersion = () =>
  /** @type {string} */ (readJson(join(root, 'package.json')).devEngines.packageManager.version);

export const pnpmHome = () => join(cacheDir, `pnpm-${pnpmVersion()}`);

/**
 * The environment of every child: the pinned pnpm and the workspace's own binaries first, no telemetry.
 * HAZARD: turbo starts `pnpm run` for each task; without the pinned pnpm on PATH it fails on a machine that has none.
 * @param {Record<string, string>} [extra]
 * @returns {NodeJS.ProcessEnv}
 */
export function toolEnvironment(extra = {}) {
  const path = [join(pnpmHome(), 'node_modules', '.bin'), join(root, 'node_modules', '.bin'), process.env.PATH ?? ''];
  return {
    ...process.env,
    PATH: path.join(delimiter),
    TURBO_TELEMETRY_DISABLED: '1',
    DO_NOT_TRACK: '1',
    NO_UPDATE_NOTIFIER: '1',
    ...extra,
  };
}

/**
 * The `packages:` globs of pnpm-workspace.yaml: plain folders and `folder/*`, which is all this repository uses.
 * @param {string} text
 * @returns {string[]}
 */
export function workspaceGlobs(text) {
  const globs = [];
  let inside = false;
  for (const line of text.split('\n')) {
    if (/^packages:\s*$/.test(line)) inside = true;
    else if (/^\S/.test(line) && !line.startsWith('#')) inside = false;
    const item = inside ? /^\s+-\s+['"]?([^'"#\s]+)['"]?/.exec(line) : null;
    if (item?.[1]) globs.push(item[1]);
  }
  return globs;
}

/**
 * Every workspace package, sorted by folder.
 * @param {string} [from]
 * @returns {WorkspacePackage[]}
 */
export function listPackages(from = root) {
  const dirs = workspaceGlobs(readFileSync(join(from, 'pnpm-workspace.yaml'), 'utf8')).flatMap((glob) => {
    if (!glob.endsWith('/*')) return [glob];
    const parent = glob.slice(0, -2);
    if (!existsSync(join(from, parent))) return [];
    return readdirSync(join(from, parent)).map((name) => `${parent}/${name}`);
  });
  return [...new Set(dirs)]
    .filter((dir) => existsSync(join(from, dir, 'package.json')))
    .sort()
    .map((dir) => {
      const manifest = readJson(join(from, dir, 'package.json'));
      return { dir, name: manifest.name, manifest };
    });
}

export const publicPackages = () => listPackages().filter((entry) => entry.manifest.private !== true);
