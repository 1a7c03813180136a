/** Several groups on one transport: sections, names, capacity, and what is given back. */
import { type HostileTransport, hostile } from '@ep/conformance/hostile';
import { memoryStore, prefixStore, type Store } from '@ep/core';
import { describe, expect, it } from 'vitest';
import type { GroupEngine } from '../../src/engine.js';
import { initProcessGroup, type ProcessGroup } from '../../src/index.js';
import { openPortableEngine } from '../../src/portable/engine.js';
import { layOut, smallestSection } from '../../src/portable/layout.js';
import { complete, pause, rejection, SMALL_STAGING, World, withMembers } from './world.js';

async function sumOver(
  engines: readonly GroupEngine[],
  sequence: number,
  values: readonly number[],
): Promise<number[]> {
  const outputs = values.map(() => new Int32Array(600));
  await Promise.all(
    engines.map((engine, rank) =>
      engine.run(
        complete(
          {
            kind: 'all-reduce',
            dtype: 'i32',
            reduceOp: 'sum',
            inputs: [new Int32Array(600).fill(values[rank]!)],
            outputs: [outputs[rank]!],
          },
          sequence,
        ),
      ),
    ),
  );
  return outputs.map((output) => output[599]!);
}

/** Of a rank that is lost once it has taken a section, before it has told of it. */
const tellsNothing = (store: Store): Store =>
  withMembers(store, {
    compareSet: (key, expected, desired) =>
      key.endsWith('/section') ? new Promise(() => {}) : store.compareSet(key, expected, desired),
  });

