// The whole main jobs as a user runs them: `ep demo … --device cuda`, which compares with what the host computes and says PASS or FAIL.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

const run = promisify(execFile);
const ep = fileURLToPath(new URL('../../packages/cli/bin/ep.mjs', import.meta.url));
const root = fileURLToPath(new URL('../..', import.meta.url));

/** The report. Throws with what the program printed. @param {readonly string[]} args */
async function demo(...args) {
  const { stdout } = await run(process.execPath, [
    ...[ep, 'demo', ...args, '--device', 'cuda', '--small', '--no-svg', '--json', '--from', root],
  ]).catch((error) => {
    throw new Error(`ep demo ${args.join(' ')}: ${error.message}\n${error.stdout}`);
  });
  return JSON.parse(stdout);
}

const line = ({ phases }) =>
  phases.map(({ phase, milliseconds }) => `${phase} ${milliseconds.toFixed(1)} ms`).join(', ');

/** @type {readonly import('./cases.mjs').Case[]} */
export const demos = [
  ...[
    ['-n', '1', '--dtype', 'f32'],
    ['-n', '4', '--dtype', 'bf16'],
    ['-n', '7', '--dtype', 'f32'],
  ].map((args) => ({
    name: `ep demo attention ${args.join(' ')}`,
    run: async () => {
      const report = await demo('attention', ...args);
      assert.equal(report.pass, true);
      return `${report.errors.map(({ tensor, relative }) => `${tensor} ${relative.toExponential(2)}`).join(', ')}; ${line(report)}`;
    },
  })),
  ...[
    ['-n', '1', '--dtype', 'f32'],
    ['-n', '3', '--dtype', 'bf16'],
  ].map((args) => ({
    name: `ep demo attention --ping-pong ${args.join(' ')}`,
    run: async () => {
      const { pass, errors, turns } = await demo('attention', '--ping-pong', ...args);
      assert.equal(pass, true);
      const { transfer, compute, together, hidden } = turns;
      assert.ok(transfer > 0 && compute > 0 && together > 0 && Number.isFinite(hidden));
      const times = `together ${together.toFixed(3)} ms, transfer ${transfer.toFixed(3)} ms, attention ${compute.toFixed(3)} ms`;
      return `${errors.map(({ tensor, relative }) => `${tensor} ${relative.toExponential(2)}`).join(', ')}; ${times}, ${(100 * hidden).toFixed(0)} % hidden`;
    },
  })),
  ...[
    ['-n', '4', '--mode', 'low-latency', '--dtype', 'bf16'],
    ['-n', '3', '--mode', 'high-throughput', '--dtype', 'fp8'],
  ].map((args) => ({
    name: `ep demo moe ${args.join(' ')}`,
    run: async () => {
      const report = await demo('moe', ...args);
      assert.equal(report.pass, true);
      assert.deepEqual(report.expertRows, { host: 0, cuda: report.tokens * report.topK });
      return `error ${report.error.relative.toExponential(2)}; ${line(report)}`;
    },
  })),
  ...[
    ['-n', '4', '--mode', 'low-latency', '--dtype', 'fp8'],
    ['-n', '3', '--mode', 'high-throughput', '--dtype', 'bf16'],
  ].map((args) => ({
    name: `ep demo moe --ping-pong ${args.join(' ')}`,
    run: async () => {
      const { pass, turns } = await demo('moe', '--ping-pong', ...args);
      assert.equal(pass, true);
      const { transfer, compute, together, hidden, differ } = turns;
      assert.equal(differ, 0);
      assert.ok(transfer > 0 && compute > 0 && together > 0 && Number.isFinite(hidden));
      return `together ${together.toFixed(3)} ms, calls ${transfer.toFixed(3)} ms, experts ${compute.toFixed(3)} ms, ${(100 * hidden).toFixed(0)} % hidden`;
    },
  })),
];
