// node tools/test/optional-preset.mjs PRESET --totals FILE: configures, builds and runs the C++ tests of a preset whose tool a machine need not
// have. The tool is installed where that is allowed; where it is missing all the same, its tests count as one that was skipped, and a line says why.
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { Progress, runMain, ToolError } from '../console.mjs';
import { exitOnSignals, run } from '../process.mjs';
import { aptInstall, mayInstall, missingText, onPath } from '../setup/system.mjs';
import { resultsDir, root } from '../workspace.mjs';
import { junitTotals } from './totals.mjs';

/** Newest first; 14 is Debian 12's own, and the oldest that compiles the sources. */
const clangs = ['clang++', ...[21, 20, 19, 18, 17, 16, 15, 14].map((version) => `clang++-${version}`)];
const clang = () => clangs.find(onPath);

/** @param {string} name of the compiler for C++ */
const clangArguments = (name) => [`-DCMAKE_CXX_COMPILER=${name}`, `-DCMAKE_C_COMPILER=${name.replace('++', '')}`];

/** @typedef {{ what: string, apt: readonly string[], find: () => string | undefined, configure: (found: string) => readonly string[], addon: boolean }} Tool */

/** @type {Tool} */
const clangTool = {
  what: 'clang >= 14',
  apt: ['clang-14', 'libclang-rt-14-dev'],
  find: clang,
  configure: clangArguments,
  addon: true,
};

/** @type {Readonly<Record<string, Tool>>} */
const tools = {
  clang: clangTool,
  'clang-asan': { ...clangTool, addon: false },
  litmus: {
    what: 'relacy, a model checker of headers only',
    apt: ['relacy-dev'],
    find: () => ['/usr/include', '/usr/local/include'].find((path) => existsSync(join(path, 'relacy/relacy.hpp'))),
    configure: () => [],
    addon: false,
  },
};

const native = join(root, 'native');

/**
 * @param {string} title
 * @param {readonly string[]} command
 * @param {Progress} progress
 */
async function mustRun(title, command, progress) {
  const [file = '', ...args] = command;
  await progress.step(title, async (report) => {
    const result = await run(file, args, { cwd: native, onLine: report, limitMs: 30 * 60_000 });
    if (result.code === 0) return '';
    progress.line(result.output.trimEnd().slice(-8000));
    throw new ToolError(`${title} ended with status ${result.code}`);
  });
}

/**
 * @param {Tool} tool
 * @param {Progress} progress
 * @returns {Promise<string | undefined>} what was found
 */
async function obtain(tool, progress) {
  const found = tool.find();
  if (found !== undefined || !mayInstall()) return found;
  try {
    await progress.step(`install ${tool.apt.join(' ')}`, async (report) => {
      await aptInstall(tool.apt, report);
      return '';
    });
  } catch (error) {
    if (!(error instanceof ToolError)) throw error;
    progress.line(error.message);
  }
  return tool.find();
}

await runMain(async () => {
  const [preset = '', flag, totalsFile, ...rest] = process.argv.slice(2);
  const tool = tools[preset];
  if (tool === undefined || flag !== '--totals' || totalsFile === undefined || rest.length > 0)
    throw new ToolError(`usage: optional-preset.mjs ${Object.keys(tools).join('|')} --totals FILE`);
  exitOnSignals();
  const progress = new Progress();
  const write = (/** @type {import('./totals.mjs').Totals} */ totals) => {
    mkdirSync(dirname(totalsFile), { recursive: true });
    writeFileSync(totalsFile, `${JSON.stringify(totals)}\n`);
  };
  const found = await obtain(tool, progress);
  if (found === undefined) {
    const missing = tool.apt.map((apt, index) => ({
      what: index === 0 ? tool.what : apt,
      apt,
      probe: async () => null,
    }));
    progress.line(`skipped the tests of preset ${preset}: ${missingText(missing)}`);
    write({ passed: 0, failed: 0, skipped: 1 });
    return 0;
  }
  progress.line(`preset ${preset} with ${found}`);
  await mustRun(`configure ${preset}`, ['cmake', '--preset', preset, ...tool.configure(found)], progress);
  await mustRun(`build ${preset}`, ['cmake', '--build', '--preset', preset], progress);
  if (tool.addon) {
    const out = join('build', `${preset}-addon`);
    const flags = tool.configure(found).map((argument) => argument.replace('-D', '--CD'));
    const command = ['pnpm', 'exec', 'cmake-js', 'build', '-G', 'Ninja', '-O', out, ...flags];
    await mustRun(`addon ${preset}`, command, progress);
  }
  const report = join(resultsDir, `ctest-${preset}.xml`);
  mkdirSync(resultsDir, { recursive: true });
  const result = await run(
    'ctest',
    ['--preset', preset, '--no-tests=error', '--output-on-failure', '--output-junit', report],
    { cwd: native, onLine: (line) => progress.line(line), limitMs: 30 * 60_000 },
  );
  write(junitTotals(readFileSync(report, 'utf8')));
  return result.code === 0 ? 0 : 1;
});
