/** Calls of every kind with everything that they take, and what they must give: plain loops. */
import { createStorage, type DType } from '@ep/core';
import { expect } from 'vitest';
import type { Elements, OpKind } from '../../src/engine.js';
import { reduceInto } from '../../src/reduce.js';
import type { ReduceOp } from '../../src/reduce-op.js';
import { type Call, numbers, type World } from './world.js';

export function filled(dtype: DType, length: number, seed: number): Elements {
  const made = createStorage(dtype, length) as Elements;
  const below = numbers(seed);
  // Small numbers in every format: products stay exact, and no code is a NaN.
  for (let i = 0; i < length; i++) made[i] = dtype.endsWith('64') && dtype !== 'f64' ? BigInt(below(9)) : below(9);
  return made;
}

const empty = (dtype: DType, length: number): Elements => createStorage(dtype, length) as Elements;

export function fold(dtype: DType, op: ReduceOp, sources: readonly Elements[]): Elements {
  const target = empty(dtype, sources[0]!.length);
  reduceInto(dtype, op, target as never, sources as never);
  return target;
}

export interface Made {
  readonly call: (rank: number) => Call;
  /** Arrays of a rank after the call, and what they must be. */
  readonly found: (rank: number) => readonly Elements[];
  readonly expected: (rank: number) => readonly Elements[];
}

/** A call of each kind over `size` ranks, with everything that it takes. */
export function make(kind: OpKind, dtype: DType, size: number, length: number, root: number, seed: number): Made {
  const ranks = [...Array(size).keys()];
  // Only what the kind takes is made: large arrays take long to fill.
  const inBlocks = kind === 'scatter' || kind === 'reduce-scatter';
  const single = kind === 'all-to-all' || inBlocks ? [] : ranks.map((rank) => filled(dtype, length, seed + rank));
  const several = inBlocks
    ? ranks.map((rank) => ranks.map((peer) => filled(dtype, length, seed + rank * size + peer)))
    : [];
  const uneven =
    kind === 'all-to-all'
      ? ranks.map((rank) => ranks.map((peer) => filled(dtype, (rank * 3 + peer) % (length + 1), seed + rank)))
      : [];
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
    case 'all-reduce': {
      const total = sum(single);
      return {
        call: (r) => ({ kind, dtype, reduceOp, inputs: [single[r]!], outputs: [one[r]!] }),
        found: (r) => [one[r]!],
        expected: () => [total],
      };
    }
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

/** An all-to-all of blocks of unlike lengths, some of them empty. */
export const blocks = (size: number, length: number): Made =>
  exchanged(size, (from, to) => ((from + 2 * to) % 5 === 4 ? 0 : Math.max(0, length - 7 * from - to)));

export function exchanged(size: number, lengthOf: (from: number, to: number) => number): Made {
  const ranks = [...Array(size).keys()];
  const given = ranks.map((from) => ranks.map((to) => filled('i32', lengthOf(from, to), from * size + to)));
  const taken = ranks.map((to) => ranks.map((from) => empty('i32', lengthOf(from, to))));
  return {
    call: (rank) => ({ kind: 'all-to-all', dtype: 'i32', inputs: given[rank]!, outputs: taken[rank]! }),
    found: (rank) => taken[rank]!,
    expected: (rank) => ranks.map((from) => given[from]![rank]!),
  };
}

const sameBytes = (a: Elements, b: Elements): boolean =>
  Buffer.compare(
    new Uint8Array(a.buffer, a.byteOffset, a.byteLength),
    new Uint8Array(b.buffer, b.byteOffset, b.byteLength),
  ) === 0;

export async function check(world: World, made: Made): Promise<void> {
  const ends = await world.all(made.call);
  for (const end of ends) expect(end.contributors).toEqual([...Array(world.size).keys()]);
  holds(made, world.size);
}

/** What ranks have found is what they must. */
export function holds(made: Made, size: number): void {
  for (let rank = 0; rank < size; rank++) {
    const [found, expected] = [made.found(rank), made.expected(rank)];
    // Element by element only where something is to be shown: a million take a second.
    if (found.length !== expected.length || !found.every((one, i) => sameBytes(one, expected[i]!)))
      expect(found).toEqual(expected);
  }
}

export const KINDS: readonly OpKind[] = [
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
