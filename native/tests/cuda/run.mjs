// node native/tests/cuda/run.mjs test | sanitize | bench [--build-only FOLDER | --built FOLDER]: builds the tests or the benchmarks that need a GPU with nvcc, and runs them; with
// --built, those that --build-only has left in that folder, on a machine without nvcc. `sanitize` runs the tests, with fewer repetitions, under each tool of compute-sanitizer that finds
// wrong accesses, races in shared memory, or misused barriers. Where there is no GPU they cannot say anything, so nothing that must pass everywhere calls this; it is looked for before
// they are built, which takes minutes, unless they are only built.
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { exitOnSignals, run } from '../../../tools/process.mjs';
import { isRequired } from '../../../tools/required.mjs';
import { nvccVersion } from '../../../tools/setup/toolchain.mjs';
import { buildGpuHere, buildPrograms } from './programs.mjs';

/** Programs, with what they are called with under a sanitizer, where a kernel takes up to some hundred times as long. */
const tests = /** @type {const} */ ({
  table_test: [],
  gpu_test: [],
  post_bytes_test: ['1'],
  graph_test: ['3'],
  experts_graph_test: ['2', 'as-taken'],
  moe_gpu_test: ['4'],
  group_gpu_test: [],
});
const benchmarks = /** @type {const} */ (['dispatch_bench', 'experts_bench', 'post_bench', 'put_bench']);
const testNames = /** @type {readonly (keyof typeof tests)[]} */ (Object.keys(tests));
const tools = ['memcheck', 'racecheck', 'synccheck'];
/** What a tool makes a program end with that ended well but for what the tool has found. */
const FOUND = 9;
/** What every program ends with where there is no GPU. */
const NO_GPU = 2;

const [set, flag, kept] = process.argv.slice(2);
const known = flag === undefined || ((flag === '--build-only' || flag === '--built') && kept !== undefined);
if ((set !== 'test' && set !== 'sanitize' && set !== 'bench') || !known) {
  console.error('usage: node native/tests/cuda/run.mjs test | sanitize | bench [--build-only FOLDER | --built FOLDER]');
  process.exit(2);
}
const names = set === 'bench' ? benchmarks : testNames;
const folder = kept === undefined ? mkdtempSync(join(tmpdir(), 'ep-gpu-')) : resolve(kept);
mkdirSync(folder, { recursive: true });
if (kept === undefined) process.on('exit', () => rmSync(folder, { recursive: true, force: true }));
exitOnSignals();

/** @param {string} why */
function unavailable(why) {
  for (const name of names) console.log(`unavailable  ${name}: ${why}`);
  process.exit(isRequired('gpu') ? 1 : 0);
}

/** The program of that name on the PATH, or of the toolkit that CUDA_HOME names. */
async function sanitizer() {
  const places = ['compute-sanitizer', join(process.env.CUDA_HOME ?? '/usr/local/cuda', 'bin/compute-sanitizer')];
  for (const place of places) {
    const found = await run(place, ['--version'], { limitMs: 60_000 }).catch(() => undefined);
    if (found?.code === 0) return place;
  }
  return unavailable('no compute-sanitizer was found (PATH and CUDA_HOME were searched)');
}

if (flag !== '--built') {
  if ((await nvccVersion()) === null) unavailable('no nvcc was found');
  if (flag === undefined) {
    const { code, output } = await run(await buildGpuHere(folder), [], { limitMs: 60_000 });
    if (code === NO_GPU) unavailable(output.trim());
    else if (code !== 0) throw new Error(`looking for a GPU ended with ${code}\n${output.trim()}`);
  }
  await buildPrograms(names, folder);
  if (flag === '--build-only') process.exit(0);
}
/** @type {readonly { label: string, command: readonly string[] }[]} */
let runs = names.map((name) => ({ label: name, command: [join(folder, name)] }));
if (set === 'sanitize') {
  const by = await sanitizer();
  runs = tools.flatMap((tool) =>
    testNames.map((name) => ({
      label: `${tool} ${name}`,
      command: [by ?? '', '--tool', tool, '--error-exitcode', String(FOUND), join(folder, name), ...tests[name]],
    })),
  );
}
let failed = 0;
for (const { label, command } of runs) {
  const [program = '', ...words] = command;
  const result = await run(program, words, { limitMs: 10 * 60_000 });
  console.log(`${label}\n${result.output.trim()}`);
  if (result.code === NO_GPU && !isRequired('gpu')) console.log(`unavailable  ${label}: no GPU`);
  else if (result.code !== 0) {
    failed++;
    console.log(`${label} ${result.code === FOUND ? 'was found fault with' : `ended with ${result.code}`}`);
    if (set !== 'sanitize') break; // a benchmark or a test after one that failed says nothing
  }
}
if (set === 'sanitize') console.log(`${runs.length - failed} of ${runs.length} without a fault`);
process.exit(failed === 0 ? 0 : 1);
