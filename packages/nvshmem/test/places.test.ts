/** Worlds of which not all ranks are there at first, and how the others come. In one thread; ranks that are killed on the way are in test/worlds. */
import { CloseScope, memoryStore, type Rank, type Store } from '@ep/core';
import { nvshmem, type ShmConfig, type ShmTransport, shmemOn } from '@ep/nvshmem';
import { describe, expect, it } from 'vitest';

const { signal } = new AbortController();

class World implements AsyncDisposable {
  readonly worldSize: number;
  readonly transports = new Map<Rank, ShmTransport>();
  readonly #scope = new CloseScope();
  readonly #root = this.#scope.add(memoryStore());

  constructor(worldSize: number) {
    this.worldSize = worldSize;
  }

  get here(): readonly ShmTransport[] {
    return [...this.transports.values()].sort((a, b) => a.rank - b.rank);
  }

  store(): Store {
    return this.#scope.add(this.#root.handle());
  }

  open(rank: Rank, config: ShmConfig, timeoutMs = 10_000): Promise<ShmTransport> {
    return this.#enter(
      rank,
      nvshmem.shm.open({ rank, worldSize: this.worldSize, store: this.store() }, { signal, config, timeoutMs }),
    );
  }

  openAll(activeRanks: readonly Rank[]): Promise<readonly ShmTransport[]> {
    return Promise.all(activeRanks.map((rank) => this.open(rank, { activeRanks })));
  }

  rejoin(rank: Rank, timeoutMs = 10_000): Promise<ShmTransport> {
    return this.#enter(
      rank,
      nvshmem.shm.rejoin({ rank, worldSize: this.worldSize, store: this.store() }, { signal, timeoutMs }),
    );
  }

  /** What those that are here do. */
  readmit(joining: readonly Rank[], more: { readonly timeoutMs?: number; readonly without?: readonly Rank[] } = {}) {
    const { without = [] } = more;
    const staying = this.here.filter(({ rank }) => !joining.includes(rank) && !without.includes(rank));
    return Promise.allSettled(staying.map((of) => of.readmit({ store: this.store(), joining, ...more })));
  }

  async letIn(...joining: readonly Rank[]): Promise<void> {
    const ends = this.readmit(joining);
    await Promise.all(joining.map((rank) => this.rejoin(rank)));
    for (const end of await ends) expect(end).toEqual({ status: 'fulfilled', value: undefined });
  }

  async lose(rank: Rank): Promise<void> {
    await this.transports.get(rank)!.close();
    this.transports.delete(rank);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.#scope.close();
  }

  async #enter(rank: Rank, opening: Promise<ShmTransport>): Promise<ShmTransport> {
    const transport = this.#scope.add(await opening);
    this.transports.set(rank, transport);
    return transport;
  }
}

/** Every rank that is here writes to every other one, and sees what those have written. */
async function allReachAll({ here }: World): Promise<void> {
  const memories = await Promise.all(here.map((of) => of.allocate({ byteLength: 1024, signalSlots: 16 })));
  await Promise.all(
    here.map(async (of, at) => {
      const memory = memories[at]!;
      memory.view('u32', 512, 1)[0] = 100 + of.rank;
      for (const { rank } of here) {
        const endpoint = await of.connect(rank);
        await endpoint.put(memory.local(512, 4), memory.remote(rank, 8 * of.rank, 4), {
          signal: { slot: of.rank, op: 'add', value: 1n },
        });
        await endpoint.flush();
      }
    }),
  );
  await Promise.all(
    here.flatMap(({ rank }, at) =>
      here.map(async (of, source) => {
        const memory = memories[at]!;
        await memory.signals.until(of.rank, { cmp: 'ge', value: 1n });
        expect(memory.view('u32', 8 * of.rank, 1)[0], `${source} to ${rank}`).toBe(100 + of.rank);
      }),
    ),
  );
  await Promise.all(here.map((of) => of.barrier()));
  await Promise.all(memories.map((memory) => memory.close()));
}

const empty = (rank: Rank) => ({
  code: 'EP_NOT_READY',
  message: expect.stringContaining(`rank ${rank}`),
  context: { ranks: [rank] },
});

