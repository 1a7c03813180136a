/** Changes of a group's ranks as far as one rank can see them: what is refused, and a group of one that asks itself. */
import { hostile } from '@ep/conformance/hostile';
import { memoryStore } from '@ep/core';
import { expect, test } from 'vitest';
import { type InitOptions, initProcessGroup, type ProcessGroup } from '../../src/index.js';
import { openWorld } from './world.js';

const alone = (options: Partial<InitOptions> = {}): Promise<ProcessGroup> =>
  initProcessGroup({ store: memoryStore(), rank: 0, worldSize: 1, ...options });

const REFUSED_OPTIONS: readonly (readonly [code: string, message: string, options: Partial<InitOptions>])[] = [
  ['EP_INVALID_ARGUMENT', 'worldSize must be an integer from 1 to 128, found 1000000000', { worldSize: 1e9 }],
  ['EP_INVALID_ARGUMENT', 'maxGroupSize must be an integer from 4 to 128, found 3', { worldSize: 4, maxGroupSize: 3 }],
  ['EP_INVALID_ARGUMENT', 'maxGroupSize must be an integer from 1 to 128, found 129', { maxGroupSize: 129 }],
  [
    'EP_INVALID_ARGUMENT',
    'activeRanks must be rank 0 among them, or isExtension',
    { worldSize: 3, activeRanks: [1, 2] },
  ],
  ['EP_INVALID_ARGUMENT', 'ranks[1] must be named once, found 0', { worldSize: 3, activeRanks: [0, 0] }],
  ['EP_INVALID_ARGUMENT', 'ranks[0] must be an integer from 0 to 2, found 3', { worldSize: 3, activeRanks: [3] }],
  [
    'EP_INVALID_ARGUMENT',
    "onTimeout must be 'poison' or 'evict', found \"wait\"",
    { onTimeout: 'wait' as unknown as 'evict' },
  ],
];

test.each(REFUSED_OPTIONS)('refuses, as %s: %s', async (code, message, options) => {
  await expect(alone(options)).rejects.toMatchObject({ code, message: expect.stringContaining(message) });
});

test('a rank that comes later does not meet the others where rank 0 holds the store', async () => {
  const options = { initMethod: 'tcp://127.0.0.1:1', rank: 1, worldSize: 2, isExtension: true };
  await expect(initProcessGroup(options)).rejects.toMatchObject({
    code: 'EP_UNSUPPORTED',
    message: expect.stringContaining('rank 0 holds this store'),
  });
});

test('a group whose ranks are fixed says so', async () => {
  const world = await openWorld(2);
  const group = world.groups[0]!;
  const calls: readonly (() => unknown)[] = [
    () => group.peerState([0]),
    () => group.numSyncedRanks(),
    () => group.deactivate([1]),
    () => group.extendGroupSizeTo(3),
    () => group.recoverRanks([1]),
    () => group.joinGroup(),
  ];
  for (const call of calls) {
    await expect((async () => call())()).rejects.toMatchObject({
      code: 'EP_UNSUPPORTED',
      message: expect.stringMatching(/are fixed, because .*, or the backend shm/),
    });
  }
});

test('ranks with another maxGroupSize are refused at once, whether they open the group or join it', async () => {
  await using store = memoryStore();
  const options = { store, worldSize: 2, timeoutMs: 30_000 };
  await using group = await initProcessGroup({ ...options, rank: 0, maxGroupSize: 4 });
  expect(() => group.extendGroupSizeTo(5)).toThrow('from 2 to 4');
  const refusal = {
    code: 'EP_INVALID_ARGUMENT',
    message: expect.stringContaining('maxGroupSize must be 4, as rank 0 has it'),
  };
  await expect(initProcessGroup({ ...options, rank: 1, maxGroupSize: 3 })).rejects.toMatchObject(refusal);
  await expect(initProcessGroup({ ...options, rank: 1 })).rejects.toMatchObject(refusal);
  const joins = { ...options, rank: 3, isExtension: true };
  await expect(initProcessGroup({ ...joins, maxGroupSize: 5 })).rejects.toMatchObject(refusal);
  await using comer = await initProcessGroup(joins);
  expect(() => comer.extendGroupSizeTo(5)).toThrow('to 4');
  // Who was refused may try again.
  await using other = await initProcessGroup({ ...options, rank: 1, maxGroupSize: 4 });
  await Promise.all([group.barrier(), other.barrier()]);
});

