import { existsSync, mkdirSync, mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { mustRun, repository } from './command.js';

/** The newest Node that these packages promise to run on; raise it as Node releases. */
export const newestNode = '26.10.0';

/** Installs it from npm once per checkout and returns the path of its binary. */
export async function installNewestNode(): Promise<string> {
  const name = `node-linux-${process.arch}`;
  const home = join(repository, '.cache', `${name}-${newestNode}`);
  const binary = join(home, 'node_modules', name, 'bin', 'node');
  if (existsSync(binary)) return binary;
  mkdirSync(join(repository, '.cache'), { recursive: true });
  // Renamed when whole: an interrupted download is not taken for an installed one.
  const staging = mkdtempSync(join(repository, '.cache', 'node-'));
  try {
    // HAZARD: with --prefix npm looks for its global settings there, too, and a network's own certificates are among the ones it then misses.
    writeFileSync(join(staging, 'package.json'), '{}');
    await mustRun('npm', ['install', '--no-save', '--no-audit', '--no-fund', `${name}@${newestNode}`], staging);
    renameSync(staging, home);
  } finally {
    rmSync(staging, { recursive: true, force: true });
  }
  return binary;
}
