/** Groups out of groups, and groups one after the other. */

import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { memoryStore } from '@ep/core';
import { describe, expect, onTestFinished, test } from 'vitest';
import type { GroupTransport } from '../../src/backends.js';
import { type InitOptions, initProcessGroup, type ProcessGroup } from '../../src/index.js';
import { MemoryWorld } from '../memory-engine.js';
import { failure, openWorld, turn } from './world.js';

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, 'close');
  return port;
}

async function sumOf(group: ProcessGroup | undefined, value: number): Promise<number | undefined> {
  if (group === undefined) return undefined;
  const data = Float64Array.of(value);
  await group.allReduce(data);
  return data[0];
}

describe('newGroup', () => {
  test('meets where ranks have counted otherwise: one was refused, others waited for it in vain', async () => {
    const { each } = await openWorld(3);
    await each(async (world, rank) => {
      if (rank === 0) {
        await expect(world.split(-1)).rejects.toThrow('color');
        await expect(world.split(0, 0.5)).rejects.toThrow('key');
        await expect(world.newGroup([0], { name: 5 as never })).rejects.toThrow('name must be a string');
        await expect(world.newGroup([0], { timeoutMs: -1 })).rejects.toThrow('timeoutMs');
      }
      const halves = await world.split(rank === 2 ? 1 : 0);
      expect(await sumOf(halves, rank)).toBe(rank === 2 ? 2 : 1);
      // As behind an agreement that ended well on some ranks only.
      for (let made = 0; made < rank; made++) await world.split(-1).catch(() => {});
      const all = await Promise.all([world.newGroup([0, 1, 2]), world.newGroup([0, 1, 2], { name: 'named' })]);
      expect(new Set(all.map((group) => group!.name)).size).toBe(2);
      for (const group of all) expect(await sumOf(group, rank)).toBe(3);
    });
  });

  test('numbers its ranks as they are listed, and is nothing to the others', async () => {
    const { each } = await openWorld(4);
    await each(async (world, rank) => {
      const group = await world.newGroup([3, 1]);
      expect(group === undefined).toBe(rank % 2 === 0);
      if (group === undefined) return;
      expect(group).toMatchObject({
        rank: rank === 3 ? 0 : 1,
        size: 2,
        ranks: [3, 1],
        name: 'world/1',
        backend: 'memory',
      });
      const data = Float32Array.of(rank);
      await group.broadcast(data, { root: 0 });
      expect(data[0]).toBe(3);
      expect(await sumOf(group, rank)).toBe(4);
    });
  });

  test('groups overlap, work at the same time, and beside the group that they came from', async () => {
    const { each } = await openWorld(4);
    const results = await each(async (world, rank) => {
      const low = await world.newGroup([0, 1, 2]);
      const high = await world.newGroup([1, 2, 3], { name: 'high' });
      const pair = await world.newGroup([0, 3]);
      const works = [sumOf(pair, rank), sumOf(world, rank), sumOf(high, rank), sumOf(low, rank), sumOf(world, 10)];
      return { sums: await Promise.all(works), name: high?.name };
    });
    expect(results.map(({ sums }) => sums)).toEqual([
      [3, 6, undefined, 3, 40],
      [undefined, 6, 6, 3, 40],
      [undefined, 6, 6, 3, 40],
      [3, 6, 6, undefined, 40],
    ]);
    expect(results.map(({ name }) => name)).toEqual([undefined, 'world/high', 'world/high', 'world/high']);
  });

  test('groups of groups know their ranks in the world', async () => {
    const { each } = await openWorld(4);
    await each(async (world) => {
      const outer = await world.newGroup([3, 2, 1]);
      const inner = await outer?.newGroup([2, 0]);
      if (inner === undefined) return;
      expect(inner.ranks).toEqual([1, 3]);
      expect(inner.name).toBe('world/1/1');
      expect(await sumOf(inner, world.rank)).toBe(4);
    });
  });

  test('different lists are EP_MISMATCH on all ranks, naming who is odd, and the group goes on', async () => {
    const { each } = await openWorld(4);
    await each(async (world, rank) => {
      const error = await failure('EP_MISMATCH', () => world.newGroup(rank === 2 ? [1, 0] : [0, 1]));
      expect(error.message).toBe('newGroup: members are [1, 0] on rank 2, [0, 1] on the others');
      expect(error.context.ranks).toEqual([2]);
      const names = await failure('EP_MISMATCH', () => world.newGroup([0, 1], { name: rank < 2 ? 'a' : 'b' }));
      expect(names.message).toBe('newGroup: members are [0, 1] on ranks 0-1, [0, 1] under another name on ranks 2-3');
      expect(names.context.ranks).toEqual([0, 1, 2, 3]);
      expect(await sumOf(await world.newGroup([0, 1, 2, 3]), 1)).toBe(4);
    });
  });

  test('after a loss those who are left make a group', async () => {
    const { memory, groups } = await openWorld(3);
    memory.kill(1);
    const survivors = [groups[0]!, groups[2]!];
    await Promise.all(survivors.map((group) => failure('EP_PEER_LOST', () => group.barrier())));
    const made = await Promise.all(survivors.map((group) => group.newGroup([0, 2])));
    expect(await Promise.all(made.map((group) => sumOf(group, 1)))).toEqual([2, 2]);
    const parts = await Promise.all(survivors.map((group) => group.split(1)));
    expect(parts.map((group) => group?.ranks)).toEqual([
      [0, 2],
      [0, 2],
    ]);
  });

  test('has a timeout of its own, or that of the group that it came from', async () => {
    const { each } = await openWorld(2);
    await each(async (world, rank) => {
      const outer = (await world.newGroup([0, 1], { timeoutMs: 300 }))!;
      const inner = (await outer.split(0))!;
      if (rank === 1) return;
      const { context } = await failure('EP_TIMEOUT', () => inner.barrier());
      expect(context.timeoutMs).toBe(300);
    });
  });

  test('is made in its place among calls that were not awaited', async () => {
    const { each } = await openWorld(3);
    await each(async (world, rank) => {
      const before = Array.from({ length: 20 }, () => world.allReduce(Float32Array.of(1)));
      const making = world.newGroup([2, 0]);
      const after = world.barrier();
      const group = await making;
      await Promise.all([...before, after]);
      expect(after.sequence).toBe(22);
      expect(await sumOf(group, rank)).toBe(rank === 1 ? undefined : 2);
    });
  });
});

