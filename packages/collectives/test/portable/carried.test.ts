/** Large calls of groups on several hosts that native code carries: the same results and the same ends as in one level and in two, whoever comes late, gives up or is lost. */
import { createStorage, encode } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import { describe, expect, it } from 'vitest';
import type { Elements } from '../../src/engine.js';
import { bytesOf } from '../../src/portable/chunks.js';
import { orderOf } from '../../src/portable/fold-order.js';
import { Placement } from '../../src/portable/placement.js';
import { blocks, check, exchanged, holds, make } from './calls.js';
import { Counts, carried, LONG, nested, SIZE, sumOf, TWO_BY_TWO } from './carrier-counts.js';
import { type Call, LOOPBACK, pause, rejection, World } from './world.js';

const probe = await nvshmem.fabric.probe(LOOPBACK);
const unavailable = probe.available ? '' : ` (${probe.reason})`;
const ROOTED = ['reduce', 'gather', 'scatter'] as const;

/** Ones, twos, fours and eights. */
const powers = (length = LONG): readonly Float32Array[] =>
  TWO_BY_TWO.map((_, rank) => new Float32Array(length).fill(2 ** rank));

/** All ranks know whether all can: small calls go in rounds since then. */
async function decided(counts: Counts, world: World): Promise<void> {
  for (let i = 0; counts.decided.size < world.size && i < 2000; i++) await world.all(() => ({ kind: 'barrier' }));
  expect(counts.decided.size).toBe(world.size);
}

