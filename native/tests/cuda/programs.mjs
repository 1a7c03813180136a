// The programs that need a GPU: what each is made of, and how it is built with nvcc.
import { join, resolve } from 'node:path';
import { run } from '../../../tools/process.mjs';
import { compiler } from '../../../tools/setup/system.mjs';
import { nvccCommand } from '../../../tools/setup/toolchain.mjs';
import { kernels, table } from '../../cuda/sources.mjs';

const native = resolve(import.meta.dirname, '../..');
const includes = [`-I${join(native, 'include')}`];
const hostIncludes = ['', 'core', 'tests'].map((folder) => `-I${join(native, folder)}`);
/** HAZARD: a fused multiply-add rounds once where formulas of numbers round twice (moe_number.h), and the host's bits are what those of a GPU are compared with. */
const rounding = ['-ffp-contract=off', '-fno-trapping-math'];
const core = ['waiting', 'limits', 'copy', 'device/kernel', 'simt/simt', 'simt/context', 'simt/report', 'simt/fiber'];
/** The software EFA, and what it stands on. */
const efa = [
  ...'combining engine execute faults keys port queues soft_device soft_table trace wire_net wire_shm wqe'
    .split(' ')
    .map((name) => `nic/efa/${name}.cpp`),
  ...'net/hub net/sockets net/talk mlx5/directory mlx5/registrations'.split(' ').map((name) => `nic/${name}.cpp`),
  ...['segment', 'mapped', 'life', 'huge_pages'].map((name) => `core/${name}.cpp`),
];
const reductions = ['', '_portable', '_avx2', '_avx512'].map((name) => `core/collective/reduce${name}.cpp`);

/** @typedef {{ host: readonly string[], device: readonly string[] }} Program by paths from native/ */

/** @satisfies {Record<string, Program>} */
export const programs = {
  gpu_test: {
    host: ['tests/cuda/gpu_test.cpp', ...core.map((name) => `core/${name}.cpp`)],
    device: [...kernels, table, 'tests/cuda/gpu_memory.cu'],
  },
  moe_gpu_test: {
    host: ['tests/cuda/moe_gpu_test.cpp', ...core.map((name) => `core/${name}.cpp`), 'core/moe/cast.cpp'],
    device: ['tests/cuda/moe_kernels.cu', 'cuda/moe_low_latency.cu', 'tests/cuda/gpu_memory.cu'],
  },
  group_gpu_test: {
    host: ['tests/cuda/group_gpu_test.cpp', ...core.map((name) => `core/${name}.cpp`), ...reductions],
    device: [...kernels, table],
  },
  post_bytes_test: {
    host: [
      'tests/cuda/post_bytes_test.cpp',
      'tests/cuda/post_traffic.cpp',
      ...core.map((name) => `core/${name}.cpp`),
      ...efa,
    ],
    device: ['tests/cuda/post_kernels.cu', 'tests/cuda/gpu_memory.cu'],
  },
  table_test: { host: ['tests/cuda/table_test.cpp'], device: [...kernels, table] },
  graph_test: { host: [], device: [...kernels, 'tests/cuda/graph_test.cu'] },
  experts_graph_test: { host: [], device: [...kernels, 'tests/cuda/experts_graph_test.cu'] },
  dispatch_bench: { host: [], device: [...kernels, 'tests/cuda/dispatch_bench.cu'] },
  experts_bench: { host: [], device: [...kernels, 'tests/cuda/experts_bench.cu'] },
  post_bench: { host: [], device: ['tests/cuda/post_bench.cu'] },
  put_bench: { host: [], device: ['tests/cuda/put_bench.cu'] },
};

const architectures = ['80', '90', '100'];

/**
 * Builds programs into a folder; throws with the compiler's output. EP_CUDA_ARCHITECTURES=90 builds for one kind of GPU, in a third of the time.
 * @param {readonly (keyof typeof programs)[]} names
 * @param {string} folder
 */
export async function buildPrograms(names, folder) {
  const wanted = process.env.EP_CUDA_ARCHITECTURES?.split(',') ?? architectures;
  const codes = wanted.map((name) => `-gencode=arch=compute_${name},code=sm_${name}`);
  /** @type {Map<string, string>} */
  const objects = new Map();
  /** @param {string} source @param {boolean} device */
  const object = async (source, device) => {
    const known = objects.get(source);
    if (known !== undefined) return known;
    const made = join(folder, `${objects.size}.o`);
    objects.set(source, made);
    const command = device
      ? [nvccCommand(), '-std=c++20', '-O3', '-Werror=all-warnings', ...codes, ...includes]
      : [compiler(), '-std=c++20', '-O2', ...rounding, '-Wall', '-Wextra', '-Werror', ...includes, ...hostIncludes];
    await checked([...command, '-c', join(native, source), '-o', made]);
    return made;
  };
  for (const name of names) {
    const parts = [];
    for (const source of programs[name].host) parts.push(await object(source, false));
    for (const source of programs[name].device) parts.push(await object(source, true));
    const link = ['-Xcompiler=-pthread,-static-libstdc++,-static-libgcc', '-o', join(folder, name)];
    await checked([nvccCommand(), ...codes, ...parts, ...link]);
  }
}

/**
 * Builds, in less than a second, the program that says whether there is a GPU, as the others do.
 * @param {string} folder
 */
export async function buildGpuHere(folder) {
  const made = join(folder, 'gpu_here');
  await checked([nvccCommand(), '-std=c++20', join(native, 'tests/cuda/gpu_here.cpp'), '-o', made]);
  return made;
}

/** @param {readonly string[]} command */
async function checked([command = '', ...args]) {
  const result = await run(command, args, { limitMs: 15 * 60_000 });
  if (result.output !== '') console.log(result.output.trim());
  if (result.code !== 0) throw new Error(`${command} ${args.join(' ')} ended with ${result.code}`);
}