describe('split', () => {
  test('makes a group for each colour, ordered by key and then by rank', async () => {
    const { each } = await openWorld(5);
    const found = await each(async (world, rank) => {
      const group = await world.split(rank % 2, -rank);
      const same = await world.split(7);
      const some = await world.split(rank === 0 ? undefined : 0, rank === 4 ? 0 : 1);
      expect(await sumOf(group, 1)).toBe(rank % 2 === 0 ? 3 : 2);
      expect(await sumOf(same, 1)).toBe(5);
      return [group?.ranks, same?.ranks, some?.ranks, group?.name];
    });
    const all = [0, 1, 2, 3, 4];
    const [even, odd, some] = [
      [4, 2, 0],
      [3, 1],
      [4, 1, 2, 3],
    ];
    expect(found).toEqual([
      [even, all, undefined, 'world/1.0'],
      [odd, all, some, 'world/1.1'],
      [even, all, some, 'world/1.0'],
      [odd, all, some, 'world/1.1'],
      [even, all, some, 'world/1.0'],
    ]);
  });
});

describe('lifetimes', () => {
  test('closing a group closes those made from it, which wait for what is under way', async () => {
    const { groups, each } = await openWorld(2);
    const inner = await each(async (world) => (await world.newGroup([0, 1]))!);
    const data = [Float32Array.of(1), Float32Array.of(2)];
    const works = inner.map((group, rank) => group.allReduce(data[rank]!));
    await Promise.all(groups.map((group) => group.destroy()));
    expect(inner.map(({ closed }) => closed)).toEqual([true, true]);
    expect(works.map(({ status }) => status)).toEqual(['done', 'done']);
    expect(data).toEqual([Float32Array.of(3), Float32Array.of(3)]);
  });

  test('a group is closed alone, and its name can be used again', async () => {
    const { each } = await openWorld(2);
    await each(async (world) => {
      for (let round = 0; round < 3; round++) {
        const group = await world.newGroup([0, 1], { name: 'again' });
        expect(await sumOf(group, round)).toBe(2 * round);
        await group?.destroy();
      }
      expect(await sumOf(world, 1)).toBe(2);
    });
  });

  test('a world is destroyed and made again under the same name, over the same store', async () => {
    const memory = new MemoryWorld();
    const store = memoryStore();
    onTestFinished(() => store.close());
    for (let life = 0; life < 3; life++) {
      const groups = await Promise.all(
        [0, 1].map((rank) => initProcessGroup({ backend: memory.open, store, rank, worldSize: 2, name: 'train' })),
      );
      expect(groups.map(({ name }) => name)).toEqual(['train', 'train']);
      const inner = await Promise.all(groups.map((group) => group.newGroup([1, 0])));
      expect(await Promise.all([...groups, ...inner].map((group) => sumOf(group, 1)))).toEqual([2, 2, 2, 2]);
      await Promise.all(groups.map((group) => group.destroy()));
    }
  });

  test('a group that is closed while it makes another leaves none behind', async () => {
    const { groups } = await openWorld(2);
    const making = groups.map((group) => group.newGroup([0, 1]));
    const closing = groups.map((group) => group.close());
    for (const one of making) await failure('EP_CLOSED', () => one);
    await Promise.all(closing);
  });
});

