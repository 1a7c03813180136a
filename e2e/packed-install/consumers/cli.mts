// The installed `ep` says what works on this machine and runs two local ranks.
import { execFileSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { createProgram } from '@ep/cli';

const bin = fileURLToPath(new URL('../bin/ep.mjs', import.meta.resolve('@ep/cli')));
const ep = (...args: readonly string[]): string => execFileSync(process.execPath, [bin, ...args], { encoding: 'utf8' });

if (ep('--version').trim() !== createProgram().version()) throw new Error(`ep --version prints ${ep('--version')}`);
const report: unknown = JSON.parse(ep('doctor', '--json'));
if (typeof report !== 'object' || report === null) throw new Error(`ep doctor --json prints ${report}`);

const program = 'console.log(process.env.RANK, "of", process.env.WORLD_SIZE)';
const output = ep('run', '-n', '2', '--', process.execPath, '-e', program);
for (const expected of ['0 of 2', '1 of 2']) {
  if (!output.includes(expected)) throw new Error(`expected ${expected} among:\n${output}`);
}
console.log('used');
