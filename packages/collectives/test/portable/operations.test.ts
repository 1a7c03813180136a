/** Every operation over the hostile transport and over shared memory, at sizes around the borders of chunks, against plain loops; and what it costs. */
import { elementBytes } from '@ep/core';
import { describe, expect, it } from 'vitest';
import type { OpKind, OpTrace } from '../../src/engine.js';
import { CHUNK_HEADER_BYTES, layOut, smallestSection } from '../../src/portable/layout.js';
import { DIRECT_BYTES } from '../../src/portable/plan.js';
import { check, filled, fold, KINDS, make } from './calls.js';
import { type Kind, numbers, SMALL_STAGING, World } from './world.js';

/** Whole pages, as the arena takes them. */
const stagingFor = (size: number): number =>
  Math.max(SMALL_STAGING, Math.ceil((2 * smallestSection(size)) / 4096) * 4096);
const chunkBytes = (size: number): number => layOut(stagingFor(size), size).slotBytes - CHUNK_HEADER_BYTES;

const worlds: readonly (readonly [Kind, number])[] = [
  ['hostile', 1],
  ['hostile', 2],
  ['hostile', 3],
  ['hostile', 4],
  ['shm', 2],
  ['shm', 5],
  ...(process.env.EP_TEST_FULL === '1'
    ? ([
        ['hostile', 9],
        ['shm', 32],
      ] as const)
    : []),
];

describe.each(worlds)('over %s, %i ranks', (kind, size) => {
  it('moves and folds every size', async () => {
    await using world = await World.open({ kind, size, stagingBytes: stagingFor(size) });
    const chunk = chunkBytes(size) / 4;
    // Nothing, one, around one chunk, more than all slots of a lane hold.
    const lengths = [0, 1, chunk - 1, chunk, chunk + 1, 5 * chunk + 3];
    for (const [seed, length] of lengths.entries()) {
      for (const op of KINDS) await check(world, make(op, 'f32', size, length, seed % size, seed + 1));
    }
    // How many depends on the machine: a busy one saw 18 between two ranks.
    if (kind === 'hostile' && size > 1) expect(world.overtakes()).toBeGreaterThan(5);
  });

  it('keeps many calls in flight', async () => {
    await using world = await World.open({ kind, size, stagingBytes: stagingFor(size) });
    const made = Array.from({ length: 60 }, (_, i) => make(KINDS[i % KINDS.length]!, 'i32', size, 40 + i, i % size, i));
    await Promise.all(made.map((one) => check(world, one)));
  });
});

describe('over the hostile transport', () => {
  it('takes every dtype', async () => {
    const size = 3;
    await using world = await World.open({ size, stagingBytes: SMALL_STAGING });
    for (const dtype of ['f64', 'f32', 'f16', 'bf16', 'i64', 'u64', 'i32', 'u32', 'i16', 'u16', 'i8', 'u8'] as const) {
      await check(world, make('all-reduce', dtype, size, 700, 0, 5));
      await check(world, make('reduce-scatter', dtype, size, 300, 0, 6));
    }
    for (const dtype of ['f8e4m3', 'f8e5m2', 'ue8m0'] as const) {
      for (const kind of ['broadcast', 'all-gather', 'all-to-all'] as const) {
        await check(world, make(kind, dtype, size, 1001, 1, 7));
      }
    }
  });

  it('gives all ranks and all chunkings the same bits', async () => {
    const size = 4;
    const length = 3000;
    const below = numbers(11);
    const inputs = [...Array(size)].map(() =>
      Float32Array.from({ length }, () => (below(2 ** 26) - 2 ** 25) * 2 ** (below(40) - 20)),
    );
    const expected = fold('f32', 'sum', inputs);
    for (const stagingBytes of [SMALL_STAGING, 4 * SMALL_STAGING]) {
      await using world = await World.open({ size, stagingBytes });
      const outputs = inputs.map((input) => input.slice());
      // In place on two of them.
      await world.all((rank) => {
        const output = outputs[rank]!;
        const input = rank < 2 ? output : inputs[rank]!;
        return { kind: 'all-reduce', dtype: 'f32', reduceOp: 'sum', inputs: [input], outputs: [output] };
      });
      for (const output of outputs) expect(Buffer.from(output.buffer)).toEqual(Buffer.from(expected.buffer));
    }
  });

  it('does not stop when slots are given back out of order', async () => {
    // Folded shards are taken at once, while parts that came before them are held until all ranks' are there.
    for (let seed = 1; seed <= 10; seed++) {
      await using world = await World.open({ size: 4, stagingBytes: SMALL_STAGING, hostile: { seed } });
      await check(world, make('all-reduce', 'f64', 4, 1200, 0, seed));
    }
  });

  it('reduces in place at both sizes of message, and at the root', async () => {
    const size = 3;
    await using world = await World.open({ size, stagingBytes: SMALL_STAGING });
    for (const length of [DIRECT_BYTES / 8, DIRECT_BYTES / 8 + 1, 5000]) {
      for (const kind of ['all-reduce', 'reduce'] as const) {
        const inputs = [...Array(size)].map((_, rank) => filled('f64', length, rank));
        const expected = fold('f64', 'sum', inputs);
        await world.all((rank) => ({
          kind,
          dtype: 'f64',
          reduceOp: 'sum',
          root: kind === 'reduce' ? 2 : -1,
          inputs: [inputs[rank]!],
          outputs: kind === 'reduce' && rank !== 2 ? [] : [inputs[rank]!],
        }));
        expect(inputs[2]).toEqual(expected);
        if (kind === 'all-reduce') expect(inputs[0]).toEqual(expected);
      }
    }
  });

  it('reduces small arrays in place although a peer has not taken them yet', async () => {
    const size = 3;
    // Chunks of 32 bytes: a rank has folded all of them before it could send all of them to the slower of two peers.
    await using world = await World.open({ size, stagingBytes: smallestSection(size), hostile: { maxDelayUs: 300 } });
    for (let seed = 0; seed < 5; seed++) {
      const inputs = [...Array(size)].map((_, rank) => filled('f64', DIRECT_BYTES / 8, 3 * seed + rank));
      const expected = fold('f64', 'sum', inputs);
      await world.all((rank) => ({
        kind: 'all-reduce',
        dtype: 'f64',
        reduceOp: 'sum',
        inputs: [inputs[rank]!],
        outputs: [inputs[rank]!],
      }));
      for (const input of inputs) expect(input).toEqual(expected);
    }
  });

  it('makes a thousand calls in flight end in order', async () => {
    await using world = await World.open({ kind: 'shm', size: 2 });
    const ended: number[] = [];
    await Promise.all(
      Array.from({ length: 1000 }, (_, i) =>
        world
          .all(() => ({
            kind: 'all-reduce',
            dtype: 'i32',
            reduceOp: 'sum',
            inputs: [Int32Array.of(i)],
            outputs: [new Int32Array(1)],
          }))
          .then(() => ended.push(i)),
      ),
    );
    expect(ended).toEqual([...Array(1000).keys()]);
  });
});

