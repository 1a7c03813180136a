// node native/tests/cuda/bench.mjs [--build-only PROGRAM]: builds post_bench with nvcc and runs it. Needs a GPU.
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { exitOnSignals, run } from '../../../tools/process.mjs';
import { nvccCommand } from '../../../tools/setup/toolchain.mjs';

const native = resolve(import.meta.dirname, '../..');
const out = mkdtempSync(join(tmpdir(), 'ep-gpu-'));
process.on('exit', () => rmSync(out, { recursive: true, force: true }));
exitOnSignals();

const [flag, kept] = process.argv.slice(2);
if (flag !== undefined && (flag !== '--build-only' || kept === undefined)) {
  console.error('usage: node native/tests/cuda/bench.mjs [--build-only PROGRAM]');
  process.exit(2);
}
const program = kept === undefined ? join(out, 'post_bench') : resolve(kept);
const architectures = ['80', '90', '100'].map((name) => `-gencode=arch=compute_${name},code=sm_${name}`);
const commands = [
  [
    ...[nvccCommand(), '-std=c++20', '-O3', '-Werror=all-warnings', ...architectures, `-I${join(native, 'include')}`],
    ...[join(native, 'tests/cuda/post_bench.cu'), '-Xcompiler=-static-libstdc++,-static-libgcc', '-o', program],
  ],
  ...(kept === undefined ? [[program]] : []),
];
for (const [command = '', ...args] of commands) {
  const result = await run(command, args, { limitMs: 10 * 60_000 });
  if (result.output !== '') console.log(result.output.trim());
  if (result.code !== 0) process.exit(result.code);
}
