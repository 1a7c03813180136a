/** What is easy to miss of ranks over shared memory: lengths that are refused, a rank that nobody takes in, arrays of shared buffers. */
import { memoryStore } from '@ep/core';
import { expect, onTestFinished, test } from 'vitest';
import { initProcessGroup, type ProcessGroup } from '../../src/index.js';
import { failure } from './world.js';

test('a length that is refused takes nothing of group memory', async () => {
  const group = await initProcessGroup({ backend: 'shm', store: memoryStore(), rank: 0, worldSize: 1 });
  onTestFinished(() => group.destroy());
  const before = group.allocate('f32', 1000);
  before.data.fill(1);
  for (const length of [-1000, 0.5, Number.NaN, undefined as never]) {
    expect(() => group.allocate('f32', length)).toThrow('length must be a safe integer of at least 0');
  }
  const behind = group.allocate('f32', 1000);
  behind.data.fill(2);
  expect(before.data.every((one) => one === 1)).toBe(true);
});

test('a rank that waits to be taken in waits once, and closes while it does', async () => {
  const store = memoryStore();
  const shared = { backend: 'shm', store, worldSize: 1, maxGroupSize: 2, timeoutMs: 20_000 } as const;
  const [member, group] = await Promise.all([
    initProcessGroup({ ...shared, rank: 0 }),
    initProcessGroup({ ...shared, rank: 1, isExtension: true }),
  ]);
  onTestFinished(() => member.destroy());
  const waiting = failure('EP_CLOSED', () => group.joinGroup({ timeoutMs: 20_000 }));
  await failure('EP_BUSY', () => group.joinGroup({ timeoutMs: 20_000 }));
  expect(() => group.barrier()).toThrow('joinGroup()'); // it still waits
  await group.destroy();
  await waiting;
});

test('arrays of a SharedArrayBuffer are as good as others', async () => {
  const store = memoryStore();
  const open = (rank: number) => initProcessGroup({ backend: 'shm', store, rank, worldSize: 2, timeoutMs: 20_000 });
  const groups = await Promise.all([open(0), open(1)]);
  onTestFinished(async () => void (await Promise.all(groups.map((group) => group.destroy()))));
  for (const length of [3, 100_000]) {
    const arrays = [new Float32Array(new SharedArrayBuffer(4 * length)).fill(1), new Float32Array(length).fill(2)];
    await Promise.all(groups.map((group, rank) => group.allReduce(arrays[rank]!)));
    for (const array of arrays) expect(array.every((one) => one === 3)).toBe(true);
    await Promise.all([groups[0]!.send(arrays[0]!, 1), groups[1]!.recv(arrays[1]!, 0)]);
  }
});

test('a group made from one that lost a rank goes on without it, also where that is lost before it opens its side', async () => {
  for (const when of ['before', 'meanwhile'] as const) {
    const store = memoryStore();
    const open = (rank: number) => initProcessGroup({ backend: 'shm', store, rank, worldSize: 3, timeoutMs: 20_000 });
    const groups = await Promise.all([open(0), open(1), open(2)]);
    const left = groups.slice(0, 2);
    onTestFinished(async () => void (await Promise.all(left.map((group) => group.destroy()))));
    await Promise.all(groups.map((group) => group.barrier()));
    if (when === 'before') {
      await groups[2]!.destroy();
      await Promise.allSettled(left.map((group) => group.barrier()));
    }
    const making = left.map((group) => group.newGroup([0, 1, 2]));
    if (when === 'meanwhile') {
      // What newGroup() exchanges first; then it is gone.
      const outputs = [0, 1, 2].map(() => new Int32Array(6));
      await groups[2]!.allGather(outputs, Int32Array.of(1, 0, 3, 0, 1, 2));
      await groups[2]!.destroy();
    }
    const made = await Promise.all(making);
    const works = made.map((group) => group!.barrier({ timeoutMs: 10_000 }));
    await Promise.all(works);
    for (const work of works) expect(work.contributors).toEqual([0, 1]);
    for (const group of made) expect(group!.activeRanks).toEqual([0, 1]);
    if (when === 'meanwhile') {
      expect(made[0]!.connections()[2]).toMatchObject({
        rank: 2,
        state: 'lost',
        detail: expect.stringContaining('before it opened this one'),
      });
    }
  }
});

test('an array that is transferred while an operation uses it is EP_DETACHED, and the others go on', async () => {
  const store = memoryStore();
  const open = (rank: number) => initProcessGroup({ backend: 'shm', store, rank, worldSize: 2, timeoutMs: 20_000 });
  const groups = await Promise.all([open(0), open(1)]);
  onTestFinished(async () => void (await Promise.all(groups.map((group) => group.destroy()))));
  await Promise.all(groups.map((group) => group.barrier()));
  const takeAway = (data: Float32Array<ArrayBuffer>) => structuredClone(data, { transfer: [data.buffer] });
  const data = new Float32Array(100_000).fill(1);
  const reducing = groups[0]!.allReduce(data);
  takeAway(data);
  const other = new Float32Array(100_000).fill(2);
  await groups[1]!.allReduce(other);
  expect(other.every((one) => one === 3)).toBe(true);
  const detached = await failure('EP_DETACHED', () => reducing);
  expect(detached.message).toContain('the buffer of the Float32Array was detached or transferred');
  const target = new Float32Array(100_000);
  const receiving = groups[0]!.recv(target, 1);
  takeAway(target);
  await groups[1]!.send(other, 0);
  await failure('EP_DETACHED', () => receiving);
  await Promise.all(groups.map((group) => group.barrier()));
});

