/**
 * Programs that OpenSHMEM users know, said with @ep/nvshmem. What each follows:
 *
 * - `rotate`: C/rotput.c of openshmem-org/openshmem-examples
 * - `ring`: examples/ring_oshmem_c.c of Open MPI
 * - `relay`: example_code/shmem_put_signal_example.c of the OpenSHMEM specification
 * - `pi`: C/cpi.c of openshmem-org/openshmem-examples, which is the `cpi` of MPICH
 *
 *     ep run -n 4 -- node e2e/openshmem/examples.mjs
 */
import { openFileStore, readLaunchEnv } from '@ep/core';
import { shmemInit } from '@ep/nvshmem';

const CHUNKS = 200;
const STEPS_PER_CHUNK = 5_000;
const RECTANGLES = 10_000;

const nextOf = (shmem) => (shmem.myPe() + 1) % shmem.nPes();

/** Every PE tells its right neighbour that one's number. Returns what came. */
async function rotate(shmem) {
  const dest = await shmem.malloc('i32', 1);
  dest.local[0] = -1;
  await shmem.barrierAll();
  shmem.put(dest, Int32Array.of(nextOf(shmem)), nextOf(shmem));
  await shmem.barrierAll();
  const came = dest.local[0];
  await shmem.free(dest);
  return came;
}

/** A number goes round, by plain puts, and is one less each time that it passes PE 0; the laps end with 0. Returns all that this PE saw. */
async function ring(shmem) {
  const me = shmem.myPe();
  const inbox = await shmem.malloc('i32', 1);
  inbox.local[0] = -1;
  // The original's is a static variable: there before any PE runs.
  await shmem.barrierAll();
  const pass = (value) => shmem.put(inbox, Int32Array.of(value), nextOf(shmem));
  const seen = [];
  let message = 10;
  if (me === 0) pass(message);
  while (message > 0) {
    await shmem.waitUntil(inbox, 'eq', message);
    seen.push(inbox.local[0]);
    if (me === 0) message--;
    pass(message);
    if (me !== 0) message--;
  }
  await shmem.barrierAll();
  await shmem.free(inbox);
  return seen;
}

/** 16 KiB with a signal from neighbour to neighbour: each PE sends its own once those of its left neighbour are there, and PE 0 ends it. Returns whose came. */
async function relay(shmem) {
  const me = shmem.myPe();
  const data = await shmem.calloc('u64', 2 << 10);
  const arrived = await shmem.calloc('u64', 1);
  await shmem.barrierAll();
  const send = () =>
    shmem.putSignal(data, new BigUint64Array(2 << 10).fill(BigInt(me)), arrived, 1, 'set', nextOf(shmem));
  if (me === 0) send();
  await shmem.signalWaitUntil(arrived, 'eq', 1);
  const came = [...new Set(data.local)].map(Number);
  if (me !== 0) send();
  await shmem.barrierAll();
  for (const object of [arrived, data]) await shmem.free(object);
  return came;
}

const heightAt = (x) => 4 / (1 + x * x);

/** The area under 4 / (1 + x²) from 0 to 1, by the midpoint rule: every PE takes each nPes-th rectangle, and a reduction adds them up. PE 0 alone knows how many. */
async function pi(shmem) {
  const [given, count] = [await shmem.calloc('i32', 1), await shmem.calloc('i32', 1)];
  if (shmem.myPe() === 0) given.local[0] = RECTANGLES;
  await shmem.barrierAll();
  await shmem.broadcast(shmem.teamWorld, count, given, 1, 0);
  const width = 1 / count.local[0];
  const [mine, all] = [await shmem.malloc('f64', 1), await shmem.malloc('f64', 1)];
  let sum = 0;
  for (let i = shmem.myPe() + 1; i <= count.local[0]; i += shmem.nPes()) sum += heightAt(width * (i - 0.5));
  mine.local[0] = width * sum;
  await shmem.sumReduce(shmem.teamWorld, all, mine, 1);
  const found = all.local[0];
  for (const object of [all, mine, count, given]) await shmem.free(object);
  return found;
}

/** Ours: the same area, of which whoever is free takes the next chunk from PE 0's counter. */
async function piByCounter(shmem) {
  const counter = await shmem.calloc('u64', 1);
  const areas = await shmem.calloc('f64', CHUNKS);
  const done = await shmem.calloc('u64', 1);
  const width = 1 / (CHUNKS * STEPS_PER_CHUNK);
  let mine = 0;
  for (;;) {
    const chunk = Number(shmem.atomicFetchInc(counter, 0));
    if (chunk >= CHUNKS) break;
    let sum = 0;
    for (let i = chunk * STEPS_PER_CHUNK; i < (chunk + 1) * STEPS_PER_CHUNK; i++) {
      sum += heightAt((i + 0.5) * width);
    }
    shmem.putSignal(areas.subarray(chunk), Float64Array.of(sum * width), done, 1, 'add', 0);
    mine++;
  }
  // The chunks are added in their own order, so the result does not depend on who computed what.
  const result = await shmem.malloc('f64', 1);
  if (shmem.myPe() === 0) {
    await shmem.signalWaitUntil(done, 'eq', CHUNKS);
    result.local[0] = areas.local.reduce((sum, area) => sum + area, 0);
  }
  const everybody = await shmem.malloc('f64', 1);
  await shmem.broadcast(shmem.teamWorld, everybody, result, 1, 0);
  const work = await shmem.malloc('i32', 1);
  work.local[0] = mine;
  await shmem.sumReduce(shmem.teamWorld, work, work, 1);
  return { pi: everybody.local[0], chunks: work.local[0] };
}

const { rank, worldSize, store: address } = readLaunchEnv();
const store = await openFileStore(address.path);
const shmem = await shmemInit({ rank, worldSize, store }, { heapBytes: 1 << 16 });
const line = {
  rank,
  rotated: await rotate(shmem),
  laps: await ring(shmem),
  relayed: await relay(shmem),
  pi: await pi(shmem),
  byCounter: await piByCounter(shmem),
};
await shmem.finalize();
await store.close();
process.stdout.write(`${JSON.stringify(line)}\n`);
