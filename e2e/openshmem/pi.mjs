/**
 * Three programs that every OpenSHMEM tutorial has, in one: put to the neighbour, the largest number by a token that goes round, and pi from work that
 * is handed out by an atomic counter.
 *
 *     ep run -n 4 -- node e2e/openshmem/pi.mjs
 */
import { openFileStore, readLaunchEnv } from '@ep/core';
import { shmemInit } from '@ep/nvshmem';

const CHUNKS = 200;
const STEPS_PER_CHUNK = 5_000;

/** What a PE brings to the contest for the largest number. */
const bidOf = (pe) => (pe * 7919) % 1009;

/** Every PE sends its number to the next one. Returns what came. */
async function rotate(shmem) {
  const me = shmem.myPe();
  const next = (me + 1) % shmem.nPes();
  const from = await shmem.malloc('i64', 1);
  shmem.p(from, BigInt(me), next);
  await shmem.barrierAll();
  const came = Number(from.local[0]);
  await shmem.free(from);
  return came;
}

/** A token passes every PE and grows to the largest bid; PE 0 then tells all. No PE waits for anybody but its left neighbour. */
async function largest(shmem) {
  const me = shmem.myPe();
  const n = shmem.nPes();
  const token = await shmem.calloc('i32', 1);
  const here = await shmem.calloc('u64', 1);
  const pass = (value) => shmem.putSignal(token, Int32Array.of(value), here, 1, 'add', (me + 1) % n);
  if (me === 0) pass(bidOf(me));
  await shmem.signalWaitUntil(here, 'ge', 1);
  if (me !== 0) pass(Math.max(token.local[0], bidOf(me)));
  const winner = await shmem.malloc('i32', 1);
  await shmem.broadcast(shmem.teamWorld, winner, token, 1, 0);
  const found = winner.local[0];
  for (const object of [winner, here, token]) await shmem.free(object);
  return found;
}

/** The area under 4 / (1 + x²) from 0 to 1, by the midpoint rule. Whoever is free takes the next chunk from PE 0's counter. */
async function pi(shmem) {
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
      const x = (i + 0.5) * width;
      sum += 4 / (1 + x * x);
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
const came = await rotate(shmem);
const winner = await largest(shmem);
const result = await pi(shmem);
await shmem.finalize();
await store.close();
process.stdout.write(`${JSON.stringify({ rank, came, winner, ...result })}\n`);
