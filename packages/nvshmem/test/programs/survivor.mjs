/** One rank is killed while all wait for it, or for each other, in the way that `args.wait` names. Survivors report how their wait ended. */
import assert from 'node:assert/strict';
import { shmemInit } from '@ep/nvshmem';
import { generator, runRank } from './rank.mjs';

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

await runRank(async ({ rank, worldSize, store, args, note }) => {
  const shmem = await shmemInit({ rank, worldSize, store }, { heapBytes: 1 << 16, timeoutMs: 60_000 });
  const word = await shmem.calloc('u64', 4);
  const pad = await shmem.transport.allocate({ byteLength: 64, signalSlots: 1 });
  const team = await shmem.teamWorld.splitStrided(worldSize - 1, -1, worldSize);
  await shmem.barrierAll();
  note('ready');
  const waits = {
    barrier: () => shmem.barrierAll(),
    team: () => team.sync(),
    word: () => shmem.waitUntil(word, 'ne', 0),
    peer: () => shmem.waitUntil(word, 'ne', 0, { peers: [args.victim] }),
    // Not its last element: a survivor that is through writes to that, below.
    some: () => shmem.waitUntilSome(word.subarray(0, 3), 'ne', 0),
    signal: () => shmem.signalWaitUntil(word, 'gt', 5),
    pad: () => pad.signals.until(0, { cmp: 'ge', value: 1n }),
    malloc: () => shmem.malloc('u8', 8),
    collective: () => shmem.sumReduce(shmem.teamWorld, word, word, 1),
    // Killed at any moment of barriers that follow each other as fast as they can.
    storm: async () => {
      for (;;) await shmem.barrierAll();
    },
    gathers: async () => {
      for (;;) await shmem.fcollect(shmem.teamWorld, word, word, 1);
    },
  };
  const moves = args.wait === 'storm' || args.wait === 'gathers';
  if (rank === args.victim && !moves) {
    await pause(60_000);
  }
  let error;
  try {
    // Some are already asleep when it happens, some come later.
    if (!moves) await pause(generator(args.seed + rank).below(3));
    await waits[args.wait]();
  } catch (thrown) {
    error = thrown;
  }
  assert.ok(error, 'the wait ended well');
  assert.equal(error.code, 'EP_PEER_LOST', error.stack);
  assert.deepEqual(error.context.lost, [args.victim]);
  assert.match(error.message, new RegExp(`rank ${args.victim}`));
  assert.ok(shmem.transport.failed.aborted);
  assert.deepEqual(shmem.transport.lostRanks(), [args.victim]);
  // It stays so, for every kind of call, and closing is possible.
  await assert.rejects(shmem.barrierAll(), { code: 'EP_PEER_LOST' });
  await assert.rejects(shmem.waitUntil(word, 'eq', 77), { code: 'EP_PEER_LOST' });
  const endpoint = await shmem.transport.connect(args.victim);
  await assert.rejects(endpoint.flush(), { code: 'EP_PEER_LOST' });
  // What does not depend on the dead goes on: this rank can wait for another one.
  const other = (rank + 1) % worldSize === args.victim ? (rank + 2) % worldSize : (rank + 1) % worldSize;
  shmem.atomicSet(word.subarray(3), BigInt(rank + 1), other);
  await shmem.waitUntil(word.subarray(3), 'ne', 0, { peers: [] });
  await assert.rejects(shmem.finalize(), { code: 'EP_PEER_LOST' });
  return error.code;
});
