/** A little of everything among very many PEs: a ring of signalled puts, an all-to-all, a sum. Returns the sum of all PE numbers. */
import assert from 'node:assert/strict';
import { runShmem } from './rank.mjs';

await runShmem(async (shmem) => {
  const me = shmem.myPe();
  const size = shmem.nPes();
  const token = await shmem.calloc('i32', 1);
  const arrived = await shmem.calloc('u64', 1);
  const next = (me + 1) % size;
  if (me === 0) shmem.putSignal(token, Int32Array.of(1), arrived, 1, 'add', next);
  await shmem.signalWaitUntil(arrived, 'ge', 1);
  if (me === 0) assert.equal(token.local[0], size);
  else shmem.putSignal(token, Int32Array.of(token.local[0] + 1), arrived, 1, 'add', next);
  const source = await shmem.malloc('i32', size);
  const dest = await shmem.malloc('i32', size);
  source.local.forEach((_, pe, all) => {
    all[pe] = me * size + pe;
  });
  await shmem.alltoall(shmem.teamWorld, dest, source, 1);
  for (const [pe, value] of dest.local.entries()) assert.equal(value, pe * size + me);
  source.local[0] = me;
  await shmem.sumReduce(shmem.teamWorld, dest, source, 1);
  return dest.local[0];
}, 1 << 14);
