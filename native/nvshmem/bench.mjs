// node native/nvshmem/bench.mjs [PES, 1] [MiB, 1024] [repetitions, 9]: starts that many PEs of nvshmem_baseline (build:nvshmem), and ends with 0 if each of them found every word right. Several PEs need a GPU
// each: on one they take turns, and their times say nothing. Where the library is not where it was at the build, LD_LIBRARY_PATH names its folder.
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { exitOnSignals, run } from '../../tools/process.mjs';

const program = resolve(import.meta.dirname, '../build/nvshmem/nvshmem_baseline');
const [pes, mebibytes, repetitions] = ['1', '1024', '9'].map((usual, i) => process.argv[2 + i] ?? usual);
const size = Number(pes);
if (!Number.isInteger(size) || size < 1 || size > 64 || process.argv.length > 5) {
  console.error('usage: node native/nvshmem/bench.mjs [PES, 1 to 64] [MiB] [repetitions]');
  process.exit(2);
}
if (!existsSync(program)) {
  console.error(`${program} is missing: pnpm --filter @ep/native build:nvshmem`);
  process.exit(1);
}
exitOnSignals();
// PEs meet there: new each time, since an identifier of an earlier run would lead nowhere.
const folder = mkdtempSync(join(tmpdir(), 'ep-nvshmem-'));
process.on('exit', () => rmSync(folder, { recursive: true, force: true }));

/** @param {number} pe */
const start = (pe) =>
  run(program, [`${pe}`, `${size}`, folder, `${mebibytes}`, `${repetitions}`], { limitMs: 300_000 });
const ends = await Promise.all(Array.from({ length: size }, (_, pe) => start(pe)));
for (const [pe, { code, output, timedOut }] of ends.entries()) {
  if (output.trim() !== '') console.log(output.trim());
  if (code !== 0) console.error(`PE ${pe} of ${size} ${timedOut ? 'did not end within 300 s' : `ended with ${code}`}`);
}
process.exit(ends.every(({ code }) => code === 0) ? 0 : 1);
