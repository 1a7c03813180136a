/** Others in the place of ranks that are gone, in one thread: what becomes of endpoints, memories and requests. Ranks that are killed are in the suites of experts and of process groups. */
import { CloseScope, memoryStore, type Rank, type Store } from '@ep/core';
import { afterEach, describe, expect, it } from 'vitest';
import { type IbgdaTransport, ibgda, type SoftIbgdaConfig } from '../src/index.js';

type Provider = Pick<typeof ibgda.soft, 'open' | 'rejoin'>;

/** The backing `hardware`, behind whose libraries a software NIC stands. */
const shimmed = async (): Promise<Provider> =>
  ((await import('./shim-provider.mjs' as string)) as { readonly hardware: Provider }).hardware;

const { signal } = new AbortController();
const SIZE = { byteLength: 4096, signalSlots: 4 };
const inc = (slot: number) => ({ signal: { slot, op: 'inc' } }) as const;

let scopes: CloseScope[] = [];
afterEach(async () => {
  await Promise.all(scopes.map((scope) => scope.close()));
  scopes = [];
});

class World {
  readonly transports: IbgdaTransport[] = [];
  readonly stores: Store[] = [];
  readonly #scope = new CloseScope();
  readonly #provider: Provider;
  readonly #config: SoftIbgdaConfig;

