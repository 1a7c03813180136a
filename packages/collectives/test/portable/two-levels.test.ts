/** Groups of several hosts: the same results as in one level, in one order of folding, with fewer bytes between hosts, and the same ends. */
import { createStorage, decode, elementBytes, encode, type FloatDType } from '@ep/core';
import { describe, expect, it } from 'vitest';
import type { Elements, OpKind } from '../../src/engine.js';
import { PIECE_BYTES } from '../../src/portable/host-level.js';
import { Placement } from '../../src/portable/placement.js';
import { TWO_LEVELS_BYTES } from '../../src/portable/two-levels.js';
import { reduceInto } from '../../src/reduce.js';
import type { ReduceOp } from '../../src/reduce-op.js';
import { check, KINDS, make } from './calls.js';
import { numbers, rejection, World } from './world.js';

const TWO_BY_TWO = [0, 0, 1, 1];
const SMALLEST = TWO_LEVELS_BYTES / elementBytes('f32');

describe('a placement', () => {
  it('orders hosts by their lowest ranks, and says who stands in one place on all of them', () => {
    const placement = new Placement([7, 3, 7, 3, 5, 5], 4);
    expect(placement.hosts).toEqual([
      [0, 2],
      [1, 3],
      [4, 5],
    ]);
    expect([placement.host, placement.local, placement.even]).toEqual([2, 0, true]);
    expect(placement.column(1)).toEqual([2, 3, 5]);
  });

  it.each([[[0, 0, 0, 0]], [[0, 1, 2, 3]], [[0, 0, 1]], [[0]]])('of %j has no second level', (hosts) => {
    expect(new Placement(hosts, 0).even).toBe(false);
  });
});

describe.each([[[0, 1, 0, 1]], [[4, 4, 2, 2, 9, 9]]])('on hosts %j', (hosts) => {
  it('move and fold every size', async () => {
    const size = hosts.length;
    await using world = await World.open({ size, hosts });
    for (const [seed, length] of [SMALLEST - 1, SMALLEST + 3].entries()) {
      for (const kind of KINDS) await check(world, make(kind, 'f32', size, length, (3 * seed) % size, seed + 1));
    }
  });
});

it('keep many calls in flight, large and small', async () => {
  const size = 4;
  await using world = await World.open({ size, hosts: TWO_BY_TWO });
  const made = Array.from({ length: 18 }, (_, i) => {
    const length = i % 2 === 0 ? 40 + i : SMALLEST + i;
    return make(KINDS[i % KINDS.length]!, 'i32', size, length, i % size, i);
  });
  await Promise.all(made.map((one) => check(world, one)));
});

it('carry calls out in pieces, of lengths that hosts cannot share equally too', async () => {
  const size = 4;
  await using world = await World.open({ size, hosts: TWO_BY_TWO });
  const piece = PIECE_BYTES / elementBytes('f64');
  // Of a reduction three, as staging memory has room for two.
  for (const kind of ['all-reduce', 'reduce'] as const) {
    await check(world, make(kind, 'f64', size, 4 * piece + 1001, 3, 1));
  }
  for (const kind of ['broadcast', 'all-gather', 'reduce-scatter'] as const) {
    await check(world, make(kind, 'f64', size, piece + 1001, 3, 1));
  }
});

/** Of each host in rank order, then of the hosts: by the words of docs/fabric.md, with the reductions of one level. */
function byHost(op: ReduceOp, hosts: readonly (readonly number[])[], inputs: readonly Float32Array[]): Float32Array {
  const length = inputs[0]!.length;
  const within = op === 'avg' ? 'sum' : op;
  const across = typeof op === 'object' || op === 'avg' ? 'sum' : op;
  const partials = hosts.map((members) => {
    const partial = new Float32Array(length);
    reduceInto(
      'f32',
      within,
      partial,
      members.map((rank) => inputs[rank]!),
    );
    return partial;
  });
  const result = new Float32Array(length);
  reduceInto('f32', across, result, partials);
  if (op === 'avg') for (let i = 0; i < length; i++) result[i] = result[i]! / inputs.length;
  return result;
}

