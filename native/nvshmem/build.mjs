// node native/nvshmem/build.mjs: builds nvshmem_baseline into native/build/nvshmem, with nvcc and NVIDIA's NVSHMEM: NVSHMEM_HOME, else that of a python (PYTHON, else python3) that has the wheel nvidia-nvshmem-cu13.
// Nothing else needs it, and nothing that holds NVSHMEM's code is shipped. EP_CUDA_ARCHITECTURES as for build:cuda; 90 unless given.
import { existsSync, mkdirSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { exitOnSignals, run } from '../../tools/process.mjs';
import { nvccCommand, nvccVersion } from '../../tools/setup/toolchain.mjs';
import { kernels } from '../cuda/sources.mjs';

const native = resolve(import.meta.dirname, '..');
const out = join(native, 'build/nvshmem');

/** @param {string} why @returns {never} */
function refuse(why) {
  console.error(why);
  process.exit(1);
}

async function findHome() {
  const named = process.env.NVSHMEM_HOME;
  if (named !== undefined && named !== '') return named;
  const find = 'import nvidia.nvshmem as n; print(list(n.__path__)[0])';
  const found = await run(process.env.PYTHON ?? 'python3', ['-c', find], { limitMs: 30_000 }).catch(() => undefined);
  return found?.code === 0 ? found.output.trim() : undefined;
}

if ((await nvccVersion()) === null) refuse('no nvcc was found (CUDACXX, CUDA_HOME and PATH were searched)');
const home = await findHome();
if (home === undefined || !existsSync(join(home, 'include/nvshmem.h'))) {
  refuse(
    `no headers of NVSHMEM in ${home ?? 'any python'}: pip install nvidia-nvshmem-cu13, or set NVSHMEM_HOME to the folder that has include/ and lib/`,
  );
}
mkdirSync(out, { recursive: true });
exitOnSignals();

const wanted = process.env.EP_CUDA_ARCHITECTURES?.split(',') ?? ['90'];
const codes = wanted.map((name) => `-gencode=arch=compute_${name},code=sm_${name}`);
const compile = [nvccCommand(), '-std=c++20', '-O3', ...codes, `-I${join(native, 'include')}`, `-I${native}`];
const objects = ['nvshmem/baseline.cu', ...kernels].map((name) => ({
  source: join(native, name),
  object: join(out, `${name.replaceAll('/', '_')}.o`),
}));
const lib = join(home, 'lib');
const commands = [
  ...objects.map(({ source, object }) => [
    ...compile,
    ...(source.endsWith('baseline.cu') ? ['-rdc=true', '-isystem', join(home, 'include')] : []),
    ...['-c', source, '-o', object],
  ]),
  [
    ...[nvccCommand(), ...codes, ...objects.map(({ object }) => object), `-L${lib}`, '-lnvshmem_device'],
    ...['-l:libnvshmem_host.so.3', '-lcudadevrt', '-Xlinker', '-rpath', '-Xlinker', lib],
    ...['-o', join(out, 'nvshmem_baseline')],
  ],
];
for (const [command = '', ...args] of commands) {
  const result = await run(command, args, { limitMs: 15 * 60_000 });
  if (result.output !== '') console.log(result.output.trim());
  if (result.code !== 0) process.exit(result.code ?? 1);
}
console.log(join(out, 'nvshmem_baseline'));
