// pnpm and the packages it installs. pnpm comes through npm into .cache/: nothing global, and the version of the lockfile.
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { ToolError } from '../console.mjs';
import { run } from '../process.mjs';
import { cacheDir, listPackages, pnpmHome, pnpmVersion, root, toolEnvironment } from '../workspace.mjs';
import { processStart } from './lock.mjs';
import { writeIfChanged } from './toolchain.mjs';

export const pnpmPath = () => join(pnpmHome(), 'node_modules', '.bin', 'pnpm');

/**
 * @param {(detail: string) => void} report
 * @returns {Promise<string>} what was done, empty when there was nothing to do
 */
export async function ensurePnpm(report) {
  if (existsSync(pnpmPath())) return '';
  mkdirSync(cacheDir, { recursive: true });
  removeLeftovers();
  // Installed beside and renamed: an interrupted install is never mistaken for a whole one.
  const staging = join(cacheDir, `pnpm-staging-${process.pid}-${processStart(process.pid)}`);
  const args = ['install', '--prefix', staging, '--no-save', '--no-audit', '--no-fund', `pnpm@${pnpmVersion()}`];
  const result = await run('npm', args, { cwd: cacheDir, onLine: report, limitMs: 10 * 60_000 });
  if (result.code !== 0) {
    rmSync(staging, { recursive: true, force: true });
    throw new ToolError(
      `npm could not install pnpm ${pnpmVersion()} (status ${result.code}):\n${result.output.slice(-3000)}`,
    );
  }
  try {
    renameSync(staging, pnpmHome());
  } catch (error) {
    // Another process was first (pnpm.mjs takes no lock); its copy is as good.
    rmSync(staging, { recursive: true, force: true });
    if (!existsSync(pnpmPath())) throw error;
  }
  return 'installed';
}

function removeLeftovers() {
  for (const name of readdirSync(cacheDir)) {
    const [, pid, start] = /^pnpm-staging-(\d+)-(\d+)$/.exec(name) ?? [];
    if (pid && processStart(Number(pid)) !== start) rmSync(join(cacheDir, name), { recursive: true, force: true });
  }
}

const installStamp = join(cacheDir, 'install.sha256');

/** What `pnpm install` depends on; equal hashes mean there is nothing to install. */
function installInputs() {
  const hash = createHash('sha256');
  const manifests = listPackages().map((entry) => `${entry.dir}/package.json`);
  for (const file of ['package.json', 'pnpm-lock.yaml', 'pnpm-workspace.yaml', ...manifests]) {
    hash
      .update(`${file}\0`)
      .update(readFileSync(join(root, file)))
      .update('\0');
  }
  return hash.update(`${process.platform} ${process.arch} ${process.version}`).digest('hex');
}

/**
 * @param {(detail: string) => void} report
 * @returns {Promise<string>} what was done
 */
export async function installPackages(report) {
  const inputs = `${installInputs()}\n`;
  const installed = existsSync(join(root, 'node_modules', '.modules.yaml'));
  if (installed && existsSync(installStamp) && readFileSync(installStamp, 'utf8') === inputs) return 'up to date';
  rmSync(installStamp, { force: true });
  const args = ['install', '--frozen-lockfile', '--reporter=append-only', '--config.confirmModulesPurge=false'];
  const result = await run(pnpmPath(), args, {
    cwd: root,
    env: toolEnvironment(),
    onLine: report,
    limitMs: 15 * 60_000,
  });
  if (result.code !== 0) {
    const hint = result.output.includes('ERR_PNPM_OUTDATED_LOCKFILE')
      ? '\nthe lockfile does not fit a package.json: run `node tools/setup/pnpm.mjs install` and commit pnpm-lock.yaml'
      : '';
    throw new ToolError(`pnpm install ended with status ${result.code}:\n${result.output.slice(-4000)}${hint}`);
  }
  writeIfChanged(installStamp, inputs);
  return 'installed';
}
