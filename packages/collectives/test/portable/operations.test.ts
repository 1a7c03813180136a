/** Every operation over the hostile transport and over shared memory, at sizes around the borders of chunks, against plain loops; and what it costs. */
import { createStorage, type DType, elementBytes } from '@ep/core';
import { describe, expect, it } from 'vitest';
import type { Elements, OpKind, OpTrace } from '../../src/engine.js';
import { CHUNK_HEADER_BYTES, layOut, smallestSection } from '../../src/portable/layout.js';
import { DIRECT_BYTES } from '../../src/portable/plan.js';
import { reduceInto } from '../../src/reduce.js';
import type { ReduceOp } from '../../src/reduce-op.js';
import { type Call, type Kind, numbers, SMALL_STAGING, World } from './world.js';

/** Whole pages, as the arena takes them. */
const stagingFor = (size: number): number =>
  Math.max(SMALL_STAGING, Math.ceil((2 * smallestSection(size)) / 4096) * 4096);
const chunkBytes = (size: number): number => layOut(stagingFor(size), size).slotBytes - CHUNK_HEADER_BYTES;

function filled(dtype: DType, length: number, seed: number): Elements {
  const made = createStorage(dtype, length) as Elements;
  const below = numbers(seed);
  // Small numbers in every format: products stay exact, and no code is a NaN.
  for (let i = 0; i < length; i++) made[i] = dtype.endsWith('64') && dtype !== 'f64' ? BigInt(below(9)) : below(9);
  return made;
}

const empty = (dtype: DType, length: number): Elements => createStorage(dtype, length) as Elements;

function fold(dtype: DType, op: ReduceOp, sources: readonly Elements[]): Elements {
  const target = empty(dtype, sources[0]!.length);
  reduceInto(dtype, op, target as never, sources as never);
  return target;
}

interface Made {
  readonly call: (rank: number) => Call;
  /** Arrays of a rank after the call, and what they must be. */
  readonly found: (rank: number) => readonly Elements[];
  readonly expected: (rank: number) => readonly Elements[];
}

/** A call of each kind over `size` ranks, with everything that it takes. */
function make(kind: OpKind, dtype: DType, size: number, length: number, root: number, seed: number): Made {
  const ranks = [...Array(size).keys()];
  const single = ranks.map((rank) => filled(dtype, length, seed + rank));
  const several = ranks.map((rank) => ranks.map((peer) => filled(dtype, length, seed + rank * size + peer)));
  const uneven = ranks.map((rank) => ranks.map((peer) => filled(dtype, (rank * 3 + peer) % (length + 1), seed + rank)));
  const one = ranks.map(() => empty(dtype, length));
  const many = ranks.map(() => ranks.map(() => empty(dtype, length)));
  const sum = (sources: readonly Elements[]): Elements => fold(dtype, 'sum', sources);
  const reduceOp = 'sum' as const;
  const at = (rank: number, arrays: readonly Elements[]): readonly Elements[] => (rank === root ? arrays : []);
  const notAt = (rank: number, arrays: readonly Elements[]): readonly Elements[] => (rank === root ? [] : arrays);
  switch (kind) {
    case 'barrier':
      return { call: () => ({ kind }), found: () => [], expected: () => [] };
    case 'broadcast':
      return {
        call: (r) => ({ kind, dtype, root, inputs: at(r, [single[r]!]), outputs: notAt(r, [one[r]!]) }),
        found: (r) => notAt(r, [one[r]!]),
        expected: (r) => notAt(r, [single[root]!]),
      };
    case 'all-reduce':
      return {
        call: (r) => ({ kind, dtype, reduceOp, inputs: [single[r]!], outputs: [one[r]!] }),
        found: (r) => [one[r]!],
        expected: () => [sum(single)],
      };
    case 'reduce':
      return {
        call: (r) => ({ kind, dtype, reduceOp, root, inputs: [single[r]!], outputs: at(r, [one[r]!]) }),
        found: (r) => at(r, [one[r]!]),
        expected: (r) => at(r, [sum(single)]),
      };
    case 'all-gather':
      return {
        call: (r) => ({ kind, dtype, inputs: [single[r]!], outputs: many[r]! }),
        found: (r) => many[r]!,
        expected: () => single,
      };
    case 'gather':
      return {
        call: (r) => ({ kind, dtype, root, inputs: [single[r]!], outputs: at(r, many[r]!) }),
        found: (r) => at(r, many[r]!),
        expected: (r) => at(r, single),
      };
    case 'scatter':
      return {
        call: (r) => ({ kind, dtype, root, inputs: at(r, several[r]!), outputs: [one[r]!] }),
        found: (r) => [one[r]!],
        expected: (r) => [several[root]![r]!],
      };
    case 'reduce-scatter':
      return {
        call: (r) => ({ kind, dtype, reduceOp, inputs: several[r]!, outputs: [one[r]!] }),
        found: (r) => [one[r]!],
        expected: (r) => [sum(several.map((blocks) => blocks[r]!))],
      };
    case 'all-to-all': {
      const outputs = ranks.map((r) => ranks.map((peer) => empty(dtype, uneven[peer]![r]!.length)));
      return {
        call: (r) => ({ kind, dtype, inputs: uneven[r]!, outputs: outputs[r]! }),
        found: (r) => outputs[r]!,
        expected: (r) => ranks.map((peer) => uneven[peer]![r]!),
      };
    }
  }
}

async function check(world: World, made: Made): Promise<void> {
  const ends = await world.all(made.call);
  for (const end of ends) expect(end.contributors).toEqual([...Array(world.size).keys()]);
  for (let rank = 0; rank < world.size; rank++) expect(made.found(rank)).toEqual(made.expected(rank));
}

const KINDS: readonly OpKind[] = [
  'barrier',
  'broadcast',
  'all-reduce',
  'reduce',
  'all-gather',
  'gather',
  'scatter',
  'reduce-scatter',
  'all-to-all',
];

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
    if (kind === 'hostile' && size > 1) expect(world.overtakes()).toBeGreaterThan(20);
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
      // What each rank calls, and that it has its data: one word each to every peer.
      expect(trace.signals).toBe(2 * (SIZE - 1));
    }
  });

  it('of a small all-reduce are one round', async () => {
    await using world = await World.open({ size: SIZE });
    await check(world, make('all-reduce', 'f64', SIZE, 8, 1, 3));
    for (const engine of world.engines) expect(engine.trace()['all-reduce']).toMatchObject(runs(SIZE - 1, 64));
  });
});
