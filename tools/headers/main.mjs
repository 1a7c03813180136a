// node tools/headers/main.mjs [--alone] [--totals FILE]: every public header compiles alone, as the first include of a unit.
//   ep/abi     C11 freestanding, C++20
//   ep/device  C++20
// And all of them in one unit by nvcc, for sm_80, sm_90 and sm_100; with --alone, each by itself for sm_90 instead: that takes minutes, and finds only what
// is missing where nothing but nvcc looks.
// Without nvcc its cases are reported as skipped. That they link, and that every kernel compiles when it is used, is
// checked in native/tests/compile.
import { mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { cpus, tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { Progress, runMain, ToolError } from '../console.mjs';
import { exitOnSignals, run } from '../process.mjs';
import { compiler } from '../setup/system.mjs';
import { nvccCommand, nvccVersion } from '../setup/toolchain.mjs';
import { root } from '../workspace.mjs';

const folder = join(root, 'native/include');
const warnings = ['-Wall', '-Wextra', '-Werror'];
const cCompiler = process.env.CC || 'gcc';
const c11 = [cCompiler, '-std=c11', '-ffreestanding', '-pedantic', ...warnings, `-I${folder}`];
const cxx20 = [compiler(), '-std=c++20', '-pthread', ...warnings, `-I${folder}`];
// Machine code, not PTX: what a header defines goes through ptxas, too. What nobody calls is not defined: that is for native/tests/compile.
const nvcc = (/** @type {string} */ architecture) => [
  ...[nvccCommand(), '-std=c++20', '-Werror=all-warnings', `-I${folder}`],
  ...['-fatbin', `-gencode=arch=compute_${architecture},code=sm_${architecture}`],
];

/** @typedef {{ name: string, command: readonly string[], needsNvcc?: boolean }} Case */

/** @param {string} part */
const headersOf = (part) =>
  readdirSync(join(folder, part), { recursive: true })
    .map((file) => `${part}/${file}`)
    .filter((file) => /\.(?:h|hpp|cuh)$/.test(file))
    .sort();

/** @param {string} header */
const include = (header) => `#include <${header}>\n`;

/**
 * @param {string} dir where the translation units are written
 * @param {boolean} alone
 * @returns {Case[]}
 */
function cases(dir, alone) {
  /**
   * @param {string} name
   * @param {string} text
   */
  const source = (name, text) => {
    writeFileSync(join(dir, name), text);
    return join(dir, name);
  };
  const abi = headersOf('ep/abi');
  const all = [...abi, ...headersOf('ep/device')];
  const together = source('all.cu', all.map(include).join(''));
  return [
    ...(alone ? [] : ['80', '90', '100']).map((architecture) => ({
      name: `nvcc all headers, sm_${architecture}`,
      command: [...nvcc(architecture), together, '-o', join(dir, `all-${architecture}.fatbin`)],
      needsNvcc: true,
    })),
    ...abi.map((header, index) => ({
      name: `C11 ${header}`,
      command: [...c11, '-fsyntax-only', source(`${index}.c`, `${include(header)}extern int ep_not_empty;\n`)],
    })),
    ...all.map((header, index) => ({
      name: `C++20 ${header}`,
      command: [...cxx20, '-fsyntax-only', source(`${index}.cpp`, include(header))],
    })),
    ...(alone ? all : []).map((header, index) => ({
      name: `nvcc ${header}`,
      command: [...nvcc('90'), source(`${index}.cu`, include(header)), '-o', join(dir, `${index}.fatbin`)],
      needsNvcc: true,
    })),
  ];
}

/**
 * @param {Case} entry
 * @returns {Promise<string | null>} the command and its output when it failed
 */
async function failureOf(entry) {
  const [command = '', ...args] = entry.command;
  const result = await run(command, args, { limitMs: 5 * 60_000 });
  return result.code === 0 ? null : `${entry.name}\n${entry.command.join(' ')}\n${result.output.trim()}`;
}

/**
 * @param {readonly Case[]} selected
 * @param {(detail: string) => void} report
 * @returns {Promise<string[]>} failures
 */
async function runCases(selected, report) {
  const queue = [...selected];
  /** @type {string[]} */
  const failures = [];
  const worker = async () => {
    for (let entry = queue.shift(); entry !== undefined; entry = queue.shift()) {
      report(entry.name);
      const failure = await failureOf(entry);
      if (failure !== null) failures.push(failure);
    }
  };
  await Promise.all(Array.from({ length: Math.min(4, cpus().length) }, worker));
  return failures;
}

await runMain(async () => {
  const args = process.argv.slice(2);
  const alone = args[0] === '--alone';
  const [flag, totalsFile, ...rest] = alone ? args.slice(1) : args;
  if ((flag !== undefined && flag !== '--totals') || rest.length > 0)
    throw new ToolError('usage: headers/main.mjs [--alone] [--totals FILE]');
  const dir = mkdtempSync(join(tmpdir(), 'ep-headers-'));
  process.on('exit', () => rmSync(dir, { recursive: true, force: true }));
  exitOnSignals();
  const progress = new Progress();
  const all = cases(dir, alone);
  const version = await nvccVersion();
  const selected = all.filter((entry) => version !== null || !entry.needsNvcc);
  const skipped = all.length - selected.length;
  if (skipped > 0)
    progress.line(`skipped ${skipped} nvcc cases: no nvcc was found (CUDACXX, CUDA_HOME and PATH were searched)`);
  /** @type {string[]} */
  let failures = [];
  await progress.step(`${selected.length} header cases`, async (report) => {
    failures = await runCases(selected, report);
    return failures.length > 0 ? `${failures.length} FAILED` : '';
  });
  for (const failure of failures) progress.line(`FAIL  ${failure}`);
  if (totalsFile !== undefined) {
    mkdirSync(dirname(totalsFile), { recursive: true });
    writeFileSync(
      totalsFile,
      JSON.stringify({ passed: selected.length - failures.length, failed: failures.length, skipped }),
    );
  }
  return failures.length === 0 ? 0 : 1;
});
