/** Worlds of which not all ranks are there at first, and how the others come, over transports that let them in. In one thread; ranks that are killed on the way are in the suites of experts. */
import {
  type AllocateOptions,
  CloseScope,
  type Member,
  memoryStore,
  type OpenOptions,
  type Rank,
  type RenewOptions,
  type Store,
  type SymmetricMemory,
  type Transport,
} from '@ep/core';
import { describe, expect, it } from 'vitest';

/** What of such a transport the suite uses. */
export interface PlacedTransport extends Transport<'bundled' | 'add'> {
  readonly world: { readonly ranks: Iterable<Rank> };
  lostRanks(): readonly Rank[];
  barrier(): Promise<void>;
  readmit(options: {
    readonly store: Store;
    readonly joining: readonly Rank[];
    readonly without?: readonly Rank[];
    readonly timeoutMs?: number;
  }): Promise<void>;
}

export interface PlacesConfig {
  readonly activeRanks?: readonly Rank[];
  readonly ranksOnHost?: number;
}

export interface PlacedProvider {
  open(member: Member, options: OpenOptions<PlacesConfig>): Promise<PlacedTransport>;
  rejoin(member: Member, options: OpenOptions<PlacesConfig>): Promise<PlacedTransport>;
}

const { signal } = new AbortController();
const LIMIT_MS = 30_000;
const SIZE: AllocateOptions = { byteLength: 1024, signalSlots: 16 };

class PlacedWorld implements AsyncDisposable {
  readonly transports = new Map<Rank, PlacedTransport>();
  readonly #provider: PlacedProvider;
  readonly #worldSize: number;
  readonly #scope = new CloseScope();
  readonly #root = this.#scope.add(memoryStore());

  constructor(provider: PlacedProvider, worldSize: number) {
    this.#provider = provider;
    this.#worldSize = worldSize;
  }

  get here(): readonly PlacedTransport[] {
    return [...this.transports.values()].sort((a, b) => a.rank - b.rank);
  }

  member(rank: Rank): Member {
    return { rank, worldSize: this.#worldSize, store: this.store() };
  }

  store(): Store {
    return this.#scope.add(this.#root.handle());
  }

  open(rank: Rank, config: PlacesConfig, timeoutMs = LIMIT_MS): Promise<PlacedTransport> {
    return this.#enter(rank, this.#provider.open(this.member(rank), { signal, config, timeoutMs }));
  }

  openAll(activeRanks: readonly Rank[]): Promise<readonly PlacedTransport[]> {
    return Promise.all(activeRanks.map((rank) => this.open(rank, { activeRanks })));
  }

  rejoin(rank: Rank): Promise<PlacedTransport> {
    return this.#enter(rank, this.#provider.rejoin(this.member(rank), { signal, timeoutMs: LIMIT_MS }));
  }

  /** What those that are here do. */
  readmit(joining: readonly Rank[], more: { readonly timeoutMs?: number; readonly without?: readonly Rank[] } = {}) {
    const away = [...joining, ...(more.without ?? [])];
    const staying = this.here.filter(({ rank }) => !away.includes(rank));
    const limits = { timeoutMs: LIMIT_MS, ...more };
    return Promise.allSettled(staying.map((of) => of.readmit({ store: this.store(), joining, ...limits })));
  }

  async letIn(joining: readonly Rank[], without: readonly Rank[] = []): Promise<void> {
    const ends = this.readmit(joining, { without });
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

  async #enter(rank: Rank, opening: Promise<PlacedTransport>): Promise<PlacedTransport> {
    const transport = this.#scope.add(await opening);
    this.transports.set(rank, transport);
    return transport;
  }
}

/** Every rank that is here writes to every other one, and sees what those have written. `round`: above all before, in this memory. */
async function allReachAll(here: readonly PlacedTransport[], memories: ReadonlyMap<Rank, SymmetricMemory>, round = 1) {
  await Promise.all(
    here.map(async (of) => {
      const memory = memories.get(of.rank)!;
      memory.view('u32', 512, 1)[0] = 1000 * round + of.rank;
      for (const { rank } of here) {
        const endpoint = await of.connect(rank);
        await endpoint.put(memory.local(512, 4), memory.remote(rank, 8 * of.rank, 4), {
          signal: { slot: of.rank, op: 'add', value: 1n },
        });
        await endpoint.flush();
      }
    }),
  );
  for (const { rank } of here) {
    const memory = memories.get(rank)!;
    for (const of of here) {
      await memory.signals.until(of.rank, { cmp: 'ge', value: 1n }, { timeoutMs: LIMIT_MS });
      expect(memory.view('u32', 8 * of.rank, 1)[0], `rank ${of.rank} to ${rank}`).toBe(1000 * round + of.rank);
    }
  }
  await Promise.all(here.map((of) => of.barrier()));
}

async function allocated(here: readonly PlacedTransport[]): Promise<Map<Rank, SymmetricMemory>> {
  return new Map(await Promise.all(here.map(async (of) => [of.rank, await of.allocate(SIZE)] as const)));
}

async function freshlyReached({ here }: PlacedWorld): Promise<void> {
  const memories = await allocated(here);
  await allReachAll(here, memories);
  await Promise.all([...memories.values()].map((memory) => memory.close()));
}

const empty = (rank: Rank) => ({ code: 'EP_NOT_READY', context: { ranks: [rank] } });
const renewal: Omit<RenewOptions, 'memory'> = { ...SIZE, facts: new Uint8Array(1), check: () => {}, settle: () => {} };

/** `provider` may be found when the tests run. */
export function describePlaces(name: string, provider: () => PlacedProvider | Promise<PlacedProvider>): void {
  const worldOf = async (worldSize: number): Promise<PlacedWorld> => new PlacedWorld(await provider(), worldSize);

  describe(`places in which nobody is yet, over ${name}`, () => {
    it('are none of those that are here: nobody waits for them, and nothing goes there', async () => {
      await using world = await worldOf(6);
      await world.openAll([4, 1, 2]);
      for (const of of world.here) {
        expect([...of.world.ranks]).toEqual([1, 2, 4]);
        expect([0, 1, 2, 3, 4, 5].map((rank) => of.isEmpty!(rank))).toEqual([true, false, false, true, false, true]);
      }
      await freshlyReached(world);
      const [one] = world.here as [PlacedTransport];
      const memories = await allocated(world.here);
      const memory = memories.get(1)!;
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
      await expect(
        memory.signals.until(0, { cmp: 'ge', value: 1n }, { timeoutMs: LIMIT_MS, peers: [5] }),
      ).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [5] } });
      expect([one.lostRanks(), one.failed.aborted]).toEqual([[], false]);
    });

