/** Point to point. */
import { tensor } from '@ep/core';
import { expect, test } from 'vitest';
import { failure, openWorld, turn } from './world.js';

const f = (...values: number[]): Float32Array => Float32Array.from(values);

test('a ring: everybody sends to the next and receives from the one before', async () => {
  const { each } = await openWorld(4);
  await each(async (group, rank) => {
    const data = f(0);
    const works = group.batchIsendIrecv([
      { op: 'send', tensor: f(rank), peer: (rank + 1) % 4 },
      { op: 'recv', tensor: data, peer: (rank + 3) % 4 },
    ]);
    expect(works.map(({ op }) => op)).toEqual(['batchIsendIrecv', 'batchIsendIrecv']);
    await Promise.all(works);
    expect(data[0]).toBe((rank + 3) % 4);
  });
});

test('messages of one tag come in the order in which they were sent, those of another tag apart', async () => {
  const { groups } = await openWorld(2);
  const [from, to] = groups;
  const sends = [f(1), f(2), f(3)].map((data, i) => from!.send(data, 1, { tag: i === 1 ? 9 : 0 }));
  const [a, b, c] = [f(0), f(0), f(0)];
  await to!.recv(c, 0, { tag: 9 });
  await to!.recv(a, 0);
  await to!.recv(b, 0);
  await Promise.all(sends);
  expect([a[0], b[0], c[0]]).toEqual([1, 3, 2]);
});

test('recvAnySource says from whom, and recv how much came', async () => {
  const { groups } = await openWorld(3);
  const data = tensor('i64', [4]);
  const receiving = groups[0]!.recvAnySource(data, { tag: 1 });
  await groups[2]!.send(BigInt64Array.of(5n, 6n), 0, { tag: 1 });
  expect(await receiving).toEqual({ source: 2, byteLength: 16 });
  expect([...data.data]).toEqual([5n, 6n, 0n, 0n]);
});

test('a batch receives from any where it names no peer', async () => {
  const { groups } = await openWorld(2);
  const data = f(0);
  const [work] = groups[0]!.batchIsendIrecv([{ op: 'recv', tensor: data, tag: 3 }]);
  await groups[1]!.send(f(8), 0, { tag: 3 });
  expect(await work).toEqual({ source: 1, byteLength: 4 });
});

test('a rank sends to itself, and sends nothing', async () => {
  const { groups } = await openWorld(1);
  const data = f(0);
  const sends = [groups[0]!.send(f(4), 0), groups[0]!.send(f(), 0)];
  await groups[0]!.recv(data, 0);
  expect(await groups[0]!.recv(data, 0)).toEqual({ source: 0, byteLength: 0 });
  await Promise.all(sends);
  expect(data[0]).toBe(4);
});

test('messages do not wait for collectives, nor collectives for messages', async () => {
  const { groups } = await openWorld(2);
  const waiting = groups[0]!.barrier();
  const receiving = groups[0]!.recv(f(0), 1, { tag: 1 });
  const data = f(0);
  const [, end] = await Promise.all([groups[1]!.send(f(2), 0), groups[0]!.recv(data, 1)]);
  expect(end).toEqual({ source: 1, byteLength: 4 });
  expect([waiting.status, receiving.status]).toEqual(['pending', 'pending']);
  await groups[1]!.barrier();
  await waiting;
  expect(receiving.status).toBe('pending');
  await groups[1]!.send(f(2), 0, { tag: 1 });
  await receiving;
});

test('a message longer than its receive fails both, and no other', async () => {
  const { groups } = await openWorld(2);
  const sending = groups[0]!.send(f(1, 2, 3), 1);
  const error = await failure('EP_MISMATCH', () => groups[1]!.recv(f(0), 0));
  expect(error.context.ranks).toEqual([0, 1]);
  await failure('EP_MISMATCH', () => sending);
  await Promise.all(groups.map((group) => group.barrier()));
});

test('a send to a rank that died, and a receive from it, name it', async () => {
  const { memory, groups } = await openWorld(3);
  const receiving = groups[0]!.recv(f(0), 2);
  memory.kill(2);
  for (const work of [receiving, groups[1]!.send(f(1), 2)]) {
    const error = await failure('EP_PEER_LOST', () => work);
    expect(error.context.lost).toEqual([2]);
  }
});

test('a receive is cut off by its signal, and by its deadline', async () => {
  const { groups } = await openWorld(2);
  const controller = new AbortController();
  const cut = groups[0]!.recv(f(0), 1, { signal: controller.signal });
  await turn();
  controller.abort();
  await expect(cut).rejects.toBe(controller.signal.reason);
  expect(cut.status).toBe('aborted');
  const late = groups[0]!.recv(f(0), 1, { timeoutMs: 5 });
  expect((await failure('EP_TIMEOUT', () => late)).context.awaited).toEqual([1]);
  // Neither takes what comes later.
  const data = f(0);
  await Promise.all([groups[1]!.send(f(6), 0), groups[0]!.recv(data, 1)]);
  expect(data[0]).toBe(6);
});

test('messages count on their own: collectives keep their numbers', async () => {
  const { groups } = await openWorld(1);
  const works = [groups[0]!.send(f(1), 0), groups[0]!.recv(f(0), 0), groups[0]!.barrier()];
  await Promise.all(works);
  expect(works.map(({ sequence }) => sequence)).toEqual([1, 2, 1]);
});
