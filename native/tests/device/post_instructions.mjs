// node native/tests/device/post_instructions.mjs [--update] [--totals FILE]: host instructions for each WQE posted, counted by callgrind over the
// loops of ibgda_bench and efa_bench, against ibgda_instructions.json and efa_instructions.json. More than the committed number by over 5 % is a
// failure; fewer are reported. The numbers are of one compiler: with another, or without valgrind, nothing is compared, and that is said.
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { exitOnSignals, run } from '../../../tools/process.mjs';
import { compiler } from '../../../tools/setup/system.mjs';

const native = resolve(import.meta.dirname, '../..');
const out = mkdtempSync(join(tmpdir(), 'ep-instructions-'));
process.on('exit', () => rmSync(out, { recursive: true, force: true }));
exitOnSignals();

const tolerance = 1.05;
/** What `<nic>_bench count WAY SHARING LENGTH POSTS` takes; `length` is what the third word means. */
const programs = [
  {
    nic: 'ibgda',
    ways: ['lock device', 'in-turn device', 'ringer device', 'in-turn thread'],
    length: 'batch',
    lengths: [1, 4, 16],
  },
  {
    nic: 'efa',
    ways: ['lock device', 'lock-free device', 'lock-free thread'],
    length: 'run',
    lengths: [1, 8, 16],
  },
];
/** Of the two runs whose difference is counted: what starts and ends a program cancels out. */
const posts = /** @type {const} */ ([16_000, 48_000]);

/** @param {readonly string[]} command */
async function output([command = '', ...args]) {
  const result = await run(command, args, { limitMs: 5 * 60_000 });
  if (result.code !== 0) throw new Error(`${command} ${args.join(' ')} ended with ${result.code}\n${result.output}`);
  return result.output;
}

/** @param {string} program @param {string} way @param {number} length @param {number} count */
async function instructions(program, way, length, count) {
  const text = await output([
    ...['valgrind', '--tool=callgrind', `--callgrind-out-file=${join(out, 'callgrind')}`, program, 'count'],
    ...[...way.split(' '), String(length), String(count)],
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

/** @param {(typeof programs)[number]} of Builds the program and counts; one result for each way and length. */
async function compare({ nic, ways, length, lengths }) {
  const baselineFile = join(import.meta.dirname, `${nic}_instructions.json`);
  const baseline = /** @type {{ compiler: string, perWqe: Record<string, number> }} */ (
    existsSync(baselineFile) ? JSON.parse(readFileSync(baselineFile, 'utf8')) : { compiler: machine, perWqe: {} }
  );
  const cases = ways.flatMap((way) => lengths.map((count) => ({ way, count, name: `${way}, ${length} ${count}` })));
  if (!update && machine !== baseline.compiler) {
    console.log(`${nic}: the committed counts are of ${baseline.compiler}, this is ${machine}: not compared`);
    return { passed: 0, failed: 0, skipped: cases.length };
  }
  const program = join(out, `${nic}_bench`);
  await output([
    ...[compiler(), '-std=c++20', '-O2', '-DNDEBUG', `-I${join(native, 'include')}`, `-I${join(native, 'core')}`],
    ...[
      join(native, `tests/device/${nic}_bench.cpp`),
      join(native, `core/${nic}/post_bench.cpp`),
      join(native, 'core/waiting.cpp'),
      join(native, 'core/limits.cpp'),
    ],
    ...['-pthread', '-o', program],
  ]);
  /** @type {Record<string, number>} */
  const perWqe = {};
  let failed = 0;
  for (const { way, count, name } of cases) {
    const [few, many] = [
      await instructions(program, way, count, posts[0]),
      await instructions(program, way, count, posts[1]),
    ];
    const found = Number(((many - few) / (posts[1] - posts[0])).toFixed(1));
    perWqe[name] = found;
    const committed = baseline.perWqe[name];
    const bad = !update && (committed === undefined || found > committed * tolerance);
    if (bad) failed += 1;
    console.log(
      `${bad ? 'FAIL' : 'ok  '}  ${nic}: ${name}: ${found} instructions for each WQE, committed ${committed}`,
    );
  }
  if (update) writeFileSync(baselineFile, `${JSON.stringify({ compiler: machine, perWqe }, null, 2)}\n`);
  return { passed: cases.length - failed, failed, skipped: 0 };
}

if ((await run('valgrind', ['--version'])).code !== 0) {
  console.log('valgrind was not found: instructions are not counted');
  end(
    0,
    0,
    programs.reduce((sum, { ways, lengths }) => sum + ways.length * lengths.length, 0),
  );
} else {
  const results = [];
  for (const program of programs) results.push(await compare(program));
  /** @param {'passed' | 'failed' | 'skipped'} what */
  const sum = (what) => results.reduce((all, result) => all + result[what], 0);
  end(sum('passed'), sum('failed'), sum('skipped'));
}
