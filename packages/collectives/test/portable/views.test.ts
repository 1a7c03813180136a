/** Rounds and carried calls of those who are left, after losses and repairs: the same as those of the beginning had, in places where nobody else writes. */
import { memoryStore, type RoundMaker, type RoundsOptions, type Store } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import { describe, expect, it, vi } from 'vitest';
import type { Elements, OpKind } from '../../src/engine.js';
import { orderOf } from '../../src/portable/fold-order.js';
import { Placement } from '../../src/portable/placement.js';
import { Sections } from '../../src/portable/sections.js';
import { ViewRounds } from '../../src/portable/view-rounds.js';
import { blocks, holds, KINDS, make } from './calls.js';
import { Counts, LONG, nested, sumOf, TWO_BY_TWO } from './carrier-counts.js';
import { type Call, LOOPBACK, pause, rejection, World, type WorldOptions } from './world.js';

const probe = await nvshmem.fabric.probe(LOOPBACK);
const unavailable = probe.available ? '' : ` (${probe.reason})`;
/** Calls after which those of the last view would be carried, if they ever were. */
const MANY = 60;

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
  holds(made, size);
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

/** Places that views have of their own. */
async function placesTaken({ stores }: World): Promise<number> {
  const [store] = stores;
  let found = 0;
  for (let place = 0; place < 4; place++) {
    const key = `collectives/spare/collectives/sections/${place}`;
    if (!(await store!.check([key]))) continue;
    const record = JSON.parse(Buffer.from(await store!.get(key)).toString()) as { token?: string };
    if (record.token !== undefined) found++;
  }
  return found;
}

/** The call that tells of the loss. */
async function lose(world: World, victim: number, survivors: readonly number[]): Promise<void> {
  await world.lose(victim);
  const ends = await world.settled(() => ({ kind: 'barrier' }), survivors);
  for (const rank of survivors.keys()) expect(ends[rank]).toMatchObject(rejection('EP_PEER_LOST', { lost: [victim] }));
}

interface Rank {
  readonly rank: number;
  readonly views: ViewRounds;
  /** Agrees on another view. */
  readonly renew: (active: readonly number[], epoch: number) => void;
  /** What its rounds were opened with last. */
  opened: RoundsOptions | undefined;
}

/** The views of a group of one host, over rounds that say nothing, with so many places. */
function viewsOf(
  size: number,
  places: number,
  store: Store,
  settle: RoundMaker['settle'] = () => Promise.resolve(),
): readonly Rank[] {
  const ranks = [...Array(size).keys()];
  const hosts = ranks.map(() => 0);
  return ranks.map((rank) => {
    const open = (options: RoundsOptions): object => {
      made.opened = options;
      return { close: () => Promise.resolve() };
    };
    const maker = { mostMembers: size, mostBytes: 1024, part: () => Uint8Array.of(rank), open, settle };
    const transport = { rank, hosts: undefined };
    const spare = new Sections({ transport, store, count: places });
    const arena = { rounds: { maker, memory: {}, carriers: undefined }, spare, sparePlace: (place: object) => place };
    const options = { transport, ranks, rank, store, name: 'views', hosts };
    const section = { index: 0, token: '0', members: size };
    const membership = { active: ranks as readonly number[], epoch: 0 };
    const placement = new Placement(hosts, rank);
    const views = new ViewRounds({ options, arena, section, key: 'views', placement, membership } as never);
    const renew = (active: readonly number[], epoch: number): void => {
      Object.assign(membership, { active, epoch });
      views.renew();
    };
    const made: Rank = { rank, views, renew, opened: undefined };
    return made;
  });
}

const isReady = ({ views }: Rank): boolean => views.current()?.ready === true;

