/** Others in the place of ranks of composed transports, in one thread: two of one node, one of another. Ranks that are killed are in the suite of experts. */
import {
  byCapability,
  CloseScope,
  type ComposedTransport,
  compose,
  type Member,
  memoryStore,
  prefixStore,
  type Rank,
  type RankSaid,
  type RenewOptions,
  type Store,
  type SymmetricMemory,
  type Transport,
} from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';
import { afterEach, describe, expect, it } from 'vitest';
import { hardware } from '../../../ibgda/test/shim-provider.mjs';

type Nic = Pick<typeof ibgda.soft, 'open' | 'rejoin'>;
type Elastic = Awaited<ReturnType<Nic['open']>> | Awaited<ReturnType<typeof nvshmem.shm.open>>;

const signal = new AbortController().signal;
const SIZE = { byteLength: 4096, signalSlots: 4 };
const NODES = [0, 0, 1];
const WORLD = NODES.length;

let scopes: CloseScope[] = [];
afterEach(async () => {
  await Promise.all(scopes.map((scope) => scope.close()));
  scopes = [];
});

class World {
  readonly composed: ComposedTransport<'bundled' | 'add'>[] = [];
  readonly #parts: (readonly [Elastic, Elastic])[] = [];
  readonly #stores: Store[] = [];
  readonly #scope = new CloseScope();
  readonly #nic: Nic;
  readonly #memory: 'shared' | 'split';

