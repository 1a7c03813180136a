// node native/tests/cuda/run.mjs test | bench [--build-only FOLDER | --built FOLDER]: builds the tests or the benchmarks that need a GPU with nvcc, and runs them; with
// --built, those that --build-only has left in that folder, on a machine without nvcc. Where there is no GPU they cannot say anything, so nothing that must pass everywhere
// calls this.
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { exitOnSignals, run } from '../../../tools/process.mjs';
import { isRequired } from '../../../tools/required.mjs';
import { nvccVersion } from '../../../tools/setup/toolchain.mjs';
import { buildPrograms } from './programs.mjs';

const sets = {
  test: /** @type {const} */ (['table_test', 'gpu_test', 'graph_test', 'moe_gpu_test', 'group_gpu_test']),
  bench: /** @type {const} */ (['dispatch_bench', 'experts_bench', 'post_bench']),
};

const [set, flag, kept] = process.argv.slice(2);
const known = flag === undefined || ((flag === '--build-only' || flag === '--built') && kept !== undefined);
if ((set !== 'test' && set !== 'bench') || !known) {
  console.error('usage: node native/tests/cuda/run.mjs test | bench [--build-only FOLDER | --built FOLDER]');
  process.exit(2);
}
const folder = kept === undefined ? mkdtempSync(join(tmpdir(), 'ep-gpu-')) : resolve(kept);
mkdirSync(folder, { recursive: true });
if (kept === undefined) process.on('exit', () => rmSync(folder, { recursive: true, force: true }));
exitOnSignals();
if (flag !== '--built') {
  if ((await nvccVersion()) === null && !isRequired('gpu')) {
    for (const name of sets[set]) console.log(`unavailable  ${name}: no nvcc was found`);
    process.exit(0);
  }
  await buildPrograms(sets[set], folder);
  if (flag === '--build-only') process.exit(0);
}
for (const name of sets[set]) {
  const result = await run(join(folder, name), [], { limitMs: 10 * 60_000 });
  console.log(`${name}\n${result.output.trim()}`);
  // 2: there is no GPU.
  if (result.code === 2 && !isRequired('gpu')) console.log(`unavailable  ${name}: no GPU`);
  else if (result.code !== 0) process.exit(result.code);
}
