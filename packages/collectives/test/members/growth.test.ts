/** Groups over a transport of which not all places are taken at first. In one thread; processes are in test/elastic. */
import { CloseScope, memoryStore, type Store } from '@ep/core';
import { nvshmem, type ShmTransport } from '@ep/nvshmem';
import { expect, it } from 'vitest';
import { type InitOptions, initProcessGroup, type ProcessGroup } from '../../src/index.js';

const { signal } = new AbortController();

class World implements AsyncDisposable {
  readonly transports = new Map<number, ShmTransport>();
  readonly #size: number;
  readonly #scope = new CloseScope();
  readonly #root = this.#scope.add(memoryStore());

  constructor(size: number) {
    this.#size = size;
  }

  store(): Store {
    return this.#scope.add(this.#root.handle());
  }

  async open(activeRanks: readonly number[]): Promise<void> {
    const config = { activeRanks };
    await Promise.all(
      activeRanks.map(async (rank) => {
        const member = { rank, worldSize: this.#size, store: this.store() };
        this.transports.set(rank, this.#scope.add(await nvshmem.shm.open(member, { signal, config })));
      }),
    );
  }

  async letIn(...joining: readonly number[]): Promise<void> {
    const staying = [...this.transports.values()].filter(({ rank }) => !joining.includes(rank));
    const coming = joining.map((rank) => {
      const member = { rank, worldSize: this.#size, store: this.store() };
      return nvshmem.shm.rejoin(member, { signal });
    });
    await Promise.all(staying.map((of) => of.readmit({ store: this.store(), joining })));
    for (const of of await Promise.all(coming)) this.transports.set(of.rank, this.#scope.add(of));
  }

  async lose(rank: number): Promise<void> {
    await this.transports.get(rank)!.close();
    this.transports.delete(rank);
  }

  async group(rank: number, options: Partial<InitOptions> = {}): Promise<ProcessGroup> {
    const backend = this.transports.get(rank)!;
    return this.#scope.add(await initProcessGroup({ backend, store: this.store(), timeoutMs: 10_000, ...options }));
  }

  groups(ranks: readonly number[], options: Partial<InitOptions> = {}): Promise<ProcessGroup[]> {
    return Promise.all(ranks.map((rank) => this.group(rank, options)));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.#scope.close();
  }
}

/** Small, and of many chunks; lists are as long as the group has ranks. */
async function worksOver(groups: readonly ProcessGroup[]): Promise<void> {
  const ranks = groups.map(({ rank }) => rank);
  const sum = ranks.reduce((total, rank) => total + 2 ** rank, 0);
  for (const length of [1, 100_000]) {
    await Promise.all(
      groups.map(async (group) => {
        const data = new Float64Array(length).fill(2 ** group.rank);
        const work = group.allReduce(data);
        await work;
        expect([[...work.contributors], data[0], data[length - 1]]).toEqual([ranks, sum, sum]);
        const outputs = Array.from({ length: group.size }, () => new Int32Array(1).fill(-1));
        await group.allGather(outputs, Int32Array.of(group.rank));
        expect(outputs.map(([one]) => one)).toEqual(outputs.map((_, rank) => (ranks.includes(rank) ? rank : -1)));
      }),
    );
  }
}

async function takeIn(members: readonly ProcessGroup[], comers: readonly ProcessGroup[]): Promise<ProcessGroup[]> {
  const ranks = comers.map(({ rank }) => rank);
  await Promise.all([
    ...comers.map((group) => group.joinGroup()),
    ...members.map(async (group) => {
      while ((await group.peerState(ranks)).some((state) => state !== 'joining'));
      await group.recoverRanks(ranks);
    }),
  ]);
  return [...members, ...comers].sort((a, b) => a.rank - b.rank);
}

it('grows into the places of a transport while it works, and into those of who has gone', async () => {
  await using world = new World(5);
  await world.open([0, 1]);
  const sizes = { worldSize: 2, maxGroupSize: 5 };
  let groups = await world.groups([0, 1], sizes);
  await worksOver(groups);
  expect(groups.map(({ size }) => size)).toEqual([2, 2]);
  const statesOf = (ranks: readonly number[]) => Promise.all(groups.map((group) => group.peerState(ranks)));
  for (const states of await statesOf([0, 4])) expect(states).toEqual(['active', 'absent']);
  for (const group of groups) {
    expect(() => group.extendGroupSizeTo(6)).toThrow('size must be an integer from 2 to 5, found 6');
    await expect(group.recoverRanks([2])).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  }
  await Promise.all(groups.map((group) => group.extendGroupSizeTo(4)));
  for (const group of groups) expect([group.size, group.ranks, group.epoch]).toEqual([4, [0, 1, 2, 3], 1]);
  await Promise.all(groups.map((group) => group.extendGroupSizeTo(4)));
  for (const group of groups) expect(group.epoch).toBe(1);
  await worksOver(groups);
  await world.letIn(3);
  for (const states of await statesOf([3])) expect(states).toEqual(['absent']);
  const third = await world.group(3, { ...sizes, isExtension: true });
  expect(third.activeRanks).toEqual([3]);
  groups = await takeIn(groups, [third]);
  expect(third.size).toBe(4);
  for (const group of groups) expect(group.epoch).toBe(2);
  await worksOver(groups);
  await Promise.all(groups.map((group) => group.extendGroupSizeTo(5)));
  await world.letIn(2, 4);
  groups = await takeIn(
    groups,
    await Promise.all([2, 4].map((rank) => world.group(rank, { ...sizes, isExtension: true }))),
  );
  await worksOver(groups);
  for (const group of groups) expect([group.size, group.activeRanks]).toEqual([5, [0, 1, 2, 3, 4]]);
  const made = await Promise.all(groups.map((group) => group.newGroup([4, 0, 2])));
  await Promise.all(made.map((group) => group?.barrier()));
  // Others come in the place of one that came later, and of one that was there from the beginning.
  for (const rank of [4, 0]) {
    await world.lose(rank);
    groups = groups.filter((group) => group.rank !== rank);
    for (const end of await Promise.allSettled(groups.map((group) => group.barrier()))) {
      expect(end).toMatchObject({ reason: { code: 'EP_PEER_LOST', context: { lost: [rank] } } });
    }
    await world.letIn(rank);
    groups = await takeIn(groups, [await world.group(rank, { ...sizes, isExtension: true })]);
    await worksOver(groups);
  }
});

it('begins with those that are here, whoever that is, and members are found without rank 0', async () => {
  await using world = new World(4);
  await world.open([1, 3]);
  let groups = await world.groups([1, 3]);
  for (const group of groups) expect([group.size, group.activeRanks]).toEqual([4, [1, 3]]);
  await worksOver(groups);
  await world.letIn(0);
  groups = await takeIn(groups, [await world.group(0, { isExtension: true })]);
  await worksOver(groups);
});

it('is opened by who came later as well, first or not, and before the others have one or after', async () => {
  await using world = new World(3);
  await world.open([0, 1]);
  await world.letIn(2);
  // All at once, and the first group over the transport: all of them make its memory.
  const first = { name: 'first', activeRanks: [0, 1] };
  const opened = await Promise.all([
    ...[0, 1].map((rank) => world.group(rank, first)),
    world.group(2, { ...first, isExtension: true }),
  ]);
  await worksOver(await takeIn(opened.slice(0, 2), opened.slice(2)));
  await world.lose(2);
  for (const end of await Promise.allSettled(opened.slice(0, 2).map((group) => group.barrier()))) {
    expect(end).toMatchObject({ reason: { code: 'EP_PEER_LOST' } });
  }
  // The first one that it opens is not the first that the others have.
  const second = await world.groups([0, 1], { name: 'second', activeRanks: [0, 1] });
  await world.letIn(2);
  await worksOver(await takeIn(second, [await world.group(2, { name: 'second', isExtension: true })]));
  await worksOver(await takeIn(opened.slice(0, 2), [await world.group(2, { name: 'first', isExtension: true })]));
});

it('gives its memory back although nobody has come into some of its places, or somebody came later', async () => {
  await using world = new World(3);
  await world.open([0, 1]);
  // More often than a transport has room for groups.
  for (let round = 0; round < 24; round++) {
    let groups = await world.groups([0, 1], { worldSize: 2, maxGroupSize: 3 });
    if (round % 4 === 1) {
      await Promise.all(groups.map((group) => group.extendGroupSizeTo(3)));
      const comer = await world.group(2, { worldSize: 2, maxGroupSize: 3, isExtension: true });
      groups = await takeIn(groups, [comer]);
    }
    await Promise.all(groups.map((group) => group.barrier()));
    await Promise.all(groups.map((group) => group.destroy()));
    if (round === 0) await world.letIn(2);
  }
});

it('refuses at once who comes with another maxGroupSize, and takes who says nothing of it', async () => {
  await using world = new World(4);
  await world.open([0, 1]);
  let groups = await world.groups([0, 1], { worldSize: 2, maxGroupSize: 3 });
  await world.letIn(2, 3);
  const before = performance.now();
  for (const [rank, sizes, message] of [
    [2, { maxGroupSize: 4 }, 'maxGroupSize must be 3, as rank 0 has it, which opened the group first; rank 2 has 4'],
    [3, {}, 'rank must be less than 3, the maxGroupSize of the others, found 3'],
  ] as const) {
    const coming = world.group(rank, { worldSize: 2, ...sizes, isExtension: true, timeoutMs: 60_000 });
    await expect(coming).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringContaining(message),
    });
  }
  expect(performance.now() - before).toBeLessThan(10_000);
  await Promise.all(groups.map((group) => group.extendGroupSizeTo(3)));
  groups = await takeIn(groups, [await world.group(2, { worldSize: 2, isExtension: true })]);
  await worksOver(groups);
});

it('says what cannot be', async () => {
  await using world = new World(4);
  await world.open([0, 1]);
  const refusals = [
    [{ activeRanks: [0, 1, 2] }, { code: 'EP_NOT_READY', context: { ranks: [2] } }],
    [{ maxGroupSize: 5 }, { code: 'EP_UNSUPPORTED' }],
    [{ worldSize: 2 }, { code: 'EP_INVALID_ARGUMENT' }],
    [{ worldSize: 3, maxGroupSize: 2 }, { code: 'EP_INVALID_ARGUMENT' }],
    [{ worldSize: 5, maxGroupSize: 5 }, { code: 'EP_UNSUPPORTED' }],
  ] as const;
  for (const [options, error] of refusals) await expect(world.group(0, options)).rejects.toMatchObject(error);
  const groups = await world.groups([0, 1], { worldSize: 2, maxGroupSize: 4 });
  // Other sizes are named.
  const ends = await Promise.allSettled([groups[0]!.extendGroupSizeTo(3), groups[1]!.extendGroupSizeTo(4)]);
  for (const end of ends) expect(end).toMatchObject({ reason: { code: 'EP_MISMATCH' } });
});