test('over a transport there are as many places as it has ranks', async () => {
  const store = memoryStore();
  const { signal } = new AbortController();
  await using transport = await hostile.open({ rank: 0, worldSize: 1, store }, { signal });
  const options = { backend: transport, store, rank: 0, worldSize: 1 };
  await expect(initProcessGroup({ ...options, maxGroupSize: 2 })).rejects.toMatchObject({
    code: 'EP_UNSUPPORTED',
    message: expect.stringContaining("the transport's 1 places"),
  });
  await using group = await initProcessGroup({ ...options, maxGroupSize: 1, activeRanks: [0], onTimeout: 'evict' });
  expect(() => group.extendGroupSizeTo(2)).toThrow('size must be an integer from 1 to 1, found 2');
  await group.extendGroupSizeTo(1);
  await group.recoverRanks([]);
  expect(await group.peerState([0])).toEqual(['active']);
  expect(await group.numSyncedRanks()).toBe(1);
  await group.deactivate([]);
  expect([group.epoch, group.activeRanks]).toEqual([0, [0]]);
  await group.barrier();
});

test('what is wrong with ranks and sizes is said before anything changes', async () => {
  await using group = await alone({ maxGroupSize: 3 });
  expect(() => group.peerState([3])).toThrow('ranks[0] must be an integer from 0 to 2, found 3');
  expect(() => group.peerState([1, 1])).toThrow('ranks[1] must be named once, found 1');
  expect(() => group.deactivate([1])).toThrow('ranks[0] must be an integer from 0 to 0, found 1');
  expect(() => group.extendGroupSizeTo(4)).toThrow('size must be an integer from 1 to 3, found 4');
  expect(() => group.extendGroupSizeTo(0)).toThrow('size must be an integer from 1 to 3, found 0');
  await expect(group.recoverRanks([1])).rejects.toThrow('ranks[0] must be an integer from 0 to 0, found 1');
  expect(group.epoch).toBe(1);
});

test('a group of one grows, and finds nobody to take in', async () => {
  await using group = await alone({ maxGroupSize: 3 });
  expect(await group.peerState([0, 1, 2])).toEqual(['active', 'absent', 'absent']);
  expect(await group.numSyncedRanks()).toBe(1);
  await group.extendGroupSizeTo(2);
  expect([group.size, group.ranks, group.activeRanks, group.epoch]).toEqual([2, [0, 1], [0], 2]);
  await expect(group.recoverRanks([1])).rejects.toMatchObject({
    code: 'EP_NOT_READY',
    context: { ranks: [1], states: ['absent'] },
  });
  const outputs = [new Int32Array(1), Int32Array.of(-1)];
  const work = group.allGather(outputs, Int32Array.of(5));
  await work;
  expect([outputs[0]![0], outputs[1]![0], work.contributors, work.failedRanks]).toEqual([5, -1, [0], [1]]);
});

test('who takes part does not join, and who joins makes no calls meanwhile', async () => {
  const store = memoryStore();
  await using first = await initProcessGroup({ store, rank: 0, worldSize: 2, activeRanks: [0] });
  await using second = await initProcessGroup({ store, rank: 1, worldSize: 2, activeRanks: [0], isExtension: true });
  expect(second.activeRanks).toEqual([1]);
  const joined = second.joinGroup();
  expect(() => second.barrier()).toThrow(expect.objectContaining({ code: 'EP_BUSY' }));
  while ((await first.peerState([1]))[0] !== 'joining');
  await first.recoverRanks([1]);
  await joined;
  await expect(first.joinGroup()).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  await Promise.all([first.barrier(), second.barrier()]);
  expect([first.activeRanks, second.activeRanks, second.epoch]).toEqual([[0, 1], [0, 1], first.epoch]);
});

test('a process that was started again as if it were the first does not lead newcomers astray', async () => {
  const store = memoryStore();
  const options = { store, worldSize: 3, activeRanks: [0, 1] };
  await using first = await initProcessGroup({ ...options, rank: 0 });
  await (await initProcessGroup({ ...options, rank: 1 })).close();
  // Again and again, instead of as an extension: alone in groups of its own.
  await (await initProcessGroup({ ...options, rank: 1, activeRanks: [1] })).close();
  await (await initProcessGroup({ ...options, rank: 1, activeRanks: [1] })).close();
  await using second = await initProcessGroup({ ...options, rank: 1, isExtension: true });
  // As all, once more: rank 0 goes on without rank 1, and takes it in.
  await first.deactivate([1]);
  const joined = second.joinGroup();
  while ((await first.peerState([1]))[0] !== 'joining');
  await first.recoverRanks([1]);
  await joined;
  await Promise.all([first.barrier(), second.barrier()]);
});

