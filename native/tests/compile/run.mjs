// node native/tests/compile/run.mjs [--totals FILE] [--architectures 90,80,100] [--whole]: the kernels, instantiated and linked as their users would.
// tools/headers compiles each header alone; templates that nobody calls pass there whatever they contain, so here every
// kernel meets every context and endpoint, in two translation units or more, by g++ (and clang++ where it is installed) and by
// nvcc for each architecture, and for one of them with -rdc, too (not with --whole, which takes half as long), and one program links both machines and is run.
import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { cpus, tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { exitOnSignals, run } from '../../../tools/process.mjs';
import { compiler } from '../../../tools/setup/system.mjs';
import { nvccCommand, nvccVersion } from '../../../tools/setup/toolchain.mjs';

const { values } = parseArgs({
  options: {
    totals: { type: 'string' },
    architectures: { type: 'string', default: '90,80,100' },
    whole: { type: 'boolean', default: false },
  },
});
const totalsFile = values.totals;
const chosen = values.architectures.split(',');
const linkings = values.whole ? [false] : [false, true];

const native = resolve(import.meta.dirname, '../..');
const here = import.meta.dirname;
const out = mkdtempSync(join(tmpdir(), 'ep-compile-'));
process.on('exit', () => rmSync(out, { recursive: true, force: true }));
exitOnSignals();

const includes = [`-I${join(native, 'include')}`, `-I${native}`, `-I${out}`];
const warnings = ['-Wall', '-Wextra', '-Werror', '-pedantic'];
const architectureOf = (/** @type {string} */ name) => `-gencode=arch=compute_${name},code=sm_${name}`;
/** What -rdc changes is the linking, which is alike for all: the first will do. @param {boolean} rdc */
const architectures = (rdc) => (rdc ? chosen.slice(0, 1) : chosen).map(architectureOf);
const offsets = join(native, 'tests/abi/offsets.gen.c');
const coreSources = [
  'waiting',
  'limits',
  'copy',
  'device/kernel',
  'moe/cast',
  'simt/simt',
  'simt/context',
  'simt/report',
  'simt/fiber',
];

/** Every device header, so that a new one is in both units from its first day. */
writeFileSync(
  join(out, 'all_headers.h'),
  ['abi', 'device']
    .flatMap((folder) => readdirSync(join(native, 'include/ep', folder)).map((file) => `ep/${folder}/${file}`))
    .sort()
    .map((file) => `#include "${file}"\n`)
    .join(''),
);

let passed = 0;
let failed = 0;

/**
 * One case: commands that must all succeed, in order.
 * @param {string} name
 * @param {readonly (readonly string[])[]} commands
 * @returns {Promise<boolean>}
 */
async function check(name, commands) {
  for (const [command = '', ...args] of commands) {
    const result = await run(command, args, { limitMs: 9 * 60_000 });
    if (result.code === 0) continue;
    failed += 1;
    console.error(`FAIL  ${name}\n${command} ${args.join(' ')}\n${result.output.trim()}`);
    return false;
  }
  passed += 1;
  console.log(`ok    ${name}`);
  return true;
}

/** @param {readonly (() => Promise<unknown>)[]} cases run side by side, as many as there are cores */
async function together(cases) {
  const queue = [...cases];
  const worker = async () => {
    for (let next = queue.shift(); next !== undefined; next = queue.shift()) await next();
  };
  await Promise.all(Array.from({ length: Math.min(4, cpus().length) }, worker));
}

/** @param {string} name */
const object = (name) => join(out, `${name}.o`);

/** @param {string} name @param {string} cxx */
const hostObject = (name, cxx) => object(`${name}-${cxx.replace(/\W/g, '_')}`);

/** @param {string} cxx @returns {(() => Promise<boolean>)[]} */
const hostCases = (cxx) =>
  ['host_first', 'host_second', 'host_main'].map(
    (unit) => () =>
      check(`${cxx} ${unit}.cpp`, [
        [
          cxx,
          '-std=c++20',
          '-O1',
          ...warnings,
          ...includes,
          '-c',
          join(here, `${unit}.cpp`),
          '-o',
          hostObject(unit, cxx),
        ],
      ]),
  );

/** @param {string} cxx */
const hostLink = (cxx) => {
  const program = join(out, `host-${cxx.replace(/\W/g, '_')}`);
  const units = ['host_first', 'host_second', 'host_main'].map((unit) => hostObject(unit, cxx));
  return check(`${cxx} two units linked and run`, [
    [cxx, ...units, ...coreSources.map((name) => object(`core-${name.replace('/', '-')}`)), '-pthread', '-o', program],
    [program],
  ]);
};

const coreCases = coreSources.map(
  (name) => () =>
    check(`${compiler()} core/${name}.cpp`, [
      [
        ...[compiler(), '-std=c++20', '-O1', ...warnings, ...includes],
        ...['-c', join(native, 'core', `${name}.cpp`), '-o', object(`core-${name.replace('/', '-')}`)],
      ],
    ]),
);

/** @param {string} cc */
const offsetCases = (cc) => [
  () => check(`${cc} -std=c11 offsets.gen.c`, [[cc, '-std=c11', ...warnings, ...includes, '-fsyntax-only', offsets]]),
  () =>
    check(`${compiler()} offsets.gen.c as C++20`, [
      [compiler(), '-x', 'c++', '-std=c++20', ...warnings, ...includes, '-fsyntax-only', offsets],
    ]),
];

/** EFA's layouts against golden bytes and against offsets of other repositories. @param {string} cc */
const efaCases = (cc) => {
  const program = join(out, 'efa_check');
  return [
    () =>
      check('T1, T24: efa layouts against golden bytes and offsets', [
        [cc, '-std=c11', ...warnings, ...includes, join(native, 'tests/abi/efa_check.c'), '-o', program],
        [program],
      ]),
  ];
};

/** Our mlx5 layouts against the system's, where rdma-core's headers are installed. @param {string} cc */
const mlx5dvCases = (cc) => {
  const program = join(out, 'mlx5dv_check');
  return [
    () =>
      check('mlx5 layouts against mlx5dv.h', [
        [cc, '-std=gnu11', '-Wall', '-Wextra', ...includes, join(native, 'tests/abi/mlx5dv_check.c'), '-o', program],
        [program],
      ]),
  ];
};

// Nothing here runs on a GPU: ptxas need not take minutes to make it fast.
const nvcc = [
  nvccCommand(),
  '-std=c++20',
  '-Xptxas=-O1',
  '-Werror=all-warnings',
  '-Xcompiler=-fPIC,-Wall,-Wextra',
  ...includes,
];

const cudaUnits = [
  // The longest first.
  { unit: 'second', source: join(here, 'cuda_second.cu') },
  { unit: 'third', source: join(here, 'cuda_third.cu') },
  { unit: 'first', source: join(native, 'cuda/kernels.cu') },
  { unit: 'attention', source: join(native, 'cuda/attention_kernels.cu') },
  { unit: 'expert-layer', source: join(native, 'cuda/expert_kernels.cu') },
  { unit: 'experts', source: join(native, 'cuda/moe_kernels.cu') },
  { unit: 'low latency', source: join(native, 'cuda/moe_low_latency.cu') },
  { unit: 'group', source: join(native, 'cuda/group_kernels.cu') },
  { unit: 'library', source: join(native, 'cuda/library.cpp') },
];

/** @param {boolean} rdc */
const cudaCases = (rdc) =>
  cudaUnits.map(
    ({ unit, source }) =>
      () =>
        check(`nvcc ${unit} unit, -rdc=${rdc}, architectures: ${architectures(rdc).length}`, [
          [...nvcc, ...architectures(rdc), `-rdc=${rdc}`, '-c', source, '-o', object(`cuda-${unit}-${rdc}`)],
        ]),
  );

/**
 * Links the host's kernels, the GPU's and a main, once by g++ and once by nvcc, and runs both programs.
 * @param {boolean} rdc
 */
async function cudaLink(rdc) {
  const cxx = compiler();
  const gpu = cudaUnits.map(({ unit }) => object(`cuda-${unit}-${rdc}`));
  const mainObject = object(`both_main-${rdc}`);
  const host = [
    ...['host_first', 'host_second'].map((unit) => hostObject(unit, cxx)),
    ...coreSources.map((name) => object(`core-${name.replace('/', '-')}`)),
    mainObject,
  ];
  const deviceLink = object(`device-link-${rdc}`);
  const library = await cudaLibraryFolder();
  const byCxx = join(out, `both-cxx-${rdc}`);
  const byNvcc = join(out, `both-nvcc-${rdc}`);
  const main = [cxx, '-std=c++20', ...warnings, ...includes, '-c', join(here, 'both_main.cpp'), '-o', mainObject];
  await check(`both machines linked by ${cxx} and run, -rdc=${rdc}`, [
    main,
    ...(rdc ? [[...nvcc, ...architectures(rdc), '-dlink', ...gpu, '-o', deviceLink]] : []),
    [
      ...[cxx, ...host, ...gpu, ...(rdc ? [deviceLink] : []), `-L${library}`],
      ...['-lcudadevrt', '-lcudart_static', '-ldl', '-lrt', '-pthread', '-o', byCxx],
    ],
    [byCxx],
  ]);
  await check(`both machines linked by nvcc and run, -rdc=${rdc}`, [
    [...nvcc, ...architectures(rdc), `-rdc=${rdc}`, ...host, ...gpu, '-Xcompiler=-pthread', '-o', byNvcc],
    [byNvcc],
  ]);
}

/** Where nvcc itself looks for the runtime: its own path may be a wrapper's. */
async function cudaLibraryFolder() {
  const { output } = await run(nvccCommand(), ['--dryrun', '-o', 'none', object('cuda-first-false')]);
  const folder = [...output.matchAll(/"?-L([^"\s]+)"?/g)]
    .map((match) => match[1] ?? '')
    .find((candidate) => existsSync(join(candidate, 'libcudart_static.a')));
  if (folder === undefined) throw new Error('nvcc --dryrun names no folder with libcudart_static.a');
  return folder;
}

const hasClang = (await run('clang++', ['--version'])).code === 0;
const hasNvcc = (await nvccVersion()) !== null;
const cc = process.env.CC || 'gcc';
const hasMlx5dv =
  (await run(cc, ['-include', 'infiniband/mlx5dv.h', '-fsyntax-only', '-x', 'c', '/dev/null'])).code === 0;
const hostCompilers = hasClang ? [compiler(), 'clang++'] : [compiler()];
if (!hasClang) console.log('clang++ was not found: its half is not run');
if (!hasMlx5dv)
  console.log('infiniband/mlx5dv.h (libibverbs-dev) was not found: mlx5 layouts are not compared with it');
if (!hasNvcc) console.log('nvcc was not found (CUDACXX, CUDA_HOME and PATH were searched): the nvcc half is not run');

await together([
  ...(hasNvcc ? linkings.flatMap(cudaCases) : []),
  ...hostCompilers.flatMap(hostCases),
  ...coreCases,
  ...offsetCases(cc),
  ...efaCases(cc),
  ...(hasMlx5dv ? mlx5dvCases(cc) : []),
  ...(hasNvcc
    ? [() => check('nvcc offsets.gen.c', [[...nvcc, '-x', 'cu', '-c', offsets, '-o', object('offsets')]])]
    : []),
]);
if (failed === 0) {
  for (const cxx of hostCompilers) await hostLink(cxx);
  if (hasNvcc) await together(linkings.map((rdc) => () => cudaLink(rdc)));
}

if (totalsFile !== undefined) {
  mkdirSync(dirname(totalsFile), { recursive: true });
  writeFileSync(totalsFile, JSON.stringify({ passed, failed, skipped: 0 }));
}
console.log(`${passed} passed, ${failed} failed`);
process.exitCode = failed === 0 ? 0 : 1;
