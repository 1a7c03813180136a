/** Values instead of tensors. */
import { serialize } from 'node:v8';
import { describe, expect, test, vi } from 'vitest';
import { failure, openWorld } from './world.js';

const sample = (rank: number): object => ({
  rank,
  map: new Map([[rank, { when: new Date(rank), big: 2n ** 70n, bytes: Uint8Array.of(rank, 1) }]]),
  text: 'x'.repeat(rank * 1000),
  nothing: undefined,
});

describe.each([1, 3])('%i ranks', (size) => {
  const ranks = Array.from({ length: size }, (_, rank) => rank);

  test('broadcastObject gives all ranks the value of the root', async () => {
    const { each } = await openWorld(size);
    const found = await each((group, rank) =>
      group.broadcastObject(rank === size - 1 ? sample(5) : undefined, { root: size - 1 }),
    );
    expect(found).toEqual(ranks.map(() => sample(5)));
    expect(new Set(found).size).toBe(size);
  });

  test('gatherObject and allGatherObject bring values of any sizes', async () => {
    const { each } = await openWorld(size);
    const gathered = await each((group, rank) => group.gatherObject(sample(rank), { root: 0 }));
    expect(gathered).toEqual(ranks.map((rank) => (rank === 0 ? ranks.map(sample) : undefined)));
    const all = await each((group, rank) => group.allGatherObject(sample(rank)));
    expect(all).toEqual(ranks.map(() => ranks.map(sample)));
  });
});

test('undefined, null and empty values come through', async () => {
  const { each } = await openWorld(3);
  const values = [undefined, null, ''];
  expect(await each((group, rank) => group.allGatherObject(values[rank]))).toEqual([values, values, values]);
  expect(await each((group) => group.broadcastObject(undefined, { root: 1 }))).toEqual([
    undefined,
    undefined,
    undefined,
  ]);
});

test('calls made while an object is under way go behind all of it, whatever the time each rank takes', async () => {
  const { each } = await openWorld(3);
  await each(async (group, rank) => {
    const object = group.broadcastObject(rank === 1 ? 'value' : undefined, { root: 1 });
    // Some ranks make their next calls at once, others when the first part of the object has come.
    if (rank !== 0) await vi.waitFor(() => expect(group.trace().broadcast?.calls).toBeGreaterThan(0), { interval: 1 });
    const data = Float32Array.of(1);
    const reduced = group.allReduce(data);
    const gathered = group.allGatherObject(rank);
    const last = group.barrier();
    expect(await object).toBe('value');
    await reduced;
    expect(data[0]).toBe(3);
    expect(await gathered).toEqual([0, 1, 2]);
    await last;
    expect([object.sequence, reduced.sequence, gathered.sequence, last.sequence]).toEqual([1, 3, 4, 6]);
  });
});

test('whoever continues when an object has come is behind the calls that waited for it', async () => {
  const { each } = await openWorld(2);
  await each(async (group) => {
    const object = group.allGatherObject(1);
    const waited = group.allReduce(Float32Array.of(1));
    // In a reaction of the object itself, which is as early as anybody can continue.
    await object.then(() => group.allReduce(Int32Array.of(1)));
    expect(waited.status).toBe('done');
    const reduced = group
      .flightRecorder()
      .entries()
      .filter(({ kind }) => kind === 'all-reduce');
    expect(reduced.map(({ dtype }) => dtype)).toEqual(['f32', 'i32']);
  });
});

test('a failure in the first part fails the object, and calls behind it keep the numbers of the engine', async () => {
  const { memory, groups } = await openWorld(3);
  const survivors = [groups[0]!, groups[1]!];
  const objects = survivors.map((group, rank) => group.broadcastObject(rank === 0 ? 1 : undefined, { root: 0 }));
  const behind = survivors.map((group) => group.barrier());
  memory.kill(2);
  for (const object of objects) {
    const error = await failure('EP_PEER_LOST', () => object);
    expect(error.message).toMatch(/^broadcast 1:/);
  }
  await Promise.all(behind);
  const next = survivors.map((group) => group.barrier());
  await Promise.all(next);
  expect(next.map(({ sequence }) => sequence)).toEqual([3, 3]);
  const all = await Promise.all(survivors.map((group) => group.allGatherObject(group.rank)));
  expect(all).toEqual([
    [0, 1, undefined],
    [0, 1, undefined],
  ]);
  const roots = await Promise.all(survivors.map((group) => group.gatherObject(group.rank, { root: 1 })));
  expect(roots).toEqual([undefined, [0, 1, undefined]]);
});

test('bytes that are no value are EP_MISMATCH naming who sent them', async () => {
  const { groups } = await openWorld(2);
  const [receiver, sender] = groups;
  const bytes = serialize('value');
  bytes[0] = 0;
  const object = receiver!.broadcastObject(undefined, { root: 1 });
  // By hand what an object is made of.
  await sender!.broadcast(Float64Array.of(bytes.byteLength), { root: 1 });
  const second = sender!.broadcast({ dtype: 'u8', shape: [bytes.byteLength], data: bytes }, { root: 1 });
  const error = await failure('EP_MISMATCH', () => object);
  expect(error.context.ranks).toEqual([1]);
  await second;
});
