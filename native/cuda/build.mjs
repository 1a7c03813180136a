// node native/cuda/build.mjs: builds libep_cuda.so into native/build/cuda, where the addon looks for it, with nvcc and a static CUDA runtime. EP_CUDA_ARCHITECTURES=90
// builds for one kind of GPU, in a third of the time.
import { mkdirSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { basename, join, resolve } from 'node:path';
import { exitOnSignals, run } from '../../tools/process.mjs';
import { nvccCommand, nvccVersion } from '../../tools/setup/toolchain.mjs';
import { kernels, table } from './sources.mjs';

const native = resolve(import.meta.dirname, '..');
const out = join(native, 'build/cuda');
if ((await nvccVersion()) === null) {
  console.error('no nvcc was found (CUDACXX, CUDA_HOME and PATH were searched): kernels run on host threads only');
  process.exit(1);
}
mkdirSync(out, { recursive: true });
exitOnSignals();

const wanted = process.env.EP_CUDA_ARCHITECTURES?.split(',') ?? ['80', '90', '100'];
const newest = wanted.at(-1);
// The newest also as PTX, for GPUs that are newer than this build.
const codes = [
  ...wanted.map((name) => `-gencode=arch=compute_${name},code=sm_${name}`),
  `-gencode=arch=compute_${newest},code=compute_${newest}`,
];
const compile = [nvccCommand(), '-std=c++20', '-O3', '-Werror=all-warnings', ...codes, `-I${join(native, 'include')}`];
const objects = [...kernels, table].map((path) => ({
  source: join(native, path),
  object: join(out, `${basename(path)}.o`),
}));
const link = ['-static-libstdc++,-static-libgcc'].map((flags) => `-Xcompiler=${flags}`);
const compilations = objects.map(({ source, object }) => [
  ...compile,
  ...['-Xcompiler=-fPIC,-fvisibility=hidden', '-c', source, '-o', object],
]);
const linking = [
  ...[nvccCommand(), '-shared', ...codes, ...objects.map(({ object }) => object), ...link],
  ...['-Xlinker', '--exclude-libs', '-Xlinker', 'ALL', '-o', join(out, 'libep_cuda.so')],
];

/** @param {readonly string[]} words */
async function must([command = '', ...args]) {
  const result = await run(command, args, { limitMs: 15 * 60_000 });
  if (result.output !== '') console.log(result.output.trim());
  if (result.code !== 0) process.exit(result.code);
}

// As many at once as there are cores.
const left = [...compilations];
const compileOneByOne = async () => {
  for (let next = left.shift(); next !== undefined; next = left.shift()) await must(next);
};
await Promise.all(Array.from({ length: availableParallelism() }, compileOneByOne));
await must(linking);
