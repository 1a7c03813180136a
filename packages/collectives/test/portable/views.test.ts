/** Rounds and carried calls of those who are left, after losses and repairs: the same as those of the beginning had, in places where nobody else writes. */
import { memoryStore, type RoundsOptions } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import { describe, expect, it, vi } from 'vitest';
import type { Elements, OpKind } from '../../src/engine.js';
import { Placement } from '../../src/portable/placement.js';
import { Sections } from '../../src/portable/sections.js';
import { ViewRounds } from '../../src/portable/view-rounds.js';
import { blocks, KINDS, make, sameBytes } from './calls.js';
import { Counts } from './carrier-counts.js';
import { type Call, LOOPBACK, pause, rejection, World, type WorldOptions } from './world.js';

const probe = await nvshmem.fabric.probe(LOOPBACK);
const unavailable = probe.available ? '' : ` (${probe.reason})`;
const TWO_BY_TWO = [0, 0, 1, 1];
/** Elements of f32 that are several steps of a carrier. */
const LONG = 300_001;
/** Calls after which those of the last view would be carried, if they ever were. */
const MANY = 60;

const sumOf = (array: Elements, others: Partial<Call> = {}): Call => ({
  kind: 'all-reduce',
  dtype: 'f32',
  reduceOp: 'sum',
  inputs: [array],
  outputs: [array],
  ...others,
});

/** Makes calls until one is carried by all of these ranks. */
async function untilCarried(world: World, counts: Counts, ranks: readonly number[]): Promise<void> {
  const array = new Float32Array(200);
  for (let i = 0; i < 4000; i++) {
    const before = counts.begun;
    await world.all(() => sumOf(array.slice()), ranks);
    if (counts.begun - before === ranks.length) return;
  }
  expect.fail('no call was carried');
}

async function carried(counts: Counts, options: Partial<WorldOptions> = {}): Promise<World> {
  const world = await World.open({ kind: 'fabric', size: 4, hosts: TWO_BY_TWO, wrap: counts.wrap, ...options });
  await untilCarried(world, counts, [...Array(world.size).keys()]);
  return world;
}

/** A call among some ranks of the group, whose arrays for the others nobody reads or writes. */
async function checkAmong(world: World, ranks: readonly number[], kind: OpKind, length: number, seed: number) {
  const size = ranks.length;
  const made = kind === 'all-to-all' ? blocks(size, length) : make(kind, 'f32', size, length, seed % size, seed);
  const spread = (arrays: readonly Elements[]): readonly Elements[] =>
    arrays.length !== size
      ? arrays
      : Array.from({ length: world.size }, (_, rank) => arrays[ranks.indexOf(rank)] ?? arrays[0]!);
  const call = (rank: number): Call => {
    const { inputs = [], outputs = [], root = -1, ...rest } = made.call(ranks.indexOf(rank));
    return { ...rest, inputs: spread(inputs), outputs: spread(outputs), root: root < 0 ? root : ranks[root]! };
  };
  const ends = await world.all(call, ranks);
  for (const { contributors } of ends) expect(contributors).toEqual(ranks);
  for (const at of ranks.keys()) {
    const [found, expected] = [made.found(at), made.expected(at)];
    if (!found.every((one, i) => sameBytes(one, expected[i]!))) expect(found).toEqual(expected);
  }
}

/** All kinds, small ones too, of which those that are large are carried. */
async function checkCarried(world: World, counts: Counts, ranks: readonly number[], seed: number): Promise<void> {
  for (const kind of KINDS) {
    for (const length of [20, 1000, 70_000]) {
      const before = counts.begun;
      await checkAmong(world, ranks, kind, length, seed + length);
      const isCarried = kind !== 'barrier' && length > 20;
      expect([kind, length, counts.begun - before]).toEqual([kind, length, isCarried ? ranks.length : 0]);
    }
  }
}