describe('places in which nobody is yet', () => {
  it('are none of those that are here: nobody waits for them, and nothing goes there', async () => {
    await using world = new World(8);
    await world.openAll([6, 1, 2]);
    for (const of of world.here)
      expect([of.worldSize, [...of.world.ranks], of.world.position]).toEqual([
        8,
        [1, 2, 6],
        [1, 2, 6].indexOf(of.rank),
      ]);
    await allReachAll(world);
    const [one] = world.here as [ShmTransport];
    expect([one.lostRanks(), one.failed.aborted, one.succession!.lifeOf(5)]).toEqual([[], false, '']);
    expect(one.succession!.lifeOf(2)).not.toBe('');
    const memories = await Promise.all(world.here.map((of) => of.allocate({ byteLength: 64, signalSlots: 1 })));
    const memory = memories[0]!;
    const endpoint = await one.connect(5);
    const refusals = [
      () => endpoint.put(memory.local(0, 8), memory.remote(5, 0, 8)),
      () => endpoint.putValue(memory.remote(5, 0, 8), 1n),
      () => endpoint.get(memory.remote(5, 0, 8), memory.local(0, 8)),
      () => endpoint.signal(memory, { slot: 0, op: 'add', value: 1n }),
      () => endpoint.submit([{ kind: 'signal', memory, signal: { slot: 0, op: 'add', value: 1n } }])[0]!,
      () => endpoint.flush(),
    ];
    for (const refused of refusals) await expect((async () => refused())()).rejects.toMatchObject(empty(5));
    expect(() => memory.peerView(5, 'u8', 0, 8)).toThrow(expect.objectContaining(empty(5)));
    // A wait for one of them ends at once; one for whoever may come does not.
    const wait = (peers?: readonly Rank[]) =>
      memory.signals.until(0, { cmp: 'ge', value: 1n }, { timeoutMs: 200, ...(peers && { peers }) });
    await expect(wait([5])).rejects.toMatchObject({
      code: 'EP_PEER_LOST',
      message: expect.stringContaining('nobody is in the place of rank 5 yet; awaited a value ge 1, found 0'),
      context: { lost: [5] },
    });
    await expect(wait()).rejects.toMatchObject({ code: 'EP_TIMEOUT' });
    expect([one.lostRanks(), one.failed.aborted]).toEqual([[], false]);
    await expect(shmemOn(one, { heapBytes: 4096 })).rejects.toMatchObject({
      code: 'EP_NOT_READY',
      context: { ranks: [0, 3, 4, 5, 7] },
    });
    // Who is left alone waits for nobody any more.
    await world.lose(2);
    await world.lose(6);
    await expect(wait()).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
  });

  it('are taken one at a time, several at once, and again when who came has gone', async () => {
    await using world = new World(6);
    await world.openAll([1, 3]);
    const kept = await Promise.all(world.here.map((of) => of.allocate({ byteLength: 64, signalSlots: 1 })));
    await world.letIn(5);
    await allReachAll(world);
    await world.letIn(0, 2, 4);
    for (const of of world.here) expect([...of.world.ranks]).toEqual([0, 1, 2, 3, 4, 5]);
    await allReachAll(world);
    for (let round = 0; round < 3; round++) {
      await world.lose(5);
      await world.lose(1);
      await world.letIn(1, 5);
      await allReachAll(world);
      for (const of of world.here) expect([of.lostRanks(), of.failed.aborted]).toEqual([[], false]);
    }
    // Memory of before is renewed by who has it.
    const three = world.transports.get(3)!;
    const said = { facts: new Uint8Array(1), check: () => {}, settle: () => {}, byteLength: 64, signalSlots: 1 };
    const renewed = await Promise.all(
      world.here.map((of) => of.renew({ ...said, ...(of === three && { memory: kept[1]! }) })),
    );
    const endpoint = await three.connect(5);
    await endpoint.signal(kept[1]!, { slot: 0, op: 'add', value: 9n });
    expect(renewed[5]!.signals.peek(0)).toBe(9n);
  });

  it('stay empty where nobody comes, or who comes is refused, and nobody is taken for lost', async () => {
    await using world = new World(4);
    await world.openAll([0, 1]);
    for (const end of await world.readmit([2], { timeoutMs: 300 })) {
      expect(end).toMatchObject({
        reason: { code: 'EP_TIMEOUT', message: expect.stringMatching(/rank 2 did not come/) },
      });
    }
    const odd = nvshmem.shm.rejoin(
      { rank: 2, worldSize: 4, store: world.store() },
      { signal, config: { ranksOnHost: 3 } },
    );
    const [refused, ...ends] = await Promise.all([odd.catch((error: unknown) => error), world.readmit([2])]);
    expect(refused).toMatchObject({ code: 'EP_RENDEZVOUS' });
    for (const end of ends.flat()) expect(end).toMatchObject({ reason: { code: 'EP_RENDEZVOUS' } });
    for (const of of world.here)
      expect([of.lostRanks(), of.failed.aborted, of.succession!.lifeOf(2)]).toEqual([[], false, '']);
    await allReachAll(world);
    await world.letIn(2);
    await allReachAll(world);
  });

  it('are empty again for all when who was there is given up', async () => {
    await using world = new World(4);
    await world.openAll([0, 1, 2]);
    await world.lose(2);
    const ends = world.readmit([3], { without: [2] });
    await world.rejoin(3);
    for (const end of await ends) expect(end.status).toBe('fulfilled');
    for (const of of world.here) {
      expect([[...of.world.ranks], of.lostRanks(), of.succession!.lifeOf(2)]).toEqual([[0, 1, 3], [], '']);
      await expect((await of.connect(2)).flush()).rejects.toMatchObject(empty(2));
    }
    await allReachAll(world);
    await world.letIn(2);
    await allReachAll(world);
  });

  it('are named alike by all who open the world', async () => {
    await using world = new World(4);
    const config = (activeRanks: unknown) => ({ activeRanks }) as ShmConfig;
    for (const wrong of [[], [0, 0], [0, 4], [0, -1], [0.5], 'all', [1, 2]]) {
      await expect(world.open(0, config(wrong))).rejects.toMatchObject({
        code: 'EP_INVALID_ARGUMENT',
        message: expect.stringContaining('activeRanks'),
      });
    }
    const ends = await Promise.allSettled([
      world.open(0, config([0, 1, 2])),
      world.open(1, config([0, 1, 2])),
      world.open(2, config([0, 2])),
    ]);
    for (const end of ends) {
      expect(end).toMatchObject({
        reason: { code: 'EP_RENDEZVOUS', message: expect.stringMatching(/rank 2 of 3 differ.*active ranks is "0 2"/) },
      });
    }
    await using late = new World(4);
    await expect(late.open(2, config([2, 3]), 200)).rejects.toMatchObject({
      code: 'EP_RENDEZVOUS',
      context: { ranks: [3] },
    });
  });
});