test('says which changes of who takes part differ, and of whom', async () => {
  const store = memoryStore();
  const open = (rank: number) =>
    initProcessGroup({ backend: 'shm', store, rank, worldSize: 3, maxGroupSize: 5, timeoutMs: 20_000 });
  const groups = await Promise.all([open(0), open(1), open(2)]);
  onTestFinished(async () => void (await Promise.allSettled(groups.map((group) => group.destroy()))));
  const told = async (call: (group: ProcessGroup, rank: number) => PromiseLike<unknown>) => {
    const errors = await Promise.all(groups.map((group, rank) => failure('EP_MISMATCH', () => call(group, rank))));
    await Promise.all(groups.map((group) => group.deactivate([])));
    return errors;
  };
  const different = 'ranks ask for different changes of who takes part: this one for';
  const grown = await told((group, rank) => group.extendGroupSizeTo(rank === 2 ? 5 : 4));
  expect(grown.map(({ context }) => context.ranks)).toEqual([[2], [2], [0]]);
  expect(grown[0]!.message).toMatch(`${different} a group of 4 ranks, rank 2 for another`);
  expect(grown[2]!.message).toMatch(`${different} a group of 5 ranks, rank 0 for another`);
  const taken = await told((group, rank) => group.recoverRanks([rank === 1 ? 0 : 2]));
  expect(taken[1]!.message).toMatch(`${different} rank 0 to be taken in, rank 0 for another`);
  const asked = await told((group, rank) => (rank === 0 ? group.peerState([0]) : group.extendGroupSizeTo(4)));
  expect(asked[0]!.message).toMatch(`${different} no change, rank 1 for another`);
  const out = groups
    .slice(0, 2)
    .map((group, rank) => failure('EP_MISMATCH', () => group.deactivate(rank === 0 ? [2] : [])));
  const idle = groups[2]!.deactivate([2]).catch(() => {});
  expect((await out[0])!.message).toContain('rank 1: a change or a question of who takes part');
  expect((await out[0])!.message).toContain('rank 0: a change or a question of who takes part without rank 2');
  await out[1];
  await idle;
});

test('a rank that has not come yet is told from one that is gone', async () => {
  const store = memoryStore();
  const open = (rank: number) =>
    initProcessGroup({ backend: 'shm', store, rank, worldSize: 4, activeRanks: [0, 2, 3], timeoutMs: 20_000 });
  const groups = await Promise.all([open(0), open(2), open(3)]);
  const left = groups.slice(0, 2);
  onTestFinished(async () => void (await Promise.all(left.map((group) => group.destroy()))));
  const told = async (call: (group: ProcessGroup) => PromiseLike<unknown>) =>
    (await Promise.all(left.map((group) => failure('EP_PEER_LOST', () => call(group))))).map(({ message }) => message);
  await Promise.all(groups.map((group) => group.barrier()));
  await groups[2]!.destroy();
  const gone = 'rank 3 died, closed the group or was taken out of it';
  for (const message of await told((group) => group.barrier())) expect(message).toContain(gone);
  for (const message of await told((group) => group.send(Int32Array.of(1), 3))) expect(message).toContain(gone);
  const absent = 'rank 1 has not come to the group';
  const root = { root: 1 };
  for (const message of await told((group) => group.broadcast(Int32Array.of(1), root)))
    expect(message).toContain(absent);
  for (const message of await told((group) => group.send(Int32Array.of(1), 1))) expect(message).toContain(absent);
});

test('errors of messages can be written as JSON', async () => {
  const store = memoryStore();
  const open = (rank: number) => initProcessGroup({ backend: 'shm', store, rank, worldSize: 2, timeoutMs: 20_000 });
  const groups = await Promise.all([open(0), open(1)]);
  onTestFinished(async () => void (await Promise.all(groups.map((group) => group.destroy()))));
  const sent = groups[0]!.send(new Float32Array(3), 1);
  const errors = await Promise.all([
    failure('EP_MISMATCH', () => sent),
    failure('EP_MISMATCH', () => groups[1]!.recv(new Float32Array(2), 0)),
  ]);
  expect(JSON.parse(JSON.stringify(errors[1]!.context))).toMatchObject({ ranks: [0], expected: 8, found: 12 });
  expect(JSON.parse(JSON.stringify(errors[0]!.context))).toMatchObject({ ranks: [1], expected: 12 });
});
