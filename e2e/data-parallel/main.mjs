/**
 * Trains over some processes, and starts another one for each that is killed:
 *
 *     node e2e/data-parallel/main.mjs --ranks 4 --kill 2@8
 *
 * The store in which the ranks meet is in this process, which outlives them.
 */
import { spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import { text } from 'node:stream/consumers';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { openTcpStoreServer } from '@ep/core';
import { Narrator } from './narrator.mjs';

const RESTARTS = 3;
const PROGRAM = fileURLToPath(new URL('train.mjs', import.meta.url));

const { values } = parseArgs({
  options: {
    ranks: { type: 'string', default: '4' },
    steps: { type: 'string', default: '24' },
    hidden: { type: 'string', default: '64' },
    /** Samples of a shard in a step. */
    batch: { type: 'string', default: '8' },
    /** rank@step, or rank@step:inside to kill it in the middle of the all-reduce. */
    kill: { type: 'string', multiple: true, default: [] },
    /** Events on stdout, the log on stderr. */
    json: { type: 'boolean', default: false },
  },
});
const worldSize = Number(values.ranks);
const settings = { steps: Number(values.steps), hidden: Number(values.hidden), batch: Number(values.batch) };
const deaths = new Map(
  values.kill.map((given) => {
    const [, rank, step, moment = 'before'] = /^(\d+)@(\d+)(?::(before|inside))?$/.exec(given) ?? [];
    // The last survivor has nobody to go on with.
    if (!(rank < worldSize && step < settings.steps) || worldSize === 1) {
      throw new Error(
        `--kill ${given}: expected rank@step or rank@step:inside, rank < --ranks (at least 2), step < --steps`,
      );
    }
    return [Number(rank), { step: Number(step), moment }];
  }),
);

const log = (line) => (values.json ? process.stderr : process.stdout).write(`${line}\n`);
const narrator = new Narrator(log, worldSize);
const server = await openTcpStoreServer({ port: 0 });
const children = new Set();
let restarts = 0;
let left = worldSize;
let failed = false;

function hear(event) {
  if (values.json) process.stdout.write(`${JSON.stringify(event)}\n`);
  narrator.hear(event);
}

function start(rank, isReplacement) {
  const death = isReplacement ? undefined : deaths.get(rank);
  const task = { rank, worldSize, port: server.port, isReplacement, death, ...settings };
  const child = spawn(process.execPath, [PROGRAM, JSON.stringify(task)], {
    stdio: ['ignore', 'pipe', 'inherit', 'pipe'],
  });
  children.add(child);
  hear({ event: 'started', rank, pid: child.pid });
  createInterface({ input: child.stdout }).on('line', (line) => hear({ rank, ...JSON.parse(line) }));
  child.once('exit', async (code, signal) => {
    children.delete(child);
    const testament = (await text(child.stdio[3])).trim().split('\n').at(-1);
    hear({ event: 'ended', rank, pid: child.pid, code, signal });
    if (code === 0) {
      left--;
      if (left === 0) await server.close();
    } else if (signal === 'SIGKILL' && !failed && restarts < RESTARTS) {
      restarts++;
      hear({ event: 'died', rank, ...(testament && JSON.parse(testament)) });
      start(rank, true);
    } else {
      await giveUp(`rank ${rank} ended with ${signal ?? `status ${code}`}`);
    }
  });
}

async function giveUp(why) {
  if (failed) return;
  failed = true;
  log(why);
  for (const child of children) child.kill('SIGKILL');
  await server.close();
}

for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => giveUp(`ended by ${signal}`));
process.once('exit', () => {
  if (failed || !narrator.agreed) process.exitCode = 1;
});
for (let rank = 0; rank < worldSize; rank++) start(rank, false);