/** The call that tells of the loss. */
async function lose(world: World, victim: number, survivors: readonly number[]): Promise<void> {
  await world.lose(victim);
  const ends = await world.settled(() => ({ kind: 'barrier' }), survivors);
  for (const rank of survivors.keys()) expect(ends[rank]).toMatchObject(rejection('EP_PEER_LOST', { lost: [victim] }));
}

it('two halves of a group that lose each other have rounds of their own, also where they reach one store', async () => {
  const size = 4;
  const [low, high] = [
    [0, 1],
    [2, 3],
  ] as const;
  const store = memoryStore();
  const opened: RoundsOptions[] = [];
  const ranks = [...Array(size).keys()];
  const views = ranks.map((rank) => {
    const open = (options: RoundsOptions): object => {
      opened[rank] = options;
      return { close: () => Promise.resolve() };
    };
    const maker = { mostMembers: size, mostBytes: 1024, part: () => Uint8Array.of(rank), open };
    const transport = { rank, hosts: undefined };
    const spare = new Sections({ transport, store, count: 2 });
    const arena = { rounds: { maker, memory: {}, carriers: undefined }, spare, sparePlace: (place: object) => place };
    const options = { transport, ranks, rank, store, name: 'halves', hosts: [0, 0, 0, 0] };
    const section = { index: 0, token: '0', members: size };
    const placement = new Placement(options.hosts, rank);
    return new ViewRounds({ options, arena, section, key: 'halves', placement } as never, ranks);
  });
  for (const members of [low, high]) for (const rank of members) views[rank]!.renew(members, 1);
  await vi.waitUntil(() => views.every((view) => view.current()?.ready === true));
  const place = ({ group, token, leader }: RoundsOptions) => ({ group, token, leader: leader[0] });
  for (const [a, b] of [low, high]) {
    expect(place(opened[b]!)).toEqual(place(opened[a]!));
    expect(place(opened[a]!).leader).toBe(a);
  }
  expect(opened[0]!.group).not.toBe(opened[2]!.group);
  await Promise.all(views.map((view) => view.close()));
  await store.close();
});