describe('fold the ranks of each host first, and then the hosts', () => {
  const length = 3 * SMALLEST + 1;
  const scaled = { op: 'premul-sum', factor: 0.3 } as const;
  const cases = [
    { hosts: [0, 1, 0, 1], dtype: 'f32', ops: ['sum', 'avg', 'product', 'max', scaled] },
    { hosts: [0, 1, 0, 1], dtype: 'bf16', ops: ['sum', 'avg', scaled] },
    { hosts: [0, 1, 0, 1], dtype: 'f16', ops: ['sum', 'product', 'min'] },
    // Those in the second place on their hosts are in another order than the hosts.
    { hosts: [0, 1, 2, 2, 1, 0], dtype: 'f32', ops: ['sum'] },
    { hosts: [0, 1, 2, 2, 1, 0], dtype: 'bf16', ops: ['avg'] },
  ] as const;

  it.each(cases)('$dtype on $hosts', async ({ hosts, dtype, ops }) => {
    const below = numbers(11);
    const [digits, range] = { f32: [26, 40], bf16: [8, 40], f16: [10, 6] }[dtype] as [number, number];
    const given = hosts.map(() => {
      const values = Float32Array.from(
        { length },
        () => (below(2 ** digits) - 2 ** (digits - 1)) * 2 ** (below(range) - range / 2),
      );
      return encode(dtype, values) as Elements;
    });
    const singles = given.map((input) => Float32Array.from(decode(dtype as FloatDType, input as never)));
    await using world = await World.open({ size: hosts.length, hosts });
    for (const op of ops) {
      const expected = encode(dtype, byHost(op, new Placement(hosts, 0).hosts, singles)) as Elements;
      if (op === 'sum' && dtype !== 'f16') {
        const inOrder = createStorage(dtype, length);
        reduceInto(dtype, 'sum', inOrder as never, given as never);
        expect(expected, 'the inputs do not show the order').not.toEqual(inOrder);
      }
      const allReduce = async (begin: number, end: number): Promise<readonly Elements[]> => {
        const outputs = given.map((input) => input.slice(begin, end) as Elements);
        await world.all((rank) => {
          const both = { inputs: [outputs[rank]!], outputs: [outputs[rank]!] };
          return { kind: 'all-reduce', dtype, reduceOp: op, ...both };
        });
        return outputs;
      };
      for (const output of await allReduce(0, length)) expect(output, JSON.stringify(op)).toEqual(expected);
      // In one level, of two rounds and of one.
      for (const small of [SMALLEST - 1, 100]) {
        for (const output of await allReduce(5, 5 + small))
          expect(output, `${JSON.stringify(op)} of ${small}`).toEqual(expected.subarray(5, 5 + small));
      }
    }
  });

  it('in pieces too, to one rank, and scattered', async () => {
    await using world = await World.open({ size: 4, hosts: TWO_BY_TWO });
    const piece = PIECE_BYTES / elementBytes('f32');
    for (const kind of ['all-reduce', 'reduce'] as const)
      await check(world, make(kind, 'bf16', 4, 4 * piece + 1001, 3, 1));
    await check(world, make('reduce-scatter', 'f16', 4, piece + 1001, 3, 1));
  });
});

it('add halves up in single precision over all ranks, whatever their hosts', async () => {
  await using world = await World.open({ size: 4, hosts: TWO_BY_TWO });
  // 2048 has no odd neighbours in f16: rounded on each host, both ones would be lost.
  const codes = [0x6800, 0x3c00, 0x3c00, 0];
  const arrays = codes.map((code) => createStorage('f16', SMALLEST * 2).fill(code));
  await world.all((rank) => {
    const array = [arrays[rank]!];
    return { kind: 'all-reduce', dtype: 'f16', reduceOp: 'sum', inputs: array, outputs: array };
  });
  for (const array of arrays) expect(array).toEqual(createStorage('f16', array.length).fill(0x6801));
});

describe('cost between hosts', () => {
  const H = 2;
  const M = 2;
  const length = 4 * SMALLEST;
  const S = length * elementBytes('f32');
  const root = 1;
  const onRootHost = (rank: number): boolean => rank < M;
  /** Bytes that each rank gives to the transport; `S` of one array, where there are several. */
  const expected: { readonly [kind in OpKind]?: (rank: number) => number } = {
    'all-reduce': () => (2 * (H - 1) * S) / H / M,
    reduce: (rank) => (onRootHost(rank) ? 0 : S / M),
    'reduce-scatter': () => (H - 1) * S,
    'all-gather': () => (H - 1) * S,
    broadcast: (rank) => (rank === root ? (H - 1) * S : 0),
    gather: (rank) => (onRootHost(rank) ? 0 : S),
    scatter: (rank) => (rank === root ? M * (H - 1) * S : 0),
  };

  it.each(Object.keys(expected) as OpKind[])('of %s are those of its formula', async (kind) => {
    await using world = await World.open({ size: 4, hosts: TWO_BY_TWO });
    await check(world, make(kind, 'f32', 4, length, root, 3));
    for (const [rank, engine] of world.engines.entries()) {
      expect(engine.trace()[kind]!.bytes, `rank ${rank}`).toBe(expected[kind]!(rank));
    }
  });
});