  constructor(provider: Provider, config: SoftIbgdaConfig) {
    scopes.push(this.#scope);
    this.#provider = provider;
    this.#config = { timeoutMs: 20_000, ...config };
  }

  static async open(worldSize: number, provider: Provider = ibgda.soft, config: SoftIbgdaConfig = {}): Promise<World> {
    const world = new World(provider, config);
    const root = world.#scope.add(memoryStore());
    world.stores.push(...Array.from({ length: worldSize }, () => world.#scope.add(root.handle())));
    const opened = world.stores.map((store, rank) =>
      provider.open({ rank, worldSize, store }, { signal, config: world.#config }),
    );
    for (const transport of await Promise.all(opened)) world.transports.push(world.#scope.add(transport));
    return world;
  }

  readmit(rank: Rank, joining: readonly Rank[], timeoutMs = 20_000): Promise<void> {
    return this.transports[rank]!.readmit({ store: this.stores[rank]!, joining, timeoutMs });
  }

  rejoin(rank: Rank, config: SoftIbgdaConfig = {}): Promise<IbgdaTransport> {
    const member = { rank, worldSize: this.stores.length, store: this.stores[rank]! };
    return this.#provider.rejoin(member, { signal, config: { ...this.#config, ...config } });
  }

  async replace(rank: Rank): Promise<void> {
    const staying = this.transports.filter((one) => one.rank !== rank);
    const [comer] = await Promise.all([this.rejoin(rank), ...staying.map((one) => this.readmit(one.rank, [rank]))]);
    this.transports[rank] = this.#scope.add(comer!);
  }
}

/** What `renew` needs besides the memory. */
const renewal = { ...SIZE, facts: new Uint8Array(1), check: () => {}, settle: () => {} };

describe.each([
  ['soft', async () => ibgda.soft],
  ['hardware, over the shim', shimmed],
] as const)('ranks that come back, over %s', (_, provider) => {
  it.each(['collapsed', 'ring'] as const)('reach and are reached as before, completions %s', async (completions) => {
    const world = await World.open(3, await provider(), { completions, depth: 8, qpsPerPeer: 1 });
    const memories = await Promise.all(world.transports.map((one) => one.allocate(SIZE)));
    for (let round = 1; round <= 3; round++) {
      await world.transports[1]!.close();
      const [zero] = world.transports;
      const endpoint = await zero!.connect(1);
      const late = endpoint.put(memories[0]!.local(0, 8), memories[0]!.remote(1, 0, 8), inc(0));
      await world.replace(1);
      await expect(late).rejects.toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [1] } });
      memories[1] = (
        await Promise.all(
          world.transports.map((one) =>
            one.renew!(one.rank === 1 ? renewal : { ...renewal, memory: memories[one.rank]! }),
          ),
        )
      )[1]!;
      // More than the rings hold, from each to each.
      for (const from of world.transports) {
        for (const to of world.transports) {
          const mine = memories[from.rank]!;
          const way = await from.connect(to.rank);
          for (let i = 0; i < 20; i++) {
            mine.view('u32', 4 * from.rank, 1)[0] = 1000 * round + 100 * from.rank + i;
            await way.put(mine.local(4 * from.rank, 4), mine.remote(to.rank, 64 + 4 * from.rank, 4), inc(from.rank));
          }
          await way.fetchAdd(mine.remote(to.rank, 128, 8), 1n);
        }
      }
      for (const { rank } of world.transports) {
        const { signals } = memories[rank]!;
        const rounds = rank === 1 ? 1n : BigInt(round);
        for (const from of [0, 1, 2]) {
          expect(signals.peek(from)).toBe(20n * rounds);
          expect(memories[rank]!.view('u32', 64 + 4 * from, 1)[0]).toBe(1000 * round + 100 * from + 19);
        }
        expect(memories[rank]!.view('u64', 128, 1)[0]).toBe(3n * rounds);
      }
      expect(zero!.failed.aborted).toBe(false);
      expect(zero!.kernelFailure()).toBeUndefined();
    }
  });
});

describe('a world that lets ranks in', () => {
  it('allocates for all that are here, and closes', async () => {
    const world = await World.open(2);
    await world.transports[0]!.close();
    await world.replace(0);
    const [a, b] = await Promise.all(world.transports.map((one) => one.allocate(SIZE)));
    await (await world.transports[0]!.connect(1)).putValue(a!.remote(1, 8, 8), 77n, inc(3));
    await b!.signals.until(3, { cmp: 'ge', value: 1n });
    expect(b!.view('u64', 8, 1)[0]).toBe(77n);
    await Promise.all(world.transports.map((one) => one.barrier()));
  });

  it('loses what is put to a part that is not known yet, and puts to it afterwards', async () => {
    const world = await World.open(2);
    const [held] = await Promise.all(world.transports.map((one) => one.allocate(SIZE)));
    const replaced: (readonly Rank[])[] = [];
    world.transports[0]!.succession!.onReplace((ranks) => replaced.push(ranks));
    const before = world.transports[0]!.succession!.lifeOf(1);
    await world.transports[1]!.close();
    await world.replace(1);
    const [stays, comes] = world.transports.map(({ succession }) => succession!);
    expect(replaced).toEqual([[1]]);
    expect([stays!.isNew, comes!.isNew]).toEqual([false, true]);
    expect(stays!.lifeOf(1)).toBe(comes!.lifeOf(1));
    expect(stays!.lifeOf(1)).not.toBe(before);
    const made = await comes!.inherit(SIZE);
    const way = await world.transports[1]!.connect(0);
    await way.putValue(made.remote(0, 0, 8), 1n, inc(0));
    comes!.replace(made, 0, stays!.part(held!));
    stays!.replace(held!, 1, comes!.part(made));
    await way.putValue(made.remote(0, 8, 8), 2n, inc(1));
    await (await world.transports[0]!.connect(1)).putValue(held!.remote(1, 16, 8), 3n);
    expect([...held!.view('u64', 0, 2)]).toEqual([0n, 2n]);
    expect([held!.signals.peek(0), held!.signals.peek(1)]).toEqual([0n, 1n]);
    expect(made.view('u64', 16, 1)[0]).toBe(3n);
    await expect(async () => stays!.part(made)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  });

  it('refuses who lives, who does not come and who is set up otherwise, and goes on', async () => {
    const world = await World.open(2);
    await expect(world.readmit(0, [1])).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    await world.transports[1]!.close();
    await expect(world.readmit(0, [1], 300)).rejects.toMatchObject({ code: 'EP_TIMEOUT', context: { ranks: [1] } });
    const ends = await Promise.allSettled([world.rejoin(1, { qpsPerPeer: 2 }), world.readmit(0, [1])]);
    for (const end of ends) expect(end).toMatchObject({ reason: { code: 'EP_RENDEZVOUS' } });
    // A NIC that cannot be made, on the newcomer alone: both hear of it, and whoever comes next is taken in.
    const broken = await Promise.allSettled([world.rejoin(1, { faults: 'no such fault' }), world.readmit(0, [1])]);
    expect(broken[0]).toMatchObject({ reason: { code: 'EP_INVALID_ARGUMENT' } });
    expect(broken[1]).toMatchObject({ reason: { message: 'readmit: rank 1 could not make its queue pairs ready' } });
    const way = await world.transports[0]!.connect(1);
    const own = await (await world.transports[0]!.connect(0)).flush().then(() => 'done');
    expect(own).toBe('done');
    await world.replace(1);
    await way.flush();
  });

  it('is none over a network', async () => {
    const network = { network: { address: '127.0.0.1' } };
    const world = await World.open(2, ibgda.soft, network);
    expect(world.transports[0]!.renew).toBeUndefined();
    expect(world.transports[0]!.succession).toBeUndefined();
    const refused = { code: 'EP_UNSUPPORTED', message: expect.stringMatching(/no rank comes back: .*network/) };
    await expect(world.readmit(0, [1])).rejects.toMatchObject(refused);
    await expect(world.rejoin(1)).rejects.toMatchObject(refused);
  });
});