    it('are taken one at a time, several at once, and again when who came has gone', async () => {
      await using world = await worldOf(6);
      await world.openAll([1, 3]);
      const kept = await allocated(world.here);
      await world.letIn([5]);
      await freshlyReached(world);
      await world.letIn([0, 2, 4]);
      for (const of of world.here) expect([...of.world.ranks]).toEqual([0, 1, 2, 3, 4, 5]);
      await freshlyReached(world);
      // Memory of before is renewed by who has it; all reach all in it.
      const memories = new Map<Rank, SymmetricMemory>();
      await Promise.all(
        world.here.map(async (of) => {
          const had = kept.get(of.rank);
          memories.set(of.rank, await of.renew!({ ...renewal, ...(had && { memory: had }) }));
        }),
      );
      expect([1, 3].map((rank) => memories.get(rank) === kept.get(rank))).toEqual([true, true]);
      await allReachAll(world.here, memories, 2);
      for (let round = 0; round < 2; round++) {
        await world.lose(5);
        await world.lose(1);
        await world.letIn([1, 5]);
        await freshlyReached(world);
        for (const of of world.here) expect([of.lostRanks(), of.failed.aborted]).toEqual([[], false]);
      }
    });

    it('stay empty where nobody comes, or who comes is refused, and nobody is taken for lost', async () => {
      await using world = await worldOf(4);
      await world.openAll([0, 1]);
      for (const end of await world.readmit([2], { timeoutMs: 300 })) {
        expect(end).toMatchObject({
          reason: { code: 'EP_TIMEOUT', message: expect.stringMatching(/rank 2 did not come/) },
        });
      }
      const odd = (await provider()).rejoin(world.member(2), {
        ...{ signal, config: { ranksOnHost: 3 }, timeoutMs: LIMIT_MS },
      });
      const [refused, ends] = await Promise.all([odd.catch((error: unknown) => error), world.readmit([2])]);
      expect(refused).toMatchObject({ code: 'EP_RENDEZVOUS' });
      for (const end of ends) expect(end).toMatchObject({ reason: { code: 'EP_RENDEZVOUS' } });
      for (const of of world.here)
        expect([of.lostRanks(), of.failed.aborted, of.isEmpty!(2)]).toEqual([[], false, true]);
      await freshlyReached(world);
      await world.letIn([2]);
      await freshlyReached(world);
    });

    it('are empty again for all when who was there is given up', async () => {
      await using world = await worldOf(4);
      await world.openAll([0, 1, 2]);
      await world.lose(2);
      await world.letIn([3], [2]);
      for (const of of world.here) {
        expect([[...of.world.ranks], of.lostRanks(), of.isEmpty!(2)]).toEqual([[0, 1, 3], [], true]);
        await expect((await of.connect(2)).flush()).rejects.toMatchObject(empty(2));
      }
      await freshlyReached(world);
      await world.letIn([2]);
      await freshlyReached(world);
    });

    it('are named alike by all who open the world', async () => {
      await using world = await worldOf(4);
      const config = (activeRanks: unknown) => ({ activeRanks }) as PlacesConfig;
      for (const wrong of [[], [0, 0], [0, 4], [0, -1], [0.5], 'all', [1, 2]]) {
        await expect((async () => world.open(0, config(wrong)))()).rejects.toMatchObject({
          code: 'EP_INVALID_ARGUMENT',
          message: expect.stringContaining('activeRanks'),
        });
      }
      const ends = await Promise.allSettled([
        world.open(0, config([0, 1, 2])),
        world.open(1, config([0, 1, 2])),
        world.open(2, config([0, 2])),
      ]);
      for (const end of ends) expect(end).toMatchObject({ reason: { code: 'EP_RENDEZVOUS' } });
    });
  });
}