describe('views', () => {
  it('of two halves of a group that lose each other have rounds of their own, also where they reach one store', async () => {
    const store = memoryStore();
    const ranks = viewsOf(4, 2, store);
    const halves = [ranks.slice(0, 2), ranks.slice(2)];
    for (const half of halves)
      for (const { renew } of half)
        renew(
          half.map(({ rank }) => rank),
          1,
        );
    await vi.waitUntil(() => ranks.every(isReady));
    const places = halves.map((half) => half.map(({ opened }) => ({ ...opened! })));
    for (const [at, [one, other]] of places.entries()) {
      expect({ group: other!.group, token: other!.token }).toEqual({ group: one!.group, token: one!.token });
      expect([one!.leader[0], other!.leader[0]]).toEqual([2 * at, 2 * at]);
    }
    expect(places[0]![0]!.group).not.toBe(places[1]![0]!.group);
    await Promise.all(ranks.map(({ views }) => views.close()));
    await store.close();
  });

  it('await a place that the view before has yet to give back', async () => {
    const store = memoryStore();
    const ranks = viewsOf(2, 1, store, () => pause(100));
    for (let epoch = 1; epoch < 5; epoch++) {
      for (const { renew } of ranks) renew([0, 1], epoch);
      await vi.waitUntil(() => ranks.every(isReady), { timeout: 5000 });
    }
    await Promise.all(ranks.map(({ views }) => views.close()));
    await store.close();
  });

  it('give back a place that a member has never come to use, which is gone', async () => {
    const store = memoryStore();
    const ranks = viewsOf(3, 1, store, (peer) => (peer === 2 ? Promise.reject(new Error('gone')) : Promise.resolve()));
    const others = ranks.slice(0, 2);
    for (const { renew } of others) renew([0, 1, 2], 1);
    await vi.waitUntil(() => others.every(({ opened }) => opened !== undefined));
    for (const { renew } of others) renew([0, 1], 2);
    await vi.waitUntil(() => others.every(isReady), { timeout: 5000 });
    await Promise.all(ranks.map(({ views }) => views.close()));
    await store.close();
  });

  it('give back a place that a member which has closed has never come to use', async () => {
    const store = memoryStore();
    for (let i = 0; i < 3; i++) {
      const ranks = viewsOf(2, 1, store);
      const epoch = 10 * i;
      for (const { renew } of ranks) renew([0, 1], epoch + 1);
      await Promise.all(ranks.map(({ views }) => views.close()));
      for (const { views } of ranks) await views.giveBack([true, true]);
      const later = viewsOf(2, 1, store);
      for (const { renew } of later) renew([0, 1], epoch + 2);
      await vi.waitUntil(() => later.every(isReady), { timeout: 5000 });
      await Promise.all(later.map(({ views }) => views.close()));
      for (const { views } of later) await views.giveBack([true, true]);
    }
    await store.close();
  });
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
      await vi.waitUntil(async () => (await placesTaken(world)) === 1, { timeout: 5000 });
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
    await vi.waitUntil(async () => (await placesTaken(world)) === 1, { timeout: 5000 });
    await lose(world, 2, [0, 3]);
    await untilCarried(world, counts, [0, 3]);
    expect(await placesTaken(world)).toBe(2);
    await Promise.all([0, 3].map((rank) => world.engines[rank]!.close()));
    expect(await placesTaken(world)).toBe(1);
  });

  it('await places that others give back, and give back those of a view that nobody has come to use', async () => {
    const counts = new Counts();
    await using world = await carried(counts, { maxGroups: 2 });
    const all = [0, 1, 2, 3];
    for (let i = 0; i < 6; i++) {
      await Promise.all(all.map((rank) => world.repair(rank)));
      await untilCarried(world, counts, all);
      const engines = await world.group(`other ${i}`, [3, 2, 1, 0]);
      const repair = { evicted: [], admitted: [], size: 0, repairs: true, timeoutMs: 20_000, sequence: 1 };
      await Promise.all(engines.map((engine) => engine.elastic!.change(repair)));
      await Promise.all(engines.map((engine) => engine.close()));
    }
    await vi.waitUntil(async () => (await placesTaken(world)) === 1, { timeout: 5000 });
  });

  it('end calls to and from a root that is gone alike, and have the next ones carried', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const survivors = [0, 2, 3];
    await lose(world, 1, survivors);
    await untilCarried(world, counts, survivors);
    for (const kind of ['broadcast', 'reduce', 'gather', 'scatter'] as const) {
      for (const length of [0, 20, 1000]) {
        const { call } = make(kind, 'f32', world.size, length, 1, length);
        const ends = await nested(world, counts, call, survivors);
        for (const end of ends) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [1] }));
        const before = counts.begun;
        await checkAmong(world, survivors, 'all-reduce', 1000, length);
        expect(counts.begun - before).toBe(survivors.length);
      }
    }
  });

  it('fold in one order, whether or not a call is carried, where the lowest rank of a host is gone', async () => {
    const counts = new Counts();
    const hosts = [0, 1, 2, 0, 0];
    await using world = await carried(counts, { hosts, size: hosts.length });
    const survivors = [1, 2, 3, 4];
    await lose(world, 0, survivors);
    await untilCarried(world, counts, survivors);
    const given = (rank: number, length: number): Float32Array =>
      new Float32Array(length).fill([0, 1e8, -1e8, 1, 0][rank]!);
    const order = orderOf(new Placement(hosts, 1), survivors);
    for (const length of [20, 1000]) {
      const expected = new Float32Array(length);
      const sources = survivors.map((rank) => given(rank, length));
      order('f32', 'sum', expected, sources);
      expect(expected[0]).toBe(1);
      const before = counts.begun;
      await world.all((rank) => sumOf(sources[survivors.indexOf(rank)]!), survivors);
      expect(counts.begun - before).toBe(length > 20 ? survivors.length : 0);
      for (const found of sources) expect(found).toEqual(expected);
    }
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
