/** One rank of the process groups of `ep bench fabric`. After each turn one more call is compared element by element. */
import { initProcessGroup } from '@ep/collectives';
import { compose, openFileStore, prefixStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import type { GroupCall, GroupTask, GroupTimes } from './groups-task.js';

const {
  store: path,
  rank,
  worldSize,
  address,
  ranksOnHost,
  hosts,
  warmUp,
  turns,
  calls,
} = JSON.parse(process.argv[2]!) as GroupTask;
const timeoutMs = 60_000;
const store = await openFileStore(path);
const { signal } = new AbortController();
const fabric = await nvshmem.fabric.open(
  { rank, worldSize, store: prefixStore(store, 'fabric') },
  { signal, config: { address, ranksOnHost, timeoutMs } },
);
const shm = await nvshmem.shm.open(
  { rank, worldSize, store: prefixStore(store, 'shm') },
  { signal, config: { hosts, ranksOnHost, timeoutMs } },
);
const transport = compose([shm, fabric]);
const group = await initProcessGroup({ backend: transport, store: prefixStore(store, 'group'), timeoutMs });

/** Small numbers: sums are exact in any order. */
const elementOf = (source: number, i: number): number => (i % 1009) * (source + 1);

async function check(call: GroupCall, input: Float32Array, output: Float32Array): Promise<void> {
  const { op } = call;
  for (let i = 0; i < input.length; i++) input[i] = elementOf(rank, i);
  output.fill(-1);
  const block = input.length / worldSize;
  const factor = (worldSize * (worldSize + 1)) / 2;
  const expected =
    op === 'all-reduce'
      ? (i: number): number => (i % 1009) * factor
      : (i: number): number => elementOf(Math.floor(i / block), rank * block + (i % block));
  await make(call, input, output);
  const found = op === 'all-reduce' ? input : output;
  const wrong = found.findIndex((value, i) => value !== expected(i));
  if (wrong >= 0) throw new Error(`${op} of ${input.byteLength} bytes: element ${wrong} is ${found[wrong]}`);
  // What is timed is summed up again and again, and stays what it is.
  input.fill(0);
}

const make = ({ op }: GroupCall, input: Float32Array, output: Float32Array): PromiseLike<unknown> =>
  op === 'all-reduce' ? group.allReduce(input, { op: 'sum' }) : group.allToAllSingle(output, input);

/** What is summed says whether some rank's time is over, so that all stop alike. */
const over = new Float32Array(2);
const warmBegin = performance.now();
for (let i = 0; i < warmUp.calls && over[0] === 0; i++) {
  over.fill(performance.now() - warmBegin > warmUp.ms ? 1 : 0);
  await group.allReduce(over, { op: 'sum' });
  // A turn has some: what is compiled without them is compiled anew then.
  if (i % 1000 === 0) await group.barrier();
}

/** More than goes with the word of what is called. */
const LONGER_BYTES = 4096;
for (const call of calls) {
  if (call.bytes < LONGER_BYTES) continue;
  const [input, output] = [new Float32Array(LONGER_BYTES / 4), new Float32Array(LONGER_BYTES / 4)];
  const begin = performance.now();
  over.fill(0);
  for (let i = 0; i < warmUp.longer && over[0] === 0; i++) {
    await make(call, input, output);
    if (i % 100 > 0) continue;
    over.fill(performance.now() - begin > warmUp.ms ? 1 : 0);
    await group.allReduce(over, { op: 'sum' });
  }
  await group.barrier();
  await check(call, input, output);
}

const times: number[][] = calls.map(() => []);
for (const [at, call] of calls.entries()) {
  const input = new Float32Array(call.bytes / 4);
  const output = new Float32Array(call.op === 'all-to-all' ? input.length : 0);
  for (let turn = -warmUp.turns; turn < turns; turn++) {
    await group.barrier();
    const begin = performance.now();
    for (let i = 0; i < call.calls; i++) await make(call, input, output);
    const us = ((performance.now() - begin) * 1000) / call.calls;
    // HAZARD: where ranks share a core, one that fills its arrays keeps it from another whose turn has not ended. Open MPI's find the slowest of all first, too.
    await group.barrier();
    await check(call, input, output);
    if (turn >= 0) times[at]!.push(us);
  }
}
await group.destroy();
await transport.close();
await store.close();
process.stdout.write(`${JSON.stringify(times satisfies GroupTimes)}\n`);
