// node native/tests/cuda/run.mjs [--build-only PROGRAM]: builds the GPU test with nvcc and runs it. Needs a GPU to pass: where there is none
// this test cannot say anything, so nothing that must pass everywhere calls it.
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { exitOnSignals, run } from '../../../tools/process.mjs';
import { compiler } from '../../../tools/setup/system.mjs';
import { nvccCommand } from '../../../tools/setup/toolchain.mjs';

const native = resolve(import.meta.dirname, '../..');
const out = mkdtempSync(join(tmpdir(), 'ep-gpu-'));
process.on('exit', () => rmSync(out, { recursive: true, force: true }));
exitOnSignals();

const [flag, kept] = process.argv.slice(2);
if (flag !== undefined && (flag !== '--build-only' || kept === undefined)) {
  console.error('usage: node native/tests/cuda/run.mjs [--build-only PROGRAM]');
  process.exit(2);
}
const program = kept === undefined ? join(out, 'gpu_test') : resolve(kept);
const includes = [`-I${join(native, 'include')}`];
const core = ['waiting', 'limits', 'copy', 'device/kernel', 'simt/simt', 'simt/context', 'simt/report', 'simt/fiber'];
const host = [join(native, 'tests/cuda/gpu_test.cpp'), ...core.map((name) => join(native, 'core', `${name}.cpp`))];
const objects = host.map((_, index) => join(out, `${index}.o`));
const device = ['cuda/attention_dispatch.cu', 'tests/cuda/gpu_memory.cu'].map((name) => join(native, name));
const architectures = ['80', '90', '100'].map((name) => `-gencode=arch=compute_${name},code=sm_${name}`);

const commands = [
  ...host.map((source, index) => [
    ...[compiler(), '-std=c++20', '-O2', '-Wall', '-Wextra', '-Werror', ...includes],
    ...['-c', source, '-o', objects[index] ?? ''],
  ]),
  [
    ...[nvccCommand(), '-std=c++20', '-O3', '-Werror=all-warnings', ...architectures, ...includes],
    ...[...device, ...objects, '-Xcompiler=-pthread,-static-libstdc++,-static-libgcc', '-o', program],
  ],
  ...(kept === undefined ? [[program]] : []),
];
for (const [command = '', ...args] of commands) {
  const result = await run(command, args, { limitMs: 10 * 60_000 });
  if (result.output !== '') console.log(result.output.trim());
  if (result.code !== 0) process.exit(result.code);
}
