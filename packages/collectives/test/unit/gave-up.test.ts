/** What ranks of a group in shared memory are told of a call that others have given up, or have gone on without. */
import { memoryStore } from '@ep/core';
import { expect, onTestFinished, test } from 'vitest';
import { initProcessGroup, type ProcessGroup } from '../../src/index.js';
import { failure } from './world.js';

async function openGroups(worldSize: number): Promise<readonly ProcessGroup[]> {
  const store = memoryStore();
  const groups = await Promise.all(
    Array.from({ length: worldSize }, (_, rank) =>
      initProcessGroup({ backend: 'shm', store, rank, worldSize, timeoutMs: 20_000 }),
    ),
  );
  onTestFinished(async () => {
    await Promise.all(groups.map((group) => group.close()));
    await store.close();
  });
  await Promise.all(groups.map(async (group) => await group.barrier()));
  return groups;
}

const one = () => Float32Array.of(1);

test('names who gave a call up first, also to those that hear of it from another rank', async () => {
  const groups = await openGroups(4);
  const abort = new AbortController();
  const own = groups[2]!.allReduce(one(), { signal: abort.signal }).then(
    () => expect.fail('it was given up'),
    () => undefined,
  );
  const others = [0, 1].map((rank) => failure('EP_ABORTED', () => groups[rank]!.allReduce(one())));
  abort.abort(new Error('enough'));
  await own;
  for (const error of await Promise.all(others)) expect(error.context.ranks).toEqual([2]);
  await groups[3]!.allReduce(one()); // all that it needs had come
  const late = await failure('EP_ABORTED', () => groups[3]!.barrier());
  expect(late.context.ranks).toEqual([2]);
});

test('a call to a root that is lost ends alike where others have agreed anew meanwhile', async () => {
  const groups = await openGroups(3);
  await groups[2]!.close();
  const isLost = async (call: () => unknown) => expect((await failure('EP_PEER_LOST', call)).context.lost).toEqual([2]);
  await Promise.all([0, 1].map((rank) => isLost(() => groups[rank]!.barrier())));
  await isLost(() => groups[0]!.broadcast(one(), { root: 2 }));
  const agreed = groups[0]!.deactivate([2]);
  await new Promise((resolve) => setTimeout(resolve, 100));
  await isLost(() => groups[1]!.broadcast(one(), { root: 2 }));
  await Promise.all([agreed, groups[1]!.deactivate([2])]);
  await Promise.all([0, 1].map(async (rank) => await groups[rank]!.barrier()));
});

test('messages of a rank that was taken out end with that', async () => {
  const groups = await openGroups(3);
  const out = groups[2]!;
  const posted = [
    failure('EP_EVICTED', () => out.recv(one(), 0)),
    failure('EP_EVICTED', () => out.send(one(), 1)),
    failure('EP_EVICTED', () => out.recvAnySource(one())),
  ];
  await Promise.all([0, 1].map((rank) => groups[rank]!.deactivate([2])));
  await Promise.all(posted);
  await failure('EP_EVICTED', () => out.send(one(), 0));
});