describe('groups of one transport', () => {
  it('overlap, in orders of their own, at the same time', async () => {
    await using world = await World.open({ size: 4, stagingBytes: SMALL_STAGING });
    const [even, reversed, pair] = await Promise.all([
      world.group('even', [0, 2]),
      world.group('reversed', [3, 2, 1, 0]),
      world.group('pair', [2, 3]),
    ]);
    const rounds = Array.from({ length: 10 }, (_, i) => i + 1);
    await Promise.all([
      ...rounds.map(async (i) => expect(await sumOver(even!, i, [1, i])).toEqual([1 + i, 1 + i])),
      ...rounds.map(async (i) => expect(await sumOver(reversed!, i, [1, 2, 3, i])).toEqual(Array(4).fill(6 + i))),
      ...rounds.map(async (i) => expect(await sumOver(pair!, i, [i, 5])).toEqual([5 + i, 5 + i])),
      ...rounds.map(async (i) => expect(await sumOver(world.engines, i, [i, 0, 0, 0])).toEqual(Array(4).fill(i))),
    ]);
    const got = new Uint8Array(1);
    await Promise.all([
      reversed[0]!.send({ peer: 3, tag: 0, data: Uint8Array.of(8), timeoutMs: 5000 }),
      reversed[3]!.recv({ peer: 0, tag: 0, data: got, timeoutMs: 5000 }),
    ]);
    expect(got[0]).toBe(8);
  });

  it('close in time when their store answers no more, as when its host is lost', async () => {
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, timeoutMs: 300 });
    const group = await world.group('left', [0, 1, 2]);
    expect(await sumOver(group, 1, [1, 2, 4])).toEqual([7, 7, 7]);
    const asked: string[] = [];
    for (const store of world.stores)
      for (const name of ['set', 'check', 'add', 'delete'] as const)
        Object.assign(store, {
          [name]: () => {
            asked.push(name);
            return new Promise(() => {});
          },
        });
    await Promise.all(group.map((engine) => engine.close()));
    // Asked once each, not again for what is only tidy.
    expect(asked).toEqual(['set', 'set', 'set']);
  });

  it('are as many as the knob says; one more is refused on all its members; closing makes room', async () => {
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, maxGroups: 3 });
    const first = await world.group('first', [0, 1]);
    await world.group('second', [1, 2]);
    const refused = await Promise.allSettled(
      [0, 1].map((rank) =>
        openPortableEngine({
          transport: world.transports[rank]!,
          store: world.stores[rank]!,
          ranks: [0, 1],
          rank,
          name: 'third',
          timeoutMs: 5000,
        }),
      ),
    );
    for (const end of refused) expect(end).toMatchObject(rejection('EP_CAPACITY', { maxGroups: 3 }));
    await Promise.all(first.map((engine) => engine.close()));
    // The words of the section go on where the closed group left them, and so do its members' parts.
    for (let round = 0; round < 4; round++) {
      const again = await world.group('first', [1, 0, 2]);
      for (let i = 1; i <= 3; i++) expect(await sumOver(again, i, [round, 1, 2])).toEqual(Array(3).fill(3 + round));
      await Promise.all(again.map((engine) => engine.close()));
    }
    expect(await sumOver(world.engines, 1, [1, 2, 3])).toEqual([6, 6, 6]);
  });

  it('leave nothing in the store when all have closed', async () => {
    await using world = await World.open({ size: 2, stagingBytes: SMALL_STAGING, maxGroups: 2 });
    await Promise.all((await world.group('g', [0, 1])).map((engine) => engine.close()));
    const before = await world.stores[0]!.numKeys();
    for (let i = 0; i < 3; i++) {
      const group = await world.group('g', [1, 0]);
      await sumOver(group, 1, [1, 2]);
      await Promise.all(group.map((engine) => engine.close()));
    }
    expect(await world.stores[0]!.numKeys()).toBe(before);
  });

  it('do not get the section of one that lost a member', async () => {
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING, maxGroups: 2 });
    const group = await world.group('g', [0, 1, 2]);
    await world.lose(2);
    await Promise.allSettled(group.slice(0, 2).map((engine) => engine.run(complete({ kind: 'barrier' }, 1))));
    // The one that was lost closes as well, over a transport that is gone.
    await Promise.all(group.map((engine) => engine.close()));
    const next = await Promise.allSettled(
      [0, 1].map((rank) =>
        openPortableEngine({
          transport: world.transports[rank]!,
          store: world.stores[rank]!,
          ranks: [0, 1],
          rank,
          name: 'next',
          timeoutMs: 5000,
        }),
      ),
    );
    for (const end of next) expect(end).toMatchObject(rejection('EP_CAPACITY'));
  });

  it('with a member that comes late work among those who are there', async () => {
    await using world = await World.open({ size: 3, stagingBytes: SMALL_STAGING });
    const open = (rank: number): Promise<GroupEngine> =>
      openPortableEngine({
        transport: world.transports[rank]!,
        store: world.stores[rank]!,
        ranks: [0, 1, 2],
        rank,
        name: 'late',
        timeoutMs: 20_000,
      });
    const early = await Promise.all([open(0), open(1)]);
    expect(early[0]!.connections()[2]).toMatchObject({ rank: 2, state: 'connecting' });
    const got = new Uint8Array(1);
    await Promise.all([
      early[0]!.send({ peer: 1, tag: 0, data: Uint8Array.of(4), timeoutMs: 20_000 }),
      early[1]!.recv({ peer: 0, tag: 0, data: got, timeoutMs: 20_000 }),
    ]);
    expect(got[0]).toBe(4);
    expect(early[1]!.connections().map(({ state }) => state)).toEqual(['connected', 'self', 'connecting']);
    const calls = early.map((engine) => engine.run(complete({ kind: 'barrier' }, 1)));
    await pause(20);
    const late = await open(2);
    await Promise.all([...calls, late.run(complete({ kind: 'barrier' }, 1))]);
    expect(early[0]!.connections()[2]).toEqual({ rank: 2, state: 'connected' });
    await Promise.all([...early, late].map((engine) => engine.close()));
  });

  it('whose lowest members are lost before they have found a section open nevertheless, and tell that once', async () => {
    for (const [lost, found] of [
      [[0], false],
      [[0, 1], false],
      [[0], true],
    ] as const) {
      await using world = await World.open({ size: 4, stagingBytes: SMALL_STAGING, maxGroups: 2 });
      const open = (rank: number): Promise<GroupEngine> =>
        openPortableEngine({
          transport: world.transports[rank]!,
          store: found && rank === 0 ? tellsNothing(world.stores[0]!) : world.stores[rank]!,
          ranks: [0, 1, 2, 3],
          rank,
          name: 'orphan',
          timeoutMs: 20_000,
        });
      if (found) void open(0).catch(() => {});
      const left = [0, 1, 2, 3].filter((rank) => !lost.some((one) => one === rank));
      const opening = left.map(open);
      await pause(50);
      await Promise.all(lost.map((rank) => world.lose(rank)));
      const engines = await Promise.all(opening);
      // Two that are lost are told by one call, or by one each.
      const ends = await Promise.all(
        engines.map(async (engine) => {
          for (let sequence = 1; ; sequence++) {
            try {
              return { sequence, ...(await engine.run(complete({ kind: 'barrier' }, sequence))) };
            } catch (error) {
              expect(error).toMatchObject({ code: 'EP_PEER_LOST' });
            }
          }
        }),
      );
      for (const end of ends) expect(end).toEqual({ ...ends[0], contributors: left });
      expect(ends[0]!.sequence - 1).toBeLessThanOrEqual(lost.length);
      await Promise.all(engines.map((engine) => engine.close()));
    }
  });

  it('are kept by the lowest of those who agreed to them', async () => {
    const { signal } = new AbortController();
    const store = memoryStore();
    const [transports, groups] = [[], []] as [HostileTransport[], ProcessGroup[]];
    await Promise.all(
      [0, 1, 2].map(async (rank) => {
        const backend = await hostile.open({ rank, worldSize: 3, store: prefixStore(store, 'transport') }, { signal });
        transports[rank] = backend;
        groups[rank] = await initProcessGroup({ backend, store, timeoutMs: 20_000 });
      }),
    );
    await Promise.all(groups.map((group) => group.barrier()));
    await transports[0]!.close();
    const left = groups.slice(1);
    await Promise.allSettled(left.map((group) => group.barrier()));
    const made = await Promise.all(left.map((group) => group.newGroup([0, 1, 2], { timeoutMs: 10_000 })));
    const works = made.map((group) => group!.barrier());
    await Promise.all(works);
    for (const work of works) expect(work.contributors).toEqual([1, 2]);
    await Promise.allSettled(groups.map((group) => group.destroy()));
    await Promise.all(transports.map((transport) => transport.close()));
  });

  it('tell who opens late that a member has been there and has left', async () => {
    await using world = await World.open({ size: 2, stagingBytes: SMALL_STAGING });
    const open = (rank: number): Promise<GroupEngine> =>
      openPortableEngine({
        transport: world.transports[rank]!,
        store: world.stores[rank]!,
        ranks: [0, 1],
        rank,
        name: 'gone',
        timeoutMs: 20_000,
      });
    for (const wait of [0, 1, 5]) {
      const first = await open(0);
      const second = wait === 0 ? undefined : open(1);
      await pause(wait);
      await first.close();
      const late = await (second ?? open(1));
      const call = late.run(complete({ kind: 'barrier' }, 1));
      await expect(call).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [0] } });
      await late.close();
    }
  });

  it('tell who has connected already that a member leaves before it could connect itself', async () => {
    await using world = await World.open({ size: 2, stagingBytes: SMALL_STAGING });
    const slow = withMembers(world.transports[0]!, {
      connect: async (peer, options) => {
        await pause(300);
        return world.transports[0]!.connect(peer, options);
      },
    });
    // Another object is another transport, with an arena of its own.
    const quick = withMembers(world.transports[1]!, {});
    const open = (rank: number): Promise<GroupEngine> =>
      openPortableEngine({
        transport: rank === 0 ? slow : quick,
        store: prefixStore(world.stores[rank]!, 'others'),
        ranks: [0, 1],
        rank,
        name: 'slow',
        timeoutMs: 10_000,
      });
    const [first, second] = await Promise.all([open(0), open(1)]);
    while (second.connections()[0]!.state !== 'connected') await pause(1);
    expect(first.connections()[1]!.state).toBe('connecting');
    const call = second.run(complete({ kind: 'barrier' }, 1));
    await Promise.all([
      first.close(),
      expect(call).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [0] } }),
    ]);
    await second.close();
  });

  it('can be opened anew after all were closed with their store', async () => {
    await using world = await World.open({ size: 2, stagingBytes: SMALL_STAGING, maxGroups: 1 });
    await Promise.all(world.engines.map((engine) => engine.close()));
    for (let life = 0; life < 3; life++) {
      const stores = world.stores.map((store) => prefixStore(store, `life ${life}`));
      if (life > 0) {
        const engines = await Promise.all(
          stores.map((store, rank) =>
            openPortableEngine({
              transport: world.transports[rank]!,
              store,
              ranks: [0, 1],
              rank,
              name: 'world',
              timeoutMs: 5000,
            }),
          ),
        );
        expect(await sumOver(engines, 1, [life, 1])).toEqual([life + 1, life + 1]);
        await Promise.all(engines.map((engine) => engine.close()));
      }
      for (const store of stores) await store.close();
    }
  });
});