  constructor(nic: Nic, memory: 'shared' | 'split') {
    scopes.push(this.#scope);
    this.#nic = nic;
    this.#memory = memory;
    const root = this.#scope.add(memoryStore());
    for (let rank = 0; rank < WORLD; rank++) this.#stores.push(this.#scope.add(root.handle()));
  }

  static async open(nic: Nic, memory: 'shared' | 'split' = 'shared'): Promise<World> {
    const world = new World(nic, memory);
    await Promise.all(NODES.map((_, rank) => world.#enter(rank, 'open')));
    return world;
  }

  async replace(rank: Rank): Promise<void> {
    await Promise.all([
      this.#enter(rank, 'rejoin'),
      ...this.others(rank).map(async (stays) => {
        for (const part of [0, 1] as const) {
          await this.#parts[stays]![part].readmit({ store: this.#store(stays, part), joining: [rank] });
        }
      }),
    ]);
  }

  others(rank: Rank): readonly Rank[] {
    return [0, 1, 2].filter((one) => one !== rank);
  }

  #store(rank: Rank, part: 0 | 1): Store {
    return prefixStore(this.#stores[rank]!, ['shm', 'nic'][part]!);
  }

  async #enter(rank: Rank, how: 'open' | 'rejoin'): Promise<void> {
    const member = (part: 0 | 1): Member => ({ rank, worldSize: WORLD, store: this.#store(rank, part) });
    const shm = await nvshmem.shm[how](member(0), { signal });
    const far = await this.#nic[how](member(1), { signal });
    this.#parts[rank] = [shm, far];
    this.composed[rank] = this.#scope.add(compose([shm, far], byCapability(NODES), { memory: this.#memory }));
  }
}

const facts = (rank: Rank) => Uint8Array.of(40 + rank);
const renewal = { ...SIZE, timeoutMs: 20_000, check: () => {}, settle: () => {} };

/** All ranks at once; `memories` of those that stay. */
const renewAll = (world: World, memories: readonly (SymmetricMemory | undefined)[], more: Partial<RenewOptions> = {}) =>
  Promise.allSettled(
    world.composed.map((one, rank) =>
      one.renew!({ ...renewal, facts: facts(rank), ...more, ...(memories[rank] && { memory: memories[rank]! }) }),
    ),
  );
const memoriesOf = (ends: readonly PromiseSettledResult<SymmetricMemory>[]): SymmetricMemory[] =>
  ends.map((end) => {
    if (end.status === 'rejected') throw end.reason;
    return end.value;
  });

/** From each to each, a value and 1 to the sender's word. */
async function putAll(world: World, memories: readonly SymmetricMemory[], round: number): Promise<void> {
  for (const [from, transport] of world.composed.entries()) {
    for (const to of world.others(from)) {
      const memory = memories[from]!;
      memory.view('u32', 4 * from, 1)[0] = 100 * round + from;
      const put = (await transport.connect(to)).put(memory.local(4 * from, 4), memory.remote(to, 64 + 4 * from, 4), {
        signal: { slot: from, op: 'add', value: 1n },
      });
      await put;
    }
  }
}

describe.each([
  ['soft', ibgda.soft],
  ['hardware, over the shim, whose additions are not those of processors', hardware as Nic],
] as const)('shm and ibgda, %s', (_, nic) => {
  it('keep their memory when ranks of the same node, and of another one, come back', { timeout: 60_000 }, async () => {
    const world = await World.open(nic);
    let memories: readonly SymmetricMemory[] = await Promise.all(world.composed.map((one) => one.allocate(SIZE)));
    const sums = [0n, 0n, 0n];
    const exchange = async (round: number) => {
      await putAll(world, memories, round);
      for (const [rank, memory] of memories.entries()) {
        sums[rank]! += 1n;
        for (const from of world.others(rank)) {
          const wait = { peers: [from], timeoutMs: 20_000 };
          expect(await memory.signals.until(from, { cmp: 'ge', value: sums[rank]! }, wait)).toBe(sums[rank]);
          expect(memory.view('u32', 64 + 4 * from, 1)[0]).toBe(100 * round + from);
        }
      }
    };
    await exchange(1);
    for (const [round, gone] of [2, 1, 0, 2].entries()) {
      const views = memories.map((memory) => memory.view('u32', 0, 1));
      await world.composed[gone]!.close();
      await world.replace(gone);
      const order: string[] = [];
      const said: ReadonlyMap<Rank, RankSaid>[] = [];
      const ends = await renewAll(
        world,
        memories.map((memory, rank) => (rank === gone ? undefined : memory)),
        {
          check: () => order.push('check'),
          settle: (_memory, of) => {
            order.push('settle');
            said.push(of);
          },
        },
      );
      const renewed = memoriesOf(ends);
      expect(order).toEqual(['check', 'check', 'check', 'settle', 'settle', 'settle']);
      for (const of of said) {
        expect([...of].map(([rank, { isNew, facts: own }]) => [rank, isNew, [...own]])).toEqual(
          NODES.map((_node, rank) => [rank, rank === gone, [...facts(rank)]]),
        );
      }
      for (const rank of world.others(gone)) {
        expect(renewed[rank]).toBe(memories[rank]);
        expect(renewed[rank]!.view('u32', 0, 1).buffer).toBe(views[rank]!.buffer);
        // Where the predecessor's words are is for users to know: here they begin anew.
        const { signals } = renewed[rank]!;
        expect(signals.peek(gone)).toBe(sums[rank]);
      }
      memories = renewed;
      expect(world.composed.map(({ failed }) => failed.aborted)).toEqual([false, false, false]);
      // The newcomer's words are zero: what its peers tell it is behind by what they have.
      sums[gone] = 0n;
      await exchange(round + 2);
    }
  });
});

it('renew split memory part by part', { timeout: 60_000 }, async () => {
  const world = await World.open(ibgda.soft, 'split');
  const memories = await Promise.all(world.composed.map((one) => one.allocate(SIZE)));
  await world.composed[2]!.close();
  await world.replace(2);
  const renewed = memoriesOf(await renewAll(world, [memories[0], memories[1], undefined]));
  const [zero] = renewed as [Awaited<ReturnType<(typeof world.composed)[0]['allocate']>>];
  zero.part(2).view('u32', 0, 1)[0] = 5;
  await (await world.composed[0]!.connect(2)).put(zero.part(2).local(0, 4), zero.remote(2, 8, 4));
  await (await world.composed[0]!.connect(2)).flush();
  expect((renewed[2] as typeof zero).part(0).view('u32', 8, 1)[0]).toBe(5);
});

it('say on all ranks what one refuses, and renew later', { timeout: 60_000 }, async () => {
  const world = await World.open(ibgda.soft);
  const memories = await Promise.all(world.composed.map((one) => one.allocate(SIZE)));
  await world.composed[1]!.close();
  await world.replace(1);
  const held = [memories[0], undefined, memories[2]];
  const no = new RangeError('not so');
  const refuse = () => {
    throw no;
  };
  for (const more of [{ check: refuse }, { settle: refuse }]) {
    for (const end of await renewAll(world, held, more)) expect(end).toMatchObject({ reason: no });
  }
  // One alone, at the end: newcomers have to come again, and here this one has nothing yet.
  const ends = await Promise.allSettled(
    world.composed.map((one, rank) =>
      one.renew!({
        ...renewal,
        facts: facts(rank),
        ...(held[rank] && { memory: held[rank]! }),
        ...(rank === 2 ? { settle: refuse } : {}),
      }),
    ),
  );
  expect(ends[2]).toMatchObject({ reason: no });
  for (const end of ends.slice(0, 2))
    expect(end).toMatchObject({ reason: { message: 'renew: rank 2 could not take part' } });
  const renewed = memoriesOf(await renewAll(world, held));
  await putAll(world, renewed, 1);
  expect(renewed[1]!.view('u32', 72, 1)[0]).toBe(102);
});

it('let ranks in one pair at a time', { timeout: 60_000 }, async () => {
  const world = await World.open(ibgda.soft);
  const memories: SymmetricMemory[] = await Promise.all(world.composed.map((one) => one.allocate(SIZE)));
  const [zero, , two] = world.composed.map(({ succession }) => succession!);
  const before = [zero!.lifeOf(1), zero!.lifeOf(2)];
  const replaced: (readonly Rank[])[] = [];
  const stop = zero!.onReplace((ranks) => replaced.push(ranks));
  await world.composed[1]!.close();
  await world.replace(1);
  const one = world.composed[1]!.succession!;
  // By each of the transports.
  expect(replaced).toEqual([[1], [1]]);
  stop();
  expect([zero!.isNew, one.isNew, zero!.world === one.world]).toEqual([false, true, true]);
  expect([zero!.lifeOf(1) === before[0], zero!.lifeOf(2) === before[1]]).toEqual([false, true]);
  expect(one.lifeOf(1)).toBe(zero!.lifeOf(1));
  memories[1] = await one.inherit(SIZE);
  for (const [stays, succession] of [
    [0, zero!],
    [2, two!],
  ] as const) {
    succession.replace(memories[stays]!, 1, one.part(memories[1]));
    one.replace(memories[1], stays, succession.part(memories[stays]!));
  }
  await putAll(world, memories, 1);
  for (const [rank, memory] of memories.entries()) {
    for (const from of world.others(rank)) expect(memory.view('u32', 64 + 4 * from, 1)[0]).toBe(100 + from);
  }
  const part = one.part(memories[1]);
  for (const bytes of [part.subarray(1), part.subarray(0, part.byteLength - 1), new Uint8Array(0)]) {
    expect(() => zero!.replace(memories[0]!, 1, bytes)).toThrowError(expect.objectContaining({ code: 'EP_MISMATCH' }));
  }
});

it('have no renew where one of them has none', { timeout: 60_000 }, async () => {
  const scope = new CloseScope();
  scopes.push(scope);
  const store = scope.add(memoryStore());
  const member = (name: string): Member => ({ rank: 0, worldSize: 1, store: prefixStore(store, name) });
  const shm = await nvshmem.shm.open(member('shm'), { signal });
  const network = { network: { address: '127.0.0.1' } };
  const far: Transport<'bundled' | 'add'> = await efaGda.soft.open(member('nic'), { signal, config: network });
  const composed = scope.add(compose([shm, far]));
  expect([composed.renew, composed.succession]).toEqual([undefined, undefined]);
});