test('a rank that nobody takes in stops waiting', async () => {
  const nobody = alone({ worldSize: 2, activeRanks: [1], isExtension: true, timeoutMs: 30 });
  await expect(nobody).rejects.toMatchObject({ code: 'EP_TIMEOUT' });
  const store = memoryStore();
  await using first = await initProcessGroup({ store, rank: 0, worldSize: 2, activeRanks: [0] });
  await using second = await initProcessGroup({ store, rank: 1, worldSize: 2, activeRanks: [0], isExtension: true });
  await expect(second.joinGroup({ timeoutMs: 30 })).rejects.toMatchObject({
    code: 'EP_TIMEOUT',
    context: { awaited: [0] },
  });
  expect(await first.peerState([1])).toEqual(['connected']);
  const cut = new AbortController();
  const joined = second.joinGroup({ signal: cut.signal });
  cut.abort(new Error('no more patience'));
  await expect(joined).rejects.toBe(cut.signal.reason);
  await second.barrier();
});

test('ranks that were told different things of the group are refused at once, by the name of what differs', async () => {
  const store = memoryStore();
  const shared = { store, worldSize: 3, timeoutMs: 20_000 } as const;
  const began = performance.now();
  const different = [
    [{}, { worldSize: 4 }, 'worldSize must be 3, as rank 0 has it, which opened the group first; rank 2 has 4'],
    [
      { activeRanks: [0, 2] },
      { activeRanks: [1, 2] },
      'activeRanks must be ranks 0, 2, as rank 0 has it, which opened the group first; rank 2 has ranks 1-2',
    ],
    [
      { activeRanks: [0, 2] },
      {},
      'activeRanks must be ranks 0, 2, as rank 0 has it, which opened the group first; rank 2 has ranks 0-2',
    ],
    [
      { onTimeout: 'evict' },
      {},
      "onTimeout must be 'evict', as rank 0 has it, which opened the group first; rank 2 has 'poison'",
    ],
  ] as const;
  for (const [i, [ours, theirs, message]] of different.entries()) {
    const name = `different ${i}`;
    await using first = await initProcessGroup({ ...shared, name, rank: 0, ...ours });
    await expect(initProcessGroup({ ...shared, name, rank: 2, ...theirs })).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: `initProcessGroup: ${message}`,
      context: { ranks: [0, 2] },
    });
    // It opened nothing, so it finds the same group.
    await using second = await initProcessGroup({
      ...shared,
      name,
      rank: 2,
      ...ours,
      ...(i === 1 && { activeRanks: [2, 0] }),
    });
    await using third = await initProcessGroup({
      ...shared,
      name,
      rank: 1,
      ...ours,
      ...(i === 1 || i === 2 ? { isExtension: true } : {}),
    });
    const works = [first, second, ...(i === 1 || i === 2 ? [] : [third])].map((group) => group.barrier());
    await Promise.all(works);
  }
  expect(performance.now() - began).toBeLessThan(10_000);
  await store.close();
});

test('who joins takes over what becomes of those that are late, unless it was told otherwise', async () => {
  const store = memoryStore();
  const options = { store, worldSize: 2, activeRanks: [0], timeoutMs: 20_000 } as const;
  await using group = await initProcessGroup({ ...options, rank: 0, onTimeout: 'evict' });
  const joins = { ...options, rank: 1, isExtension: true } as const;
  await expect(initProcessGroup({ ...joins, onTimeout: 'poison' })).rejects.toMatchObject({
    code: 'EP_INVALID_ARGUMENT',
    message: expect.stringContaining("onTimeout must be 'evict', as rank 0 has it"),
  });
  await using comer = await initProcessGroup(joins);
  const joining = comer.joinGroup();
  while ((await group.peerState([1]))[0] !== 'joining') await new Promise((resolve) => setTimeout(resolve, 5));
  await Promise.all([joining, group.recoverRanks([1])]);
  // It goes on without the one that does not come.
  await expect(comer.barrier({ timeoutMs: 200 })).rejects.toMatchObject({
    code: 'EP_PEER_LOST',
    context: { lost: [0] },
  });
  await comer.barrier();
  expect(comer.activeRanks).toEqual([1]);
  await store.close();
});
