// node tools/headers/main.mjs [--totals FILE]: compiles the headers that others build on, as they would.
//   ep/abi     C11 freestanding, and C++20
//   ep/device  C++20, and with nvcc, where it is installed, for each architecture, with and without -rdc
// Each header compiles alone; then two translation units with all of them are linked, which finds definitions that are
// not inline. Without nvcc its cases are reported as skipped.
import { mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { cpus, tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { Progress, runMain, ToolError } from '../console.mjs';
import { exitOnSignals, run } from '../process.mjs';
import { compiler } from '../setup/system.mjs';
import { nvccCommand, nvccVersion } from '../setup/toolchain.mjs';
import { root } from '../workspace.mjs';

const include = join(root, 'native/include');
const warnings = ['-Wall', '-Wextra', '-Werror'];
const cCompiler = process.env.CC || 'gcc';
const c11 = [cCompiler, '-std=c11', '-ffreestanding', '-pedantic', ...warnings, `-I${include}`];
const cxx20 = [compiler(), '-std=c++20', '-pthread', ...warnings, `-I${include}`];
const architectures = ['80', '90', '100'];
const nvcc = [
  nvccCommand(),
  '-std=c++20',
  '--expt-relaxed-constexpr',
  '-Werror=all-warnings',
  `-I${include}`,
  ...architectures.map((name) => `-gencode=arch=compute_${name},code=sm_${name}`),
];

/** @typedef {{ name: string, commands: readonly (readonly string[])[], needsNvcc?: boolean }} Case */

/** @param {string} folder */
const headersOf = (folder) =>
  readdirSync(join(include, folder), { recursive: true })
    .map((file) => `${folder}/${file}`)
    .filter((file) => /\.(?:h|hpp|cuh)$/.test(file))
    .sort();

/** @param {readonly string[]} headers */
const unit = (headers) => headers.map((header) => `#include <${header}>\n`).join('');

/**
 * @param {string} dir where the translation units are written
 * @returns {Case[]}
 */
function cases(dir) {
  /**
   * @param {string} name
   * @param {string} text
   */
  const source = (name, text) => {
    writeFileSync(join(dir, name), text);
    return join(dir, name);
  };
  /**
   * Two units with the same headers, compiled and linked.
   * @param {string} stem
   * @param {string} extension
   * @param {readonly string[]} headers
   * @param {readonly string[]} command
   */
  const twice = (stem, extension, headers, command) => {
    const one = source(`${stem}-1.${extension}`, unit(headers));
    const two = source(`${stem}-2.${extension}`, `${unit(headers)}int main() { return 0; }\n`);
    return [
      [...command, '-c', one, '-o', `${one}.o`],
      [...command, '-c', two, '-o', `${two}.o`],
      [...command, `${one}.o`, `${two}.o`, '-o', join(dir, stem)],
    ];
  };
  const abi = headersOf('ep/abi');
  const device = headersOf('ep/device');
  return [
    ...abi.map((header, index) => ({
      name: `C11 ${header}`,
      commands: [[...c11, '-fsyntax-only', source(`abi-${index}.c`, `${unit([header])}extern int ep_not_empty;\n`)]],
    })),
    ...[...abi, ...device].map((header, index) => ({
      name: `C++20 ${header}`,
      commands: [[...cxx20, '-fsyntax-only', source(`host-${index}.cpp`, unit([header]))]],
    })),
    { name: 'C++20 all headers in two units, linked', commands: twice('host', 'cpp', [...abi, ...device], cxx20) },
    ...device.map((header, index) => ({
      name: `nvcc ${header}`,
      // One architecture and no code generation beyond PTX: this asks only whether the header stands alone.
      commands: [
        [
          nvccCommand(),
          '-std=c++20',
          `-I${include}`,
          '-ptx',
          '-arch=compute_90',
          source(`one-${index}.cu`, unit([header])),
          '-o',
          join(dir, `one-${index}.ptx`),
        ],
      ],
      needsNvcc: true,
    })),
    ...['false', 'true'].map((rdc) => ({
      name: `nvcc all headers in two units, linked, -rdc=${rdc}, sm_${architectures.join(', sm_')}`,
      commands: twice(`nvcc-rdc-${rdc}`, 'cu', [...abi, ...device], [...nvcc, `-rdc=${rdc}`]),
      needsNvcc: true,
    })),
  ];
}

/**
 * @param {Case} entry
 * @returns {Promise<string | null>} the first failing command with its output
 */
async function failureOf(entry) {
  for (const [command = '', ...args] of entry.commands) {
    const result = await run(command, args, { limitMs: 5 * 60_000 });
    if (result.code !== 0) return `${entry.name}\n${command} ${args.join(' ')}\n${result.output.trim()}`;
  }
  return null;
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
  const [flag, totalsFile, ...rest] = process.argv.slice(2);
  if ((flag !== undefined && flag !== '--totals') || rest.length > 0)
    throw new ToolError('usage: headers/main.mjs [--totals FILE]');
  const dir = mkdtempSync(join(tmpdir(), 'ep-headers-'));
  process.on('exit', () => rmSync(dir, { recursive: true, force: true }));
  exitOnSignals();
  const progress = new Progress();
  const all = cases(dir);
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