describe.skipIf(unavailable)(`large calls that are carried${unavailable}`, () => {
  it('move and fold every size, between others that are not', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    for (const [seed, length] of [129, 1000, 70_000, LONG].entries()) {
      const before = counts.begun;
      for (const dtype of ['f32', 'i64', 'u8'] as const)
        await check(world, make('all-reduce', dtype, SIZE, length, 0, seed));
      await check(world, blocks(SIZE, length));
      await check(world, make('all-gather', 'f32', SIZE, length, 0, seed));
      await check(world, make('broadcast', 'f8e4m3', SIZE, 4 * length, seed % SIZE, seed));
      for (const dtype of ['f32', 'f16'] as const)
        await check(world, make('reduce-scatter', dtype, SIZE, length, 0, seed));
      for (const kind of ROOTED) await check(world, make(kind, 'f32', SIZE, length, (seed + 1) % SIZE, seed));
      // Of u8 the first is small.
      const begun = (length === 129 ? 10 : 11) * SIZE;
      expect(counts.begun - before).toBe(begun);
      await check(world, make('all-reduce', 'f32', SIZE, 3, 0, seed));
      for (const kind of ROOTED) await check(world, make(kind, 'i16', SIZE, 3, seed % SIZE, seed));
      expect(counts.begun - before).toBe(begun);
    }
  });

  it.each([
    [[0, 1]],
    [[3, 1, 1, 3]],
    [[0, 0, 0, 7, 7, 7]],
    [[0, 1, 2, 3]],
    [[5, 0, 5, 2, 0, 2]],
    // Unlike ones.
    [[0, 0, 1]],
    [[2, 7, 2, 2]],
    [[0, 0, 1, 2]],
    [[0, 4, 4, 0, 1, 4]],
  ])('on hosts %j', async (hosts) => {
    const counts = new Counts();
    const size = hosts.length;
    await using world = await carried(counts, { hosts, size });
    await check(world, make('all-reduce', 'f64', size, 50_001, 0, 1));
    await check(world, blocks(size, 50_001));
    expect(counts.begun).toBe(3 * size);
    for (const kind of ['all-gather', 'broadcast', 'reduce-scatter'] as const)
      await check(world, make(kind, 'i64', size, 50_001, size - 1, 2));
    expect(counts.begun).toBe(6 * size);
    for (const [root, kind] of [...ROOTED, ...ROOTED].entries())
      await check(world, make(kind, 'i64', size, 50_001, root % size, 3));
    expect(counts.begun).toBe(12 * size);
    // That the root gives much in all is known to those who give nothing.
    await check(world, make('scatter', 'u8', size, 512, size - 1, 4));
    expect(counts.begun).toBe(13 * size);
  });

  it('not on one host', async () => {
    const counts = new Counts();
    const size = SIZE;
    const hosts = [3, 3, 3, 3];
    await using world = await World.open({ kind: 'fabric', size, hosts, wrap: counts.wrap });
    await decided(counts, world);
    for (let i = 0; i < 20; i++) await check(world, make('all-reduce', 'f32', size, 1000, 0, i));
    expect(counts.begun).toBe(0);
  });

  it.each([[TWO_BY_TWO], [[0, 1, 2, 3]], [[0, 1, 2, 2, 1, 0]], [[0, 1, 1]], [[0, 1, 0, 2, 0, 1]]])(
    'fold in the order of two levels on hosts %j',
    async (hosts) => {
      const counts = new Counts();
      const size = hosts.length;
      await using world = await carried(counts, { hosts, size });
      const length = 30_003;
      const order = orderOf(new Placement(hosts, 0), [...hosts.keys()]);
      const scaled = { op: 'premul-sum', factor: 0.3 } as const;
      const given = hosts.map((_, rank) => Float32Array.from({ length }, (_, i) => Math.sin(i * 5 + rank) * 3 ** rank));
      for (const dtype of ['f32', 'bf16', 'f16'] as const) {
        for (const reduceOp of ['sum', 'avg', 'product', 'min', scaled] as const) {
          // Carried, and small.
          for (const some of [length, 100]) {
            const arrays = given.map((array) => encode(dtype, array.subarray(0, some)) as Elements);
            const expected = createStorage(dtype, some) as Elements;
            order(dtype, reduceOp, expected, arrays);
            const before = counts.begun;
            await world.all((rank) => sumOf(arrays[rank]!, { dtype, reduceOp }));
            expect(counts.begun - before).toBe(some === length ? size : 0);
            for (const array of arrays) expect(Buffer.compare(bytesOf(array), bytesOf(expected))).toBe(0);
            const root = some % size;
            const again = given.map((array) => encode(dtype, array.subarray(0, some)) as Elements);
            const target = createStorage(dtype, some) as Elements;
            await world.all((rank) => ({
              ...{ kind: 'reduce', dtype, reduceOp, root, inputs: [again[rank]!] },
              outputs: rank === root ? [target] : [],
            }));
            expect(counts.begun - before).toBe(some === length ? 2 * size : 0);
            expect(Buffer.compare(bytesOf(target), bytesOf(expected))).toBe(0);
          }
        }
      }
    },
  );

  it('costs what leaves the host, and no word but the first', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = powers(1 << 18);
    const before = world.engines.map((engine) => engine.trace()['all-reduce']!);
    await world.all((rank) => sumOf(arrays[rank]!));
    for (const [rank, engine] of world.engines.entries()) {
      const { bytes, signals } = engine.trace()['all-reduce']!;
      expect(bytes - before[rank]!.bytes).toBe((2 ** 18 * 4) / 2);
      expect(signals - before[rank]!.signals).toBeLessThanOrEqual(SIZE - 1);
    }
  });

  it('to and from a root cost what other hosts give or take, once, and no word but the first', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const length = 2 ** 18;
    const bytes = 4 * length;
    // The root is rank 1; ranks 2 and 3 are on the other host.
    const halves = [bytes / 2, bytes / 2];
    const sent = { reduce: [0, 0, ...halves], gather: [0, 0, bytes, bytes], scatter: [0, 2 * bytes, 0, 0] };
    for (const kind of ROOTED) {
      await check(world, make(kind, 'f32', SIZE, length, 1, 5));
      for (const [rank, engine] of world.engines.entries()) {
        const trace = engine.trace()[kind]!;
        expect([kind, rank, trace.bytes]).toEqual([kind, rank, sent[kind][rank]]);
        // In a round, in records, or in records what did not come at once in a round (rounds.test.ts).
        expect([1, SIZE - 1, SIZE]).toContain(trace.signals);
      }
    }
  });

  it.each(ROOTED)('end alike when a rank is lost within a %s', async (kind) => {
    for (const victim of [1, 2]) {
      const counts = new Counts();
      await using world = await carried(counts);
      const { call } = make(kind, 'f32', SIZE, 2 * LONG, 1, 3);
      let lost: Promise<void> | undefined;
      const from = counts.turns + 10;
      counts.onTurn = () => {
        if (counts.turns === from) lost = world.lose(victim);
      };
      const ends = await world.settled(call);
      await lost;
      const survivors = [0, 1, 2, 3].filter((rank) => rank !== victim);
      for (const rank of survivors) expect(ends[rank]).toMatchObject(rejection('EP_PEER_LOST', { lost: [victim] }));
    }
  });

  it.each(ROOTED)('of kind %s end on nobody before all have come', async (kind) => {
    const counts = new Counts();
    await using world = await carried(counts);
    for (const late of [1, 3]) {
      const made = make(kind, 'f32', SIZE, 1000, 1, late);
      const others = [0, 1, 2, 3].filter((rank) => rank !== late);
      const early = others.map((rank) => world.run(rank, made.call(rank)));
      expect(await Promise.race([pause(100).then(() => 'nobody'), ...early])).toBe('nobody');
      await Promise.all([...early, world.run(late, made.call(late))]);
      holds(made, SIZE);
    }
  });

  it('are carried for nobody where one cannot', async () => {
    const counts = new Counts();
    counts.refusing = 2;
    await using world = await World.open({ kind: 'fabric', size: SIZE, hosts: TWO_BY_TWO, wrap: counts.wrap });
    await decided(counts, world);
    for (let i = 0; i < 20; i++) await check(world, make('all-reduce', 'f32', SIZE, 1000, 0, i));
    expect(counts.begun).toBe(0);
  });

  it('many in flight, of several groups in turn over the same memory', async () => {
    const counts = new Counts();
    await using world = await carried(counts, { maxGroups: 2 });
    for (let turn = 0; turn < 3; turn++) {
      const engines = await world.group(`other ${turn}`, [3, 2, 1, 0]);
      const arrays = powers(5000);
      const calls = Array.from({ length: 40 }, (_, i) =>
        engines.map((engine, rank) =>
          engine.run({ ...sumOf(arrays[rank]!), root: -1, sequence: i + 1, timeoutMs: 20_000 } as never),
        ),
      );
      await Promise.all(calls.flat());
      for (const array of arrays) expect(array[4999]).toBe(15 * 4 ** 39);
      await Promise.all(Array.from({ length: 8 }, (_, i) => check(world, blocks(SIZE, 2000 + i))));
      await Promise.all(engines.map((engine) => engine.close()));
    }
  });

  it.each([[TWO_BY_TWO], [[0, 1, 2, 3]], [[0, 1, 1, 1]]])(
    'end alike when a rank is lost within one, on hosts %j',
    async (hosts) => {
      for (const victim of [0, 3]) {
        const counts = new Counts();
        await using world = await carried(counts, { hosts });
        const arrays = powers(4 * LONG);
        let lost: Promise<void> | undefined;
        const from = counts.turns + 10;
        counts.onTurn = () => {
          if (counts.turns === from) lost = world.lose(victim);
        };
        const ends = await world.settled((rank) => sumOf(arrays[rank]!));
        await lost;
        const survivors = [0, 1, 2, 3].filter((rank) => rank !== victim);
        for (const rank of survivors) expect(ends[rank]).toMatchObject(rejection('EP_PEER_LOST', { lost: [victim] }));
        const begun = counts.begun;
        const again = powers(1000);
        await world.all((rank) => sumOf(again[rank]!), survivors);
        for (const rank of survivors) expect(again[rank]!.at(-1)).toBe(15 - 2 ** victim);
        expect(counts.begun).toBe(begun);
      }
    },
  );

  it('end alike when a rank gives one up, and name who does not come, or calls something else', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = powers(4 * LONG);
    const giving = new AbortController();
    const from = counts.turns + 10;
    counts.onTurn = () => {
      if (counts.turns === from) giving.abort(new Error('enough'));
    };
    const ends = await world.settled((rank) => sumOf(arrays[rank]!, rank === 2 ? { signal: giving.signal } : {}));
    expect(ends[2]).toMatchObject({ reason: giving.signal.reason });
    for (const rank of [0, 1, 3]) expect(ends[rank]).toMatchObject(rejection('EP_ABORTED'));
    const other = new Counts();
    await using late = await carried(other);
    const awaited = await late.settled((rank) => sumOf(arrays[rank]!, { timeoutMs: 300 }), [0, 1, 3]);
    for (const end of awaited)
      if (end.status === 'rejected' && end.reason.code === 'EP_TIMEOUT')
        expect(end.reason.context.awaited).toEqual([2]);
    expect(awaited.map(({ status }) => status)).toEqual(['rejected', 'rejected', 'rejected']);
    const third = new Counts();
    await using differing = await carried(third);
    const odd = await differing.settled((rank) => sumOf(rank === 1 ? new Float32Array(2 * LONG) : arrays[rank]!));
    for (const end of odd) expect(end).toMatchObject(rejection('EP_MISMATCH', { ranks: [1] }));
  });

  it('end alike where a rank can carry one no further', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = powers();
    counts.onTurn = (rank) => {
      if (rank === 3) throw new Error('out of order');
    };
    const ends = await world.settled((rank) => sumOf(arrays[rank]!, { timeoutMs: 5000 }));
    for (const end of ends) expect(end.status).toBe('rejected');
    expect(ends[3]).toMatchObject({ reason: { message: 'out of order' } });
    for (const rank of [0, 1, 2]) expect(ends[rank]).toMatchObject(rejection('EP_ABORTED'));
  });

  it('refuse memory that was taken away within one', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = powers(4 * LONG);
    const from = counts.turns + 10;
    counts.onTurn = () => {
      if (counts.turns === from) structuredClone(arrays[1]!.buffer, { transfer: [arrays[1]!.buffer as ArrayBuffer] });
    };
    const ends = await world.settled((rank) => sumOf(arrays[rank]!));
    expect(ends[1]).toMatchObject(rejection('EP_DETACHED'));
    for (const rank of [0, 2, 3]) expect(ends[rank]).toMatchObject(rejection('EP_ABORTED'));
  });

  it('refuse arrays of other lengths than the call says, without reading or writing them', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const { byteLength } = powers()[0]!;
    const short = new Uint8Array(byteLength - 4);
    const [first, ...rest] = counts.carriers;
    first!.begin({ number: 1000, kind: 'all-reduce', type: 0, reduction: 0, factor: 0, longest: byteLength });
    const invalid = expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' });
    expect(() => first!.carry([short], [short], 0)).toThrow(invalid);
    const long = new Uint8Array(byteLength + 4);
    expect(() => first!.carry([long], [long], 0)).toThrow(invalid);
    const own = world.engines.map(() => new Uint8Array(byteLength));
    const second = rest[0]!;
    second.begin({ number: 1000, kind: 'all-to-all', type: 0, reduction: 0, factor: 0, longest: byteLength });
    expect(() => second.carry([...own.slice(1), long], own, 0)).toThrow(invalid);
    // The first turn says which one is its own.
    expect(() =>
      second.carry(
        own.map((array, at) => array.subarray(at)),
        own,
        0,
      ),
    ).toThrow(invalid);
  });

  it('say why the transport takes nothing more, but not that another rank is gone', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const own = new Uint8Array(4096);
    const call = {
      number: 1000,
      kind: 'all-reduce',
      type: 0,
      reduction: 0,
      factor: 0,
      longest: own.byteLength,
    } as const;
    for (const carrier of counts.carriers) carrier.begin(call);
    await world.lose(0);
    // What ranks of each host have staged, others go on with.
    const turn = (rank: number): string => counts.carriers[rank]!.carry([own], [own], 0);
    const closed = expect.objectContaining({ code: 'EP_CLOSED' });
    const failed = Array.from({ length: 20 }, () => {
      for (const rank of [1, 2, 3]) expect(turn(rank)).not.toBe('over');
      try {
        turn(0);
        return undefined;
      } catch (error) {
        return error;
      }
    });
    expect(failed.at(-1)).toEqual(closed);
  });

  it.each([true, false])('refuse memory that was taken away before all have come, carried: %s', async (isCarried) => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = TWO_BY_TWO.map(() => (isCarried ? new Float32Array(LONG) : new Int32Array(LONG)));
    const reduceOp = isCarried ? 'sum' : 'avg';
    const dtype = isCarried ? 'f32' : 'i32';
    const call = (rank: number): Call => sumOf(arrays[rank]!, { reduceOp, dtype });
    const early = world.settled(call, [0, 1, 2]);
    structuredClone(arrays[1]!.buffer, { transfer: [arrays[1]!.buffer as ArrayBuffer] });
    await pause(5);
    const last = world.settled(call, [3]);
    const ends = [...(await early), ...(await last)];
    expect(ends[1]).toMatchObject(rejection('EP_DETACHED'));
    for (const rank of [0, 2, 3]) expect(ends[rank]).toMatchObject(rejection('EP_ABORTED'));
  });

  it('end well on all when ranks close as soon as their own has ended', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = powers();
    counts.isHeld = (rank) => rank > 0;
    await Promise.all(
      arrays.map(async (array, rank) => {
        await world.run(rank, sumOf(array));
        await world.engines[rank]!.close();
      }),
    );
    for (const array of arrays) expect(array.at(-1)).toBe(15);
  });

  it('end well on all when a rank whose own has ended is lost', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = powers();
    const isLost = (rank: number): boolean => world.engines[rank]!.connections()[0]!.state === 'lost';
    counts.isHeld = (rank) => rank > 0 && !isLost(rank);
    const ends = world.settled((rank) => sumOf(arrays[rank]!), [1, 2, 3]);
    await world.run(0, sumOf(arrays[0]!));
    await world.lose(0);
    for (const end of await ends) expect(end.status).toBe('fulfilled');
    for (const array of arrays) expect(array.at(-1)).toBe(15);
    const next = await world.settled(() => sumOf(new Float32Array(LONG)), [1, 2, 3]);
    for (const end of next) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [0] }));
  });

  it('end where they are made, if all that they need comes meanwhile', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = powers();
    const [begun, looks] = [counts.begun, counts.looks];
    const bytes = (): number => world.engines[0]!.trace()['all-reduce']!.bytes;
    const before = bytes();
    counts.onTurn = (rank) => {
      if (rank > 0) return;
      const own = arrays.map((array) => [bytesOf(array)]);
      const until = performance.now() + 5000;
      const turn = (): boolean =>
        counts.carriers.every((carrier, peer) => carrier.carry(own[peer]!, own[peer]!, 0) === 'over');
      while (!turn() && performance.now() < until)
        for (const [peer, carrier] of counts.carriers.entries()) carrier.carry(own[peer]!, own[peer]!, 0);
    };
    const ends = await nested(world, counts, (rank) => sumOf(arrays[rank]!));
    for (const end of ends) expect(end.status).toBe('fulfilled');
    for (const array of arrays) expect([array[0], array.at(-1)]).toEqual([15, 15]);
    expect(counts.begun - begun).toBe(SIZE);
    // But for the first one, whose first turn was the last.
    expect(counts.looks - looks).toBe(SIZE - 1);
    expect(bytes() - before).toBe(counts.carriers[0]!.sent);
  });

  it('go on where they were begun at once', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const even = exchanged(SIZE, () => LONG);
    const uneven = blocks(SIZE, LONG);
    const arrays = powers();
    const rooted = ROOTED.map((kind) => make(kind, 'i32', SIZE, LONG, 2, 6));
    const calls = [...[even, uneven, ...rooted].map(({ call }) => call), (rank: number) => sumOf(arrays[rank]!)];
    for (const call of calls) {
      const begun = counts.begun;
      const ends = await nested(world, counts, call);
      for (const end of ends) expect(end.status).toBe('fulfilled');
      expect(counts.begun - begun).toBe(SIZE);
    }
    for (const made of [even, uneven, ...rooted]) holds(made, SIZE);
    for (const array of arrays) expect([array[0], array.at(-1)]).toEqual([15, 15]);
  });

  it('end alike where a rank cannot carry one that was begun at once', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = powers();
    counts.onTurn = (rank) => {
      if (rank === 1) throw new Error('out of order');
    };
    const ends = await nested(world, counts, (rank) => sumOf(arrays[rank]!, { timeoutMs: 5000 }));
    expect(ends[1]).toMatchObject({ reason: { message: 'out of order' } });
    for (const rank of [0, 2, 3]) expect(ends[rank]).toMatchObject(rejection('EP_ABORTED'));
  });

  it('give turns to others meanwhile', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = powers();
    let ticks = 0;
    const ticking = setInterval(() => ticks++, 1);
    // One comes later: the others look again now and then.
    const first = world.all((rank) => sumOf(arrays[rank]!), [0, 1, 2]);
    await pause(50);
    await world.run(3, sumOf(arrays[3]!));
    await first;
    clearInterval(ticking);
    expect(ticks).toBeGreaterThan(5);
    for (const array of arrays) expect(array.at(-1)).toBe(15);
  });
});
