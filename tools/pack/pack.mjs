// Packs workspace packages as a publish would, and states what every tarball must and must not hold.
import { existsSync, mkdirSync } from 'node:fs';
import { basename, join } from 'node:path';
import { ToolError } from '../console.mjs';
import { run } from '../process.mjs';
import { cacheDir, root, toolEnvironment } from '../workspace.mjs';

/**
 * @typedef {import('../workspace.mjs').Manifest & Record<string, unknown>} PackedManifest
 * @typedef {{ name: string, tarball: string, files: readonly string[], manifest: PackedManifest }} Packed
 */

export const packedDir = join(cacheDir, 'packed');

/**
 * @param {import('../workspace.mjs').WorkspacePackage} entry
 * @param {string} [destination]
 * @returns {Promise<Packed>}
 */
export async function pack(entry, destination = packedDir) {
  mkdirSync(destination, { recursive: true });
  const cwd = join(root, entry.dir);
  const env = toolEnvironment();
  const packing = await run('pnpm', ['pack', '--json', '--pack-destination', destination], { cwd, env });
  const reported = /"filename":\s*"([^"]+)"/.exec(packing.output)?.[1];
  if (packing.code !== 0 || reported === undefined) {
    throw new ToolError(`pnpm pack of ${entry.name} ended with status ${packing.code}:\n${packing.output}`);
  }
  const tarball = join(destination, basename(reported));
  if (!existsSync(tarball)) throw new ToolError(`pnpm pack of ${entry.name} named ${tarball}, which is not there`);
  const [list, manifest] = await Promise.all([
    run('tar', ['-tzf', tarball]),
    run('tar', ['-xzOf', tarball, 'package/package.json']),
  ]);
  return {
    name: entry.name,
    tarball,
    files: list.output
      .trim()
      .split('\n')
      .map((file) => file.replace(/^package\//, '')),
    manifest: JSON.parse(manifest.output),
  };
}

const wantedNode = '>=20.19';

/**
 * @param {Packed} packed
 * @returns {string[]} what is wrong, one line each
 */
export function tarballProblems({ name, files, manifest }) {
  /** @type {string[]} */
  const problems = [];
  /**
   * @param {boolean} holds
   * @param {string} problem
   */
  const rule = (holds, problem) => {
    if (!holds) problems.push(`${name}: ${problem}`);
  };
  rule(files.includes('LICENSE'), 'the tarball holds no LICENSE');
  rule(manifest.license === 'Apache-2.0', `license should be Apache-2.0, found ${manifest.license}`);
  rule(
    manifest.publishConfig?.access === 'public',
    'publishConfig.access should be public: scoped packages are private by default',
  );
  rule(manifest.engines?.node === wantedNode, `engines.node should be ${wantedNode}, found ${manifest.engines?.node}`);
  const stray = files.filter((file) =>
    /(?:^|\/)(?:src|test|tests)\/|^bench\/|\.test\.|\.tsbuildinfo$|(?:^|\/)tsconfig|\.config\./.test(file),
  );
  rule(stray.length === 0, `the tarball holds files of the repository: ${stray.join(', ')}`);
  const ranges = { ...manifest.dependencies, ...manifest.optionalDependencies };
  for (const [dependency, range] of Object.entries(ranges)) {
    rule(
      !/^(?:workspace|file|link|catalog):/.test(range),
      `${dependency} is ${range}, which means nothing outside this workspace`,
    );
  }
  // npm installs a package on any system unless it says otherwise; the addon exists for Linux only.
  const native = name === '@ep/native' || '@ep/native' in ranges || name.startsWith('@ep/native-');
  rule(!native || manifest.os?.join() === 'linux', `os should be ["linux"], found ${JSON.stringify(manifest.os)}`);
  // Without them npm installs every platform package everywhere, and the loader takes a file that does not load.
  const [, cpu, libc] = /^@ep\/native-linux-([^-]+)-([^-]+)$/.exec(name) ?? [];
  const libcs = { gnu: 'glibc', musl: 'musl' };
  for (const [field, wanted] of [
    ['cpu', cpu],
    ['libc', libc === undefined ? undefined : (Reflect.get(libcs, libc) ?? libc)],
  ]) {
    const found = JSON.stringify(manifest[field]);
    const expected = wanted === undefined ? undefined : JSON.stringify([wanted]);
    rule(found === expected, `${field} should be ${expected ?? 'absent'}, found ${found}`);
  }
  return problems;
}