describe('opening', () => {
  it('refuses what makes no sense, naming it', async () => {
    await using world = await World.open({ size: 2, stagingBytes: SMALL_STAGING });
    const open = (change: object): Promise<GroupEngine> =>
      openPortableEngine({
        transport: world.transports[0]!,
        store: world.stores[0]!,
        ranks: [0, 1],
        rank: 0,
        name: 'g',
        timeoutMs: 1000,
        ...change,
      });
    for (const change of [{ rank: 2 }, { rank: 1 }, { ranks: [0, 0] }, { ranks: [0, 2] }, { stagingBytes: 2 ** 20 }]) {
      await expect(open(change), JSON.stringify(change)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    }
    await expect(open({ rank: 1, transport: world.transports[1]!, name: 'nobody' })).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
    });
  });

  it('says how much staging, and how many groups, would do', async () => {
    const needed = smallestSection(4);
    await expect(World.open({ size: 4, stagingBytes: 4096 })).rejects.toMatchObject({
      code: 'EP_CAPACITY',
      context: { needed },
    });
    expect(layOut(needed, 4).slotBytes).toBeGreaterThan(0);
    expect(() => layOut(needed - 2 * 4 * 64, 4)).toThrow(expect.objectContaining({ code: 'EP_CAPACITY' }));
    // The hostile transport has 1024 words.
    await expect(World.open({ size: 3, stagingBytes: SMALL_STAGING, maxGroups: 400 })).rejects.toMatchObject({
      code: 'EP_CAPACITY',
      context: { fits: 341 },
    });
  });
});