it('cost of a sum of halves between hosts is that of single precision, once', async () => {
  await using world = await World.open({ size: 4, hosts: TWO_BY_TWO });
  const length = 4 * SMALLEST;
  await check(world, make('all-reduce', 'bf16', 4, length, 0, 3));
  for (const engine of world.engines)
    expect(engine.trace()['all-reduce']!.bytes).toBe((length / 2) * elementBytes('f32'));
});

describe('end alike when a rank is lost', () => {
  const sum = (array: Elements) => ({ kind: 'all-reduce', dtype: 'f64', reduceOp: 'sum', ...both(array) }) as const;
  const both = (array: Elements) => ({ inputs: [array], outputs: [array] });

  it.each([0, 3])('that never comes to a large call: rank %i', async (victim) => {
    await using world = await World.open({ size: 4, hosts: TWO_BY_TWO });
    const arrays = TWO_BY_TWO.map((_, rank) => new Float64Array(2 ** 20).fill(2 ** rank));
    await world.all((rank) => sum(arrays[rank]!));
    const survivors = [0, 1, 2, 3].filter((rank) => rank !== victim);
    const lost = world.settled((rank) => sum(arrays[rank]!), survivors);
    await world.lose(victim);
    for (const end of await lost) expect(end).toMatchObject(rejection('EP_PEER_LOST', { lost: [victim] }));
    const again = TWO_BY_TWO.map((_, rank) => new Float64Array(SMALLEST * 2).fill(2 ** rank));
    for (const end of await world.all((rank) => sum(again[rank]!), survivors))
      expect(end.contributors).toEqual(survivors);
    for (const rank of survivors) expect(again[rank]!.at(-1)).toBe(15 - 2 ** victim);
  });

  it('while the call is on a host, whose other ranks wait for it there', async () => {
    await using world = await World.open({ size: 4, hosts: TWO_BY_TWO });
    const arrays = TWO_BY_TWO.map((_, rank) => new Float64Array(2 ** 21).fill(2 ** rank));
    const calls = world.settled((rank) => sum(arrays[rank]!));
    await new Promise((resolve) => setTimeout(resolve, 20));
    await world.lose(1);
    for (const [rank, end] of (await calls).entries()) {
      if (rank !== 1) expect(end, `rank ${rank}`).toMatchObject(rejection('EP_PEER_LOST', { lost: [1] }));
    }
  });
});

describe('go in one level from then on, on all ranks alike', () => {
  const length = 4 * SMALLEST;
  const S = length * elementBytes('f32');
  const after: { readonly [what: string]: (world: World) => Promise<unknown> } = {
    'when they have agreed anew': (world) => Promise.all([0, 1, 2, 3].map((rank) => world.repair(rank))),
    'when one was taken out and has come back': async (world) => {
      await Promise.all([0, 1, 2].map((rank) => world.repair(rank, [3])));
      await Promise.all([world.join(3), world.takeIn([0, 1, 2], [3])]);
    },
  };

  it.each(Object.keys(after))('%s', async (what) => {
    await using world = await World.open({ size: 4, hosts: TWO_BY_TWO });
    const bytes = (): number[] => world.engines.map((engine) => engine.trace()['all-reduce']?.bytes ?? 0);
    const costs = async (): Promise<number[]> => {
      const before = bytes();
      await check(world, make('all-reduce', 'f32', 4, length, 0, 5));
      return bytes().map((sum, rank) => sum - before[rank]!);
    };
    expect(await costs()).toEqual([S / 2, S / 2, S / 2, S / 2]);
    await after[what]!(world);
    const one = (2 * 3 * S) / 4;
    expect(await costs()).toEqual([one, one, one, one]);
  });
});

it('tell all when one gives up a large call', async () => {
  await using world = await World.open({ size: 4, hosts: TWO_BY_TWO });
  const giving = new AbortController();
  const calls = world.settled(
    (rank) => ({
      kind: 'broadcast',
      dtype: 'f32',
      root: 0,
      ...(rank === 0 ? { inputs: [new Float32Array(2 ** 21)] } : { outputs: [new Float32Array(2 ** 21)] }),
      ...(rank === 2 && { signal: giving.signal }),
    }),
    [0, 1, 2],
  );
  giving.abort(new Error('enough'));
  const [root, mate, given] = await calls;
  expect(given).toMatchObject({ status: 'rejected', reason: { message: 'enough' } });
  for (const end of [root, mate]) expect(end).toMatchObject(rejection('EP_ABORTED', { ranks: [2] }));
});
