// Runs the workspace's own pnpm: node tools/setup/pnpm.mjs <pnpm arguments>. Gets it first when it is not there yet.
import { spawn } from 'node:child_process';
import { constants } from 'node:os';
import { runMain } from '../console.mjs';
import { toolEnvironment } from '../workspace.mjs';
import { ensurePnpm, pnpmPath } from './packages.mjs';

await runMain(async () => {
  await ensurePnpm(() => {});
  const child = spawn(pnpmPath(), process.argv.slice(2), { stdio: 'inherit', env: toolEnvironment() });
  // The terminal sends SIGINT to pnpm as well; waiting for it here keeps its exit status.
  process.on('SIGINT', () => {});
  process.on('SIGTERM', () => child.kill('SIGTERM'));
  return new Promise((resolve, reject) => {
    child.on('error', reject);
    child.on('exit', (code, signal) => resolve(code ?? 128 + constants.signals[signal ?? 'SIGKILL']));
  });
});
