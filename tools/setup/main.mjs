// node tools/setup/main.mjs: makes an empty checkout ready to run. Needs Node, and installs or names all the rest.
// Nothing outside the checkout changes except system packages, and those only when run as root on a system with apt.
// Safe to repeat, to interrupt at any point and to run twice at once; when nothing changed it only looks.
import { join } from 'node:path';
import { formatTime, Progress, runMain, ToolError } from '../console.mjs';
import { exitOnSignals, run } from '../process.mjs';
import { cacheDir, pnpmVersion, readJson, root, toolEnvironment } from '../workspace.mjs';
import { withLock } from './lock.mjs';
import { ensurePnpm, installPackages } from './packages.mjs';
import { ensureSystem, requirements } from './system.mjs';
import { glibcVersion, nvccVersion, readStamp, stampPath, writeIfChanged } from './toolchain.mjs';

const usage = `usage: node tools/setup/main.mjs [--for demo|test]

Installs what is missing and builds everything. --for only says what comes next.`;

const purposes = ['demo', 'test'];

/**
 * @param {readonly string[]} args
 * @returns {{ help: boolean, purpose: string | undefined }}
 */
function parseArguments(args) {
  if (args.length === 0) return { help: false, purpose: undefined };
  if (args.length === 1 && (args[0] === '--help' || args[0] === '-h')) return { help: true, purpose: undefined };
  const [flag, purpose] = args;
  if (args.length === 2 && flag === '--for' && purpose && purposes.includes(purpose)) return { help: false, purpose };
  throw new ToolError(`setup does not know ${JSON.stringify(args.join(' '))}\n${usage}`);
}

function checkNode() {
  const wanted = /** @type {string} */ (readJson(join(root, 'package.json')).engines.node).replace('>=', '');
  const [haveMajor = 0, haveMinor = 0] = process.versions.node.split('.').map(Number);
  const [needMajor = 0, needMinor = 0] = wanted.split('.').map(Number);
  if (haveMajor < needMajor || (haveMajor === needMajor && haveMinor < needMinor)) {
    throw new ToolError(`node ${process.versions.node} is too old: this repository needs ${wanted} or newer`);
  }
  if (process.platform !== 'linux') {
    throw new ToolError(
      `the native addon is built on Linux; this is ${process.platform}. Use a Linux machine, VM or container`,
    );
  }
}

/**
 * @param {(detail: string) => void} report
 * @returns {Promise<string>} the compiler and tools found
 */
async function prepareToolchain(report) {
  const [system, nvcc] = await Promise.all([
    ensureSystem(requirements(readStamp()?.cxx ?? null), report),
    nvccVersion(),
  ]);
  /** @type {import('./toolchain.mjs').Toolchain} */
  const toolchain = { arch: process.arch, glibc: glibcVersion(), ...system, nvcc };
  writeIfChanged(stampPath, `${JSON.stringify(toolchain, null, 2)}\n`);
  return `${system.cxx}, ${system.cmake}, ninja ${system.ninja}, ${nvcc === null ? 'no nvcc' : 'nvcc'}`;
}

/**
 * @param {readonly string[]} args
 * @param {(detail: string) => void} report
 * @returns {Promise<string>} turbo's own count of what came from its cache
 */
async function turbo(args, report) {
  const result = await run('turbo', ['run', ...args, '--output-logs=new-only', '--ui=stream'], {
    cwd: root,
    env: toolEnvironment(),
    onLine: report,
    limitMs: 30 * 60_000,
  });
  if (result.code !== 0) {
    throw new ToolError(
      `turbo run ${args.join(' ')} ended with status ${result.code}:\n${result.output.slice(-12_000)}`,
    );
  }
  return /Cached:\s+(.*?)\s*$/m.exec(result.output)?.[1] ?? '';
}

/** @param {string | undefined} purpose */
async function setup(purpose) {
  const progress = new Progress();
  const started = performance.now();
  exitOnSignals(() => progress.line('interrupted: run the same command again, it goes on where it stopped'));
  checkNode();
  const onWait = (/** @type {number} */ pid) =>
    progress.line(`another set-up (process ${pid}) is at work here: waiting for it`);
  await withLock(
    join(cacheDir, 'setup-lock'),
    async () => {
      await progress.step('compiler and build tools', prepareToolchain);
      await progress.step(`pnpm ${pnpmVersion()}`, ensurePnpm);
      await progress.step('packages', installPackages);
      await progress.step('build', (report) => turbo(['build'], report));
      await progress.step('native build', (report) => turbo(['build:native', '--filter=@ep/native'], report));
    },
    { onWait },
  );
  progress.line(`set-up ready in ${formatTime(performance.now() - started)}${purpose ? `, next: ${purpose}` : ''}`);
}

await runMain(async () => {
  const { help, purpose } = parseArguments(process.argv.slice(2));
  if (help) process.stdout.write(`${usage}\n`);
  else await setup(purpose);
  return 0;
});
