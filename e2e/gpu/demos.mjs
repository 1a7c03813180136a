// The whole main jobs as a user runs them: `ep demo … --device cuda`, which compares with what the host computes and says PASS or FAIL.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

const run = promisify(execFile);
const ep = fileURLToPath(new URL('../../packages/cli/bin/ep.mjs', import.meta.url));
const root = fileURLToPath(new URL('../..', import.meta.url));

/** Where a demo runs: `device` as the option has it, and how many GPUs that must be. @typedef {{ device: string, gpus: number }} Place */

/** The report. Throws with what the program printed, or if ranks are elsewhere than they were to be. @param {Place} place @param {readonly string[]} args */
async function demo({ device, gpus }, args) {
  const { stdout } = await run(process.execPath, [
    ...[ep, 'demo', ...args, '--device', device, '--small', '--no-svg', '--json', '--from', root],
  ]).catch((error) => {
    throw new Error(`ep demo ${args.join(' ')}: ${error.message}\n${error.stdout}`);
  });
  const report = JSON.parse(stdout);
  const ranksAt = (/** @type {number} */ at) =>
    [...Array(report.ranks).keys()].filter((rank) => rank % report.gpus.length === at);
  assert.deepEqual(
    report.gpus.map(({ ranks }) => ranks),
    [...Array(Math.min(gpus, report.ranks)).keys()].map(ranksAt),
  );
  // Nobody heard from the one that dies.
  const dies = args.includes('--kill') ? Number(args[args.indexOf('--kill') + 1]) : -1;
  for (const { gpu, ranks, processes } of report.gpus) {
    const living = ranks.filter((/** @type {number} */ rank) => rank !== dies);
    assert.deepEqual(processes, living.length > 0 ? [living] : [], `ranks of GPU ${gpu} by process`);
  }
  assert.equal(report.pass, true);
  return report;
}

const line = ({ phases }) =>
  phases.map(({ phase, milliseconds }) => `${phase} ${milliseconds.toFixed(1)} ms`).join(', ');

function timesOf({ transfer, compute, together, hidden }) {
  assert.ok(transfer > 0 && compute > 0 && together > 0 && Number.isFinite(hidden));
  return `together ${together.toFixed(3)} ms, transfer ${transfer.toFixed(3)} ms, computing ${compute.toFixed(3)} ms, ${(100 * hidden).toFixed(0)} % hidden`;
}

const errorsOf = ({ errors }) =>
  errors.map(({ tensor, relative }) => `${tensor} ${relative.toExponential(2)}`).join(', ');

/** By what is to be shown of them; each throws unless its report is what it should be. */
const shows = {
  attention: (report) => `${errorsOf(report)}; ${line(report)}`,
  'attention --ping-pong': (report) => `${errorsOf(report)}; ${timesOf(report.turns)}`,
  moe: (report) => {
    assert.deepEqual(report.expertRows, { host: 0, cuda: report.tokens * report.topK });
    return `error ${report.error.relative.toExponential(2)}; ${line(report)}`;
  },
  'moe --ping-pong': (report) => {
    assert.equal(report.turns.differ, 0);
    return timesOf(report.turns);
  },
  'moe --kill 1': (report) => {
    const survivors = [...Array(report.ranks).keys()].filter((rank) => rank !== 1);
    const seen = report.losses.map(({ seenBy, rank, why }) => [seenBy, rank, why]);
    assert.deepEqual(
      seen,
      survivors.map((rank) => [rank, 1, 'EP_PEER_LOST']),
    );
    return `error ${report.error.relative.toExponential(2)}; ${line(report)}`;
  },
};

/** @param {Place} place @param {string} prefix @param {readonly (readonly [keyof typeof shows, string])[]} list @returns {readonly import('./cases.mjs').Case[]} */
const casesOf = (place, prefix, list) =>
  list.map(([job, options]) => ({
    name: `${prefix}ep demo ${job} ${options}`,
    run: async () => shows[job](await demo(place, [...job.split(' '), ...options.split(' ')])),
  }));

/** Ranks as streams of one GPU. */
export const demos = casesOf({ device: 'cuda:0', gpus: 1 }, '', [
  ['attention', '-n 1 --dtype f32'],
  ['attention', '-n 4 --dtype bf16'],
  ['attention', '-n 7 --dtype f32'],
  ['attention --ping-pong', '-n 1 --dtype f32'],
  ['attention --ping-pong', '-n 3 --dtype bf16'],
  ['moe', '-n 4 --mode low-latency --dtype bf16'],
  ['moe', '-n 3 --mode high-throughput --dtype fp8'],
  ['moe --ping-pong', '-n 4 --mode low-latency --dtype fp8'],
  ['moe --ping-pong', '-n 3 --mode high-throughput --dtype bf16'],
]);

/** A process on each of so many GPUs, of one rank and of two. @param {number} gpus */
export const severalDemos = (gpus) => {
  const device = `cuda:${[...Array(gpus).keys()].join(',')}`;
  return casesOf({ device, gpus }, 'several GPUs: ', [
    ['attention', `-n ${gpus} --dtype bf16`],
    ['attention', `-n ${2 * gpus} --dtype f32`],
    ['attention --ping-pong', `-n ${gpus} --dtype bf16`],
    ['attention --ping-pong', `-n ${gpus} --dtype f32`],
    ...['low-latency', 'high-throughput'].flatMap((mode) =>
      ['bf16', 'fp8'].flatMap((dtype) => [
        /** @type {const} */ (['moe', `-n ${gpus} --mode ${mode} --dtype ${dtype}`]),
        /** @type {const} */ (['moe --ping-pong', `-n ${gpus} --mode ${mode} --dtype ${dtype}`]),
      ]),
    ),
    ['attention --ping-pong', `-n ${2 * gpus} --dtype bf16`],
    ['moe', `-n ${2 * gpus} --mode low-latency --dtype bf16`],
    ['moe', `-n ${2 * gpus} --mode high-throughput --dtype fp8`],
    ['moe --ping-pong', `-n ${2 * gpus} --mode low-latency --dtype fp8`],
    ['moe --kill 1', `-n ${2 * gpus} --mode low-latency --dtype bf16`],
    ['moe --kill 1', `-n ${2 * gpus} --mode high-throughput --dtype bf16`],
    ['moe --kill 1', `-n ${gpus} --mode low-latency --dtype bf16`],
    ['moe --kill 1', `-n ${gpus} --mode high-throughput --dtype fp8`],
  ]);
};