describe.skipIf(unavailable)(`those who are left${unavailable}`, () => {
  it.each([
    [TWO_BY_TWO, [1, 3]],
    [TWO_BY_TWO, [0]],
    [
      [0, 1, 2, 3],
      [0, 3],
    ],
    [
      [3, 1, 3, 1, 2],
      [2, 0],
    ],
  ])('have their calls carried, on hosts %j without %j in turn', async (hosts, victims) => {
    const counts = new Counts();
    await using world = await carried(counts, { hosts, size: hosts.length });
    let survivors = [...hosts.keys()];
    for (const victim of victims) {
      survivors = survivors.filter((rank) => rank !== victim);
      await lose(world, victim, survivors);
      await untilCarried(world, counts, survivors);
      await checkCarried(world, counts, survivors, victim);
    }
  });

  it('have them carried where one was lost within one', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const from = counts.turns + 10;
    let lost: Promise<void> | undefined;
    counts.onTurn = () => {
      if (counts.turns === from) lost = world.lose(2);
    };
    const arrays = TWO_BY_TWO.map(() => new Float32Array(4 * LONG));
    const ends = await world.settled((rank) => sumOf(arrays[rank]!));
    await lost;
    const survivors = [0, 1, 3];
    for (const rank of survivors) expect(ends[rank]).toMatchObject(rejection('EP_PEER_LOST', { lost: [2] }));
    await untilCarried(world, counts, survivors);
    await checkCarried(world, counts, survivors, 7);
  });

  it('have them carried where all go on behind one that a rank gave up', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const ranks = [0, 1, 2, 3];
    for (const odd of [2, 0]) {
      const giving = new AbortController();
      const from = counts.turns + 10;
      counts.onTurn = () => {
        if (counts.turns === from) giving.abort(new Error('enough'));
      };
      const arrays = ranks.map(() => new Float32Array(4 * LONG));
      const ends = await world.settled((rank) => sumOf(arrays[rank]!, rank === odd ? { signal: giving.signal } : {}));
      for (const { status } of ends) expect(status).toBe('rejected');
      await Promise.all(ranks.map((rank) => world.repair(rank)));
      await untilCarried(world, counts, ranks);
      await checkCarried(world, counts, ranks, odd);
    }
  });

  it('have places of their own each time, where nobody writes who was taken out alive', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    let survivors = [0, 1, 2, 3];
    for (const odd of [3, 0]) {
      survivors = survivors.filter((rank) => rank !== odd);
      await Promise.all(survivors.map((rank) => world.repair(rank, [odd])));
      await untilCarried(world, counts, survivors);
      await checkCarried(world, counts, survivors, odd);
    }
    for (const rank of survivors) {
      const { rounds, carriers } = counts.places[rank]!;
      expect(new Set(rounds).size).toBe(3);
      expect(carriers).toEqual(rounds);
    }
  });

  it('go on without where no place is left', async () => {
    const counts = new Counts();
    await using world = await carried(counts, { hosts: [0, 1, 2, 3], maxGroups: 1 });
    await lose(world, 3, [0, 1, 2]);
    await untilCarried(world, counts, [0, 1, 2]);
    await lose(world, 0, [1, 2]);
    const before = counts.begun;
    for (let i = 0; i < MANY; i++) await checkAmong(world, [1, 2], 'all-reduce', 1000, i);
    await pause(1500);
    await checkAmong(world, [1, 2], 'all-to-all', 70_000, 1);
    expect(counts.begun).toBe(before);
  });

  it('give their places back, but those where one that is gone may still write', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const [store] = world.stores;
    const taken = async (): Promise<number> => {
      let found = 0;
      for (let place = 0; place < 4; place++) {
        const key = `collectives/spare/collectives/sections/${place}`;
        if (!(await store!.check([key]))) continue;
        const record = JSON.parse(Buffer.from(await store!.get(key)).toString()) as { token?: string };
        if (record.token !== undefined) found++;
      }
      return found;
    };
    const survivors = [0, 2, 3];
    await lose(world, 1, survivors);
    // More often than there are places.
    for (let i = 0; i < 6; i++) {
      await untilCarried(world, counts, survivors);
      await Promise.all(survivors.map((rank) => world.repair(rank)));
    }
    // And one behind the other.
    for (let i = 0; i < 6; i++) await Promise.all(survivors.map((rank) => world.repair(rank)));
    await untilCarried(world, counts, survivors);
    await vi.waitUntil(async () => (await taken()) === 1, { timeout: 5000 });
    await lose(world, 2, [0, 3]);
    await untilCarried(world, counts, [0, 3]);
    expect(await taken()).toBe(2);
    await Promise.all([0, 3].map((rank) => world.engines[rank]!.close()));
    expect(await taken()).toBe(1);
  });

  it('have them carried with one that comes later', async () => {
    const counts = new Counts();
    const members = [0, 2, 3];
    const options = { kind: 'fabric', size: 4, hosts: TWO_BY_TWO, active: members } as const;
    await using world = await World.open({ ...options, wrap: counts.wrap });
    await untilCarried(world, counts, members);
    await Promise.all([world.takeIn(members, [1]), world.join(1)]);
    await untilCarried(world, counts, [0, 1, 2, 3]);
    await checkCarried(world, counts, [0, 1, 2, 3], 1);
  });

  it('have them carried with those who come back, again and again', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const all = [0, 1, 2, 3];
    for (const odd of [3, 0, 3, 1, 2, 0]) {
      const others = all.filter((rank) => rank !== odd);
      await Promise.all(others.map((rank) => world.repair(rank, [odd])));
      await untilCarried(world, counts, others);
      await Promise.all([world.takeIn(others, [odd]), world.join(odd)]);
      await untilCarried(world, counts, all);
      await checkCarried(world, counts, all, odd);
    }
  });
});
