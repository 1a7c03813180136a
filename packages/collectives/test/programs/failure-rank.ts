/** One rank of a failure scenario, a process: makes calls until the victims among the ranks have died and the survivors have gone on, and says how each ended. */
import { once } from 'node:events';
import { writeSync } from 'node:fs';
import { Worker } from 'node:worker_threads';
import { CloseScope, isEpError, openFileStore, prefixStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import { initProcessGroup, type ProcessGroup } from '../../src/index.js';
import { type PostedCall, postCall } from '../failure/calls.js';
import {
  CALLS_AFTER,
  CALLS_BEFORE,
  type CallEnd,
  type FromRank,
  MOST_CALLS,
  QUEUE_LENGTH,
  type RankArguments,
} from '../failure/protocol.js';

const HUNG_MS = 15_000;
const { rank, storePath, scenario, length } = JSON.parse(process.argv[2]!) as RankArguments;
const { backend, operation, moment, victims, worldSize, delayMs } = scenario;
const amVictim = victims.includes(rank);

const now = (): string => String(process.hrtime.bigint());
const tell = (message: FromRank): boolean => process.send!(message);

/** A pipe to the scenario that is written at once, also by a process that is gone in the next moment. */
const DEATH_PIPE = 3;

function dieNow(): never {
  writeSync(DEATH_PIPE, now());
  process.kill(process.pid, 'SIGKILL');
  throw new Error('still alive');
}

/** Kills the process from a thread of its own: the main thread may be busy inside the engine. Resolves when that thread waits for the word. */
async function startKiller(): Promise<() => void> {
  const fire = new Int32Array(new SharedArrayBuffer(4));
  const program = `
    const { parentPort, workerData: { fire, delayMs, pipe } } = require('node:worker_threads');
    parentPort.postMessage('up');
    Atomics.wait(fire, 0, 0);
    const until = performance.now() + delayMs;
    if (delayMs > 2) Atomics.wait(fire, 0, 1, delayMs - 1);
    while (performance.now() < until);
    require('node:fs').writeSync(pipe, String(process.hrtime.bigint()));
    process.kill(process.pid, 'SIGKILL');
  `;
  const worker = new Worker(program, { eval: true, workerData: { fire, delayMs, pipe: DEATH_PIPE } });
  await once(worker, 'message');
  worker.unref();
  return () => {
    Atomics.store(fire, 0, 1);
    Atomics.notify(fire, 0);
  };
}

/** Who takes part, by what calls have told so far: the same on all survivors, or else their ends differ, which the scenario finds. */
let active: readonly number[] = Array.from({ length: worldSize }, (_, one) => one);
let calls = 0;

function post(group: ProcessGroup): PostedCall {
  const call = calls++;
  return postCall(group, operation, { length, call, root: active[call % active.length]!, timeoutMs: HUNG_MS });
}

async function endOf({ work, check }: PostedCall): Promise<CallEnd> {
  try {
    await work;
  } catch (error) {
    if (!isEpError(error) || error.code !== 'EP_PEER_LOST') throw error;
    const lost = error.context.lost as readonly number[];
    active = active.filter((one) => !lost.includes(one));
    return { end: 'lost', lost, at: now() };
  }
  const at = now();
  check(work.contributors);
  active = active.filter((one) => work.contributors.includes(one));
  return { end: 'done', contributors: [...work.contributors], at };
}

async function makeCalls(group: ProcessGroup): Promise<readonly CallEnd[]> {
  const ends: CallEnd[] = [];
  for (let call = 0; call < CALLS_BEFORE; call++) ends.push(await endOf(post(group)));
  // The call at which they die.
  const delayed = moment === 'inside' || moment === 'chunks' || moment === 'queue';
  const fire = amVictim && delayed ? await startKiller() : undefined;
  if (amVictim && moment === 'before') dieNow();
  fire?.();
  if (moment === 'queue') {
    const queue = Array.from({ length: QUEUE_LENGTH }, () => post(group));
    for (const posted of queue) ends.push(await endOf(posted));
  } else {
    const posted = post(group);
    if (amVictim && moment === 'posted') dieNow();
    ends.push(await endOf(posted));
    if (amVictim && moment === 'after') dieNow();
  }
  // The victims go on with the others until they are dead, the others until they have gone on without them.
  let after = 0;
  while (amVictim || (ends.length < MOST_CALLS && after < CALLS_AFTER)) {
    ends.push(await endOf(post(group)));
    if (active.every((one) => !victims.includes(one))) after++;
  }
  return ends;
}

async function openGroup(scope: CloseScope): Promise<ProcessGroup> {
  const store = scope.add(await openFileStore(storePath));
  const options = { store: prefixStore(store, 'group'), rank, worldSize, timeoutMs: HUNG_MS };
  if (backend === 'shm') return scope.add(await initProcessGroup({ backend, ...options }));
  const member = { rank, worldSize, store: prefixStore(store, 'transport') };
  const transport = scope.add(await nvshmem.shm.open(member, { signal: new AbortController().signal }));
  return scope.add(await initProcessGroup({ backend: transport, ...options }));
}

const scope = new CloseScope();
try {
  const group = await openGroup(scope);
  await group.barrier();
  tell({ kind: 'ready' });
  const ends = await makeCalls(group);
  await scope.close();
  tell({ kind: 'ended', calls: ends });
} catch (error) {
  tell({ kind: 'failed', why: error instanceof Error ? (error.stack ?? error.message) : String(error) });
}
process.disconnect();