it('ends a call of a rank that is alone without a promise', async () => {
  await using world = await World.open({ size: 1 });
  const output = new Uint16Array(3);
  const input = Uint16Array.of(1, 2, 3);
  const call = { kind: 'all-reduce', dtype: 'u16', reduceOp: 'sum', inputs: [input], outputs: [output] } as const;
  const end = world.engines[0]!.run({ ...call, sequence: 1, root: -1, timeoutMs: 1000 });
  expect(end).toEqual({ contributors: [0] });
  expect(output).toEqual(input);
});

describe('costs', () => {
  const SIZE = 4;
  const LENGTH = 1200;
  const S = LENGTH * elementBytes('f64');
  const none = { bytes: 0, writes: 0 };
  /** Bytes and chunks of so many runs of bytes. */
  const runs = (count: number, byteLength: number): Partial<OpTrace> => ({
    bytes: count * byteLength,
    writes: count * Math.ceil(byteLength / chunkBytes(SIZE)),
  });
  const atRoot = (rank: number, cost: object): object => (rank === 1 ? cost : none);
  const expected: { readonly [kind in OpKind]: (rank: number) => object } = {
    barrier: () => none,
    broadcast: (rank) => atRoot(rank, runs(SIZE - 1, S)),
    'all-reduce': () => runs(2 * (SIZE - 1), S / SIZE),
    reduce: (rank) => (rank === 1 ? none : runs(1, S)),
    'all-gather': () => runs(SIZE - 1, S),
    gather: (rank) => (rank === 1 ? none : runs(1, S)),
    scatter: (rank) => atRoot(rank, runs(SIZE - 1, S)),
    'reduce-scatter': () => runs(SIZE - 1, S),
    'all-to-all': () => ({}),
  };

  it.each(KINDS)('of %s are those of its formula', async (kind) => {
    await using world = await World.open({ size: SIZE, stagingBytes: stagingFor(SIZE) });
    await check(world, make(kind, 'f64', SIZE, LENGTH, 1, 3));
    for (const [rank, engine] of world.engines.entries()) {
      const trace = engine.trace()[kind]!;
      expect(trace).toMatchObject({ calls: 1, ...expected[kind](rank) });
      // What each rank calls, and that it has its data: one word each to every peer. A barrier, and this all-to-all, which is small, end with the first.
      expect(trace.signals).toBe((kind === 'barrier' || kind === 'all-to-all' ? 1 : 2) * (SIZE - 1));
    }
  });

  it.each([
    ['in place', true],
    ['into another array', false],
  ])('of an all-reduce of two are one round, %s', async (_, inPlace) => {
    // Several chunks, of which not all fit the slots: each rank folds what it has sent.
    await using world = await World.open({ size: 2, stagingBytes: stagingFor(2) });
    const chunks = 21;
    const length = (chunks * chunkBytes(2)) / 8;
    const inputs = [0, 1].map((rank) => Float64Array.from({ length }, (__, i) => (i % 1013) * (rank + 2) + 0.1));
    const outputs = inPlace ? inputs : inputs.map(() => new Float64Array(length));
    const expected = Float64Array.from({ length }, (__, i) => inputs[0]![i]! + inputs[1]![i]!);
    const kept = inputs.map((input) => input.slice());
    for (let round = 0; round < 3; round++) {
      for (const [rank, input] of inputs.entries()) input.set(kept[rank]!);
      await world.all((rank) => ({
        kind: 'all-reduce',
        dtype: 'f64',
        reduceOp: 'sum',
        inputs: [inputs[rank]!],
        outputs: [outputs[rank]!],
      }));
      for (const output of outputs) expect(output).toEqual(expected);
    }
    const bytes = length * elementBytes('f64');
    for (const engine of world.engines)
      expect(engine.trace()['all-reduce']).toMatchObject({
        calls: 3,
        bytes: 3 * bytes,
        // By shards there would be one more: of two halves with ten and a half each.
        writes: 3 * chunks,
      });
  });

  it('of a small all-reduce are one round', async () => {
    await using world = await World.open({ size: SIZE });
    await check(world, make('all-reduce', 'f64', SIZE, 8, 1, 3));
    for (const engine of world.engines) expect(engine.trace()['all-reduce']).toMatchObject(runs(SIZE - 1, 64));
  });
});
