/** Large calls that ranks begin before they know that all make them: what others do not make, or make otherwise, ends as it would have, and what is carried behind it is right. */
import { nvshmem } from '@ep/nvshmem';
import { describe, expect, it } from 'vitest';
import { blocks, check, exchanged, holds, make } from './calls.js';
import { Counts, carried, LONG, nested, SIZE, sumOf } from './carrier-counts.js';
import { LOOPBACK, rejection } from './world.js';

const probe = await nvshmem.fabric.probe(LOOPBACK);
const unavailable = probe.available ? '' : ` (${probe.reason})`;

describe.skipIf(unavailable)(`large calls that are begun before all have said so${unavailable}`, () => {
  it('once all have carried one', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    expect(counts.joined).toBe(0);
    await check(world, make('all-reduce', 'f32', SIZE, LONG, 0, 1));
    // Ranks of one thread make it one behind the other: the first one finds nobody, and tells it in records, which the others find.
    expect(counts.joined).toBe(1);
    await check(world, make('all-gather', 'f32', SIZE, 3000, 0, 2));
    await check(world, make('reduce-scatter', 'f16', SIZE, 3000, 0, 3));
    await check(world, make('broadcast', 'u8', SIZE, 50_000, 3, 4));
    await check(world, make('reduce', 'i64', SIZE, 700, 2, 5));
    await check(
      world,
      exchanged(SIZE, () => 1000),
    );
    await check(
      world,
      exchanged(SIZE, () => LONG),
    );
    expect(counts.joined).toBe(7);
    const made = make('all-reduce', 'f32', SIZE, LONG, 0, 8);
    for (const end of await nested(world, counts, made.call)) expect(end.status).toBe('fulfilled');
    holds(made, SIZE);
    expect(counts.joined).toBe(7 + SIZE);
  });

  // Of the ranks that give and take the same everywhere, and of others.
  it.each([
    ['in one step', 1000, 20_000],
    ['in several', 1000, LONG],
    ['of which theirs alone is one', 60_000, 70_000],
  ])('where others give more, %s', async (_, short, long) => {
    const counts = new Counts();
    await using world = await carried(counts);
    const isEven = (rank: number): boolean => rank === 0 || rank === 3;
    for (let turn = 0; turn < 6; turn++) {
      const before = counts.joined;
      const length = (from: number, to: number): number =>
        isEven(from) || isEven(to) ? short + turn : long + from * 10 + to;
      const made = exchanged(SIZE, length);
      if (turn % 2 === 0) await check(world, made);
      else for (const end of await nested(world, counts, made.call)) expect(end.status).toBe('fulfilled');
      holds(made, SIZE);
      expect(counts.joined - before).toBe(turn % 2 === 0 ? 1 : 2);
      await check(world, make('all-reduce', 'f32', SIZE, turn % 2 === 0 ? 500 : LONG, 0, turn));
      await check(world, blocks(SIZE, 2000));
    }
  });

  it('where the call is carried by nobody, since another gives little', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    for (let turn = 0; turn < 6; turn++) {
      const [begun, joined] = [counts.begun, counts.joined];
      // 4 blocks of 240 bytes are more than what goes with the word of a call, one is not.
      const made = exchanged(SIZE, (from, to) => (from === 0 || to === 0 ? 60 : 0));
      await check(world, made);
      expect([counts.begun - begun, counts.joined - joined]).toEqual([1, 1]);
      await check(
        world,
        exchanged(SIZE, () => 1000 + turn),
      );
      await check(world, make('all-reduce', 'f64', SIZE, turn % 2 === 0 ? 500 : LONG, 0, turn));
    }
  });

  it('where others call something else, or give it up, as any other, with arrays as they were', async () => {
    for (const others of ['all-gather', 'nothing'] as const) {
      const counts = new Counts();
      await using world = await carried(counts);
      const arrays = [0, 1, 2].map((rank) => new Float32Array(3000).fill(rank + 1));
      const cut = new AbortController();
      const last =
        others === 'nothing'
          ? sumOf(new Float32Array(3000), { signal: cut.signal })
          : make(others, 'f32', SIZE, 3000, 0, 1).call(3);
      const ends = world.settled((rank) => sumOf(arrays[rank]!), [0, 1, 2]);
      cut.abort(new Error('no more'));
      await world.settled(() => last, [3]);
      const code = others === 'nothing' ? 'EP_ABORTED' : 'EP_MISMATCH';
      const found = await ends;
      expect(counts.joined).toBe(1);
      for (const end of found) expect(end.status).toBe('rejected');
      expect(found[0]).toMatchObject(rejection(code));
      for (const [rank, array] of arrays.entries()) expect(array.every((value) => value === rank + 1)).toBe(true);
      // Repaired, they have others carried.
      await Promise.all([0, 1, 2, 3].map((rank) => world.repair(rank)));
      const sums = [0, 1, 2, 3].map(() => new Float32Array(3000).fill(1));
      const begun = counts.begun;
      for (let i = 0; counts.begun === begun && i < 2000; i++) await world.all((rank) => sumOf(sums[rank]!.fill(1)));
      expect(counts.begun).toBeGreaterThan(begun);
      for (const sum of sums) expect(sum.every((value) => value === 4)).toBe(true);
    }
  });

  it('ends with the loss of one that has begun it', async () => {
    const counts = new Counts();
    await using world = await carried(counts);
    const arrays = [0, 1, 2, 3].map(() => new Float32Array(LONG).fill(1));
    const first = world.run(3, sumOf(arrays[3]!)).catch(() => {});
    await world.lose(3);
    await first;
    const ends = await world.settled((rank) => sumOf(arrays[rank]!), [0, 1, 2]);
    for (const end of ends) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [3] }));
    const made = [0, 1, 2].map(() => new Float32Array(LONG).fill(1));
    await world.all((rank) => sumOf(made[rank]!), [0, 1, 2]);
    for (const array of made) expect([array[0], array.at(-1)]).toEqual([3, 3]);
  });
});
