// node native/tests/device/ibgda_instructions.mjs [--update] [--totals FILE]: host instructions for each WQE posted, counted by callgrind over
// ibgda_bench's loop, against ibgda_instructions.json. More than the committed number by over 5 % is a failure; fewer are reported. The numbers are
// of one compiler: with another, or without valgrind, nothing is compared, and that is said.
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { exitOnSignals, run } from '../../../tools/process.mjs';
import { compiler } from '../../../tools/setup/system.mjs';

const native = resolve(import.meta.dirname, '../..');
const baselineFile = join(import.meta.dirname, 'ibgda_instructions.json');
const out = mkdtempSync(join(tmpdir(), 'ep-instructions-'));
process.on('exit', () => rmSync(out, { recursive: true, force: true }));
exitOnSignals();

const tolerance = 1.05;
const ways = ['lock device', 'in-turn device', 'ringer device', 'in-turn thread', 'ringer thread'];
const batches = [1, 4, 16];
/** Of the two runs whose difference is counted: what starts and ends a program cancels out. */
const posts = /** @type {const} */ ([16_000, 48_000]);

/** @param {readonly string[]} command */
async function output([command = '', ...args]) {
  const result = await run(command, args, { limitMs: 5 * 60_000 });
  if (result.code !== 0) throw new Error(`${command} ${args.join(' ')} ended with ${result.code}\n${result.output}`);
  return result.output;
}

/** @param {string} program @param {string} way @param {number} batch @param {number} count */
async function instructions(program, way, batch, count) {
  const text = await output([
    ...['valgrind', '--tool=callgrind', `--callgrind-out-file=${join(out, 'callgrind')}`, program, 'count'],
    ...[...way.split(' '), String(batch), String(count)],
  ]);
  const found = /Collected\s*:\s*(\d+)/.exec(text)?.[1];
  if (found === undefined) throw new Error(`callgrind names no count:\n${text}`);
  return Number(found);
}

const args = process.argv.slice(2);
const update = args.includes('--update');
const totalsFile = args.includes('--totals') ? args[args.indexOf('--totals') + 1] : undefined;

/** @param {number} passed @param {number} failed @param {number} skipped */
function end(passed, failed, skipped) {
  if (totalsFile !== undefined) {
    mkdirSync(dirname(totalsFile), { recursive: true });
    writeFileSync(totalsFile, JSON.stringify({ passed, failed, skipped }));
  }
  console.log(`${passed} passed, ${failed} failed, ${skipped} skipped`);
  process.exitCode = failed === 0 ? 0 : 1;
}

const machine = `${process.arch} ${(await output([compiler(), '-dumpfullversion', '-dumpversion'])).trim().split('.')[0]}`;
const baseline = /** @type {{ compiler: string, perWqe: Record<string, number> }} */ (
  JSON.parse(readFileSync(baselineFile, 'utf8'))
);
if ((await run('valgrind', ['--version'])).code !== 0) {
  console.log('valgrind was not found: instructions are not counted');
  end(0, 0, ways.length * batches.length);
} else if (!update && machine !== baseline.compiler) {
  console.log(`the committed counts are of ${baseline.compiler}, this is ${machine}: instructions are not compared`);
  end(0, 0, ways.length * batches.length);
} else {
  const program = join(out, 'ibgda_bench');
  await output([
    ...[compiler(), '-std=c++20', '-O2', '-DNDEBUG', `-I${join(native, 'include')}`, `-I${join(native, 'core')}`],
    ...[
      join(native, 'tests/device/ibgda_bench.cpp'),
      join(native, 'core/ibgda/post_bench.cpp'),
      join(native, 'core/waiting.cpp'),
      join(native, 'core/limits.cpp'),
    ],
    ...['-pthread', '-o', program],
  ]);
  /** @type {Record<string, number>} */
  const perWqe = {};
  let failed = 0;
  for (const way of ways) {
    for (const batch of batches) {
      const name = `${way}, batch ${batch}`;
      const [few, many] = [
        await instructions(program, way, batch, posts[0]),
        await instructions(program, way, batch, posts[1]),
      ];
      const count = Number(((many - few) / (posts[1] - posts[0])).toFixed(1));
      perWqe[name] = count;
      const committed = baseline.perWqe[name];
      const bad = !update && (committed === undefined || count > committed * tolerance);
      if (bad) failed += 1;
      console.log(`${bad ? 'FAIL' : 'ok  '}  ${name}: ${count} instructions for each WQE, committed ${committed}`);
    }
  }
  if (update) writeFileSync(baselineFile, `${JSON.stringify({ compiler: machine, perWqe }, null, 2)}\n`);
  end(ways.length * batches.length - failed, failed, 0);
}