describe('initProcessGroup', () => {
  const open = (options: InitOptions): Promise<ProcessGroup> =>
    initProcessGroup({ backend: new MemoryWorld().open, store: memoryStore(), rank: 0, worldSize: 1, ...options });

  test.each([
    ['initProcessGroup: rank must be an integer from 0 to 1, found 2', { rank: 2, worldSize: 2 }],
    ['initProcessGroup: worldSize must be an integer from 1 to 128, found 0', { worldSize: 0 }],
    ['initProcessGroup: name must be a string that is not empty, found ""', { name: '' }],
    ['initProcessGroup: ranksOnHost must be a safe integer of at least 1, found 0', { ranksOnHost: 0 }],
    ['initProcessGroup: initMethod must be absent where there is a store, found "env://"', { initMethod: 'env://' }],
    [
      'initProcessGroup: timeoutMs must be a number of milliseconds of at least 0, or Infinity, found -5',
      { timeoutMs: -5 },
    ],
    [
      "initProcessGroup: backend must be 'shm', 'nccl', a transport or a function that opens an engine, found \"mpi\"",
      { backend: 'mpi' as 'shm' },
    ],
  ] as const)('%s', async (message, options) => {
    const error = await failure('EP_INVALID_ARGUMENT', () => open(options));
    expect(error.message).toBe(message);
  });

  test.each([
    ['initProcessGroup: rank must be 0, as the transport fake has it, found 1', { rank: 1 }],
    ['initProcessGroup: worldSize must be 2, as the transport fake has it, found 3', { worldSize: 3 }],
  ] as const)('%s', async (message, place) => {
    const transport = { name: 'fake', rank: 0, worldSize: 2, allocate: () => {}, connect: () => {} };
    const store = memoryStore();
    onTestFinished(() => store.close());
    const error = await failure('EP_INVALID_ARGUMENT', () =>
      initProcessGroup({ backend: transport as unknown as GroupTransport, store, ...place }),
    );
    expect(error.message).toBe(message);
  });

  test('meets the others by URL, and closes what it has opened', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'ep-collectives-'));
    onTestFinished(() => rmSync(folder, { recursive: true }));
    const memory = new MemoryWorld();
    const url = (rank: number): string => `file://${join(folder, 'store')}?rank=${rank}&world_size=3`;
    const groups = await Promise.all(
      [0, 1, 2].map((rank) => initProcessGroup({ backend: memory.open, initMethod: url(rank), timeoutMs: 10_000 })),
    );
    expect(groups.map(({ rank, size }) => [rank, size])).toEqual([
      [0, 3],
      [1, 3],
      [2, 3],
    ]);
    expect(await Promise.all(groups.map((group) => sumOf(group, 1)))).toEqual([3, 3, 3]);
    await Promise.all(groups.map((group) => group.destroy()));
  });

  test('takes rank, size and store from what a launcher has set', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'ep-collectives-'));
    onTestFinished(() => rmSync(folder, { recursive: true }));
    const memory = new MemoryWorld();
    const groups = await Promise.all(
      ['0', '1'].map((RANK) => {
        const env = { RANK, WORLD_SIZE: '2', EP_STORE: `file:${join(folder, 'store')}`, EP_TIMEOUT_MS: '10000' };
        return initProcessGroup({ backend: memory.open, env });
      }),
    );
    expect(await Promise.all(groups.map((group) => sumOf(group, 2)))).toEqual([4, 4]);
    await Promise.all(groups.map((group) => group.destroy()));
  });

  test('meets again and again through one file', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'ep-collectives-'));
    onTestFinished(() => rmSync(folder, { recursive: true }));
    const memory = new MemoryWorld();
    const url = (rank: number): string => `file://${join(folder, 'store')}?rank=${rank}&world_size=2`;
    for (let life = 0; life < 3; life++) {
      const groups = await Promise.all(
        [0, 1].map((rank) => initProcessGroup({ backend: memory.open, initMethod: url(rank), timeoutMs: 10_000 })),
      );
      expect(await Promise.all(groups.map((group) => sumOf(group, life)))).toEqual([2 * life, 2 * life]);
      await Promise.all(groups.map((group) => group.destroy()));
    }
    const alone = await failure('EP_RENDEZVOUS', () =>
      initProcessGroup({ backend: memory.open, initMethod: url(0), timeoutMs: 50 }),
    );
    expect(alone.context.ranks).toEqual([1]);
  });

  test('meets again and again where rank 0 holds the store, in whatever order the ranks leave', async () => {
    const worlds = [new MemoryWorld(), new MemoryWorld(), new MemoryWorld()];
    const port = await freePort();
    const url = (rank: number): string => `tcp://127.0.0.1:${port}?rank=${rank}&world_size=3`;
    const live = async (rank: number): Promise<void> => {
      for (const [life, { open }] of worlds.entries()) {
        const group = await initProcessGroup({ backend: open, initMethod: url(rank), timeoutMs: 10_000 });
        expect(await sumOf(group, life)).toBe(3 * life);
        if (rank === life) await new Promise((resolve) => setTimeout(resolve, 100));
        await group.destroy();
      }
    };
    const begin = performance.now();
    await Promise.all([0, 1, 2].map(live));
    // Nobody waited for a deadline.
    expect(performance.now() - begin).toBeLessThan(4000);
  });

  test('names the ranks that did not come', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'ep-collectives-'));
    onTestFinished(() => rmSync(folder, { recursive: true }));
    const initMethod = `file://${join(folder, 'store')}?rank=0&world_size=3`;
    const error = await failure('EP_RENDEZVOUS', () =>
      initProcessGroup({ backend: new MemoryWorld().open, initMethod, timeoutMs: 50 }),
    );
    expect(error.message).toContain('ranks 1-2 of 3 did not come within the 50 ms of rank 0');
  });

  test('does not wait for the others where it has a store, and leaves the store open', async () => {
    const memory = new MemoryWorld();
    const store = memoryStore();
    onTestFinished(() => store.close());
    const early = await initProcessGroup({ backend: memory.open, store, rank: 1, worldSize: 2 });
    expect(early.connections()).toMatchObject([
      { rank: 0, state: 'connecting' },
      { rank: 1, state: 'self' },
    ]);
    const work = early.barrier();
    await turn();
    expect(work.status).toBe('pending');
    const late = await initProcessGroup({ backend: memory.open, store, rank: 0, worldSize: 2 });
    await Promise.all([late.barrier(), work]);
    await Promise.all([early.close(), late.close()]);
    expect(store.closed).toBe(false);
  });

  test('an engine that cannot be opened leaves nothing open', async () => {
    const broken = new Error('no engine today');
    const backend = (): never => {
      throw broken;
    };
    const port = await freePort();
    const initMethod = `tcp://127.0.0.1:${port}?rank=0&world_size=1`;
    await expect(initProcessGroup({ backend, initMethod })).rejects.toBe(broken);
    // The server of the store is gone: another one can listen there.
    const group = await initProcessGroup({ backend: new MemoryWorld().open, initMethod, timeoutMs: 10_000 });
    expect(await sumOf(group, 3)).toBe(3);
    await group.destroy();
  });
});
