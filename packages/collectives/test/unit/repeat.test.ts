/** Calls that the shm engine carries out as repetitions of the one before, among others that differ from it in one thing. */
import { memoryStore, type Tensor } from '@ep/core';
import { expect, onTestFinished, test } from 'vitest';
import { initProcessGroup, type ProcessGroup, type ReduceOp } from '../../src/index.js';
import { failure } from './world.js';

const RANKS = [0, 1, 2] as const;

async function openGroups(): Promise<readonly ProcessGroup[]> {
  const store = memoryStore();
  const groups = await Promise.all(
    RANKS.map((rank) => initProcessGroup({ backend: 'shm', store, rank, worldSize: RANKS.length, timeoutMs: 20_000 })),
  );
  onTestFinished(async () => {
    await Promise.all(groups.map((group) => group.close()));
    await store.close();
  });
  return groups;
}

/** The same numbers in every run. */
function numbers(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

const sum = (values: readonly number[]): number => values.reduce((total, value) => total + value, 0);

const FOLDS: readonly { readonly op: ReduceOp; readonly fold: (values: readonly number[]) => number }[] = [
  { op: 'sum', fold: sum },
  { op: 'max', fold: (values) => Math.max(...values) },
  { op: { op: 'premul-sum', factor: 3 }, fold: (values) => 3 * sum(values) },
  { op: { op: 'premul-sum', factor: 5 }, fold: (values) => 5 * sum(values) },
];

type Data = Float32Array | Tensor<'f32'>;
const elements = (data: Data): Float32Array => (data instanceof Float32Array ? data : (data.data as Float32Array));

test('calls that are alike, and calls that nearly are, each give their own result', async () => {
  const groups = await openGroups();
  const tensors = groups.map((group): readonly Data[] => [
    group.allocate('f32', 3),
    group.allocate('f32', 3),
    new Float32Array(3),
    new Float32Array(3),
    new Float32Array(2),
  ]);
  const pick = numbers(7);
  let [which, kind, fold, root] = [0, 0, 0, 0];
  for (let call = 0; call < 800; call++) {
    // One thing at a time changes, and often nothing.
    const change = pick(8);
    if (change === 0) which = pick(5);
    if (change === 1) kind = pick(4);
    if (change === 2) fold = pick(FOLDS.length);
    if (change === 3) root = pick(RANKS.length);
    const values = [call % 251, (3 * call) % 241, (7 * call) % 239];
    for (const rank of RANKS) elements(tensors[rank]![which]!).fill(values[rank]!);
    const { op, fold: apply } = FOLDS[fold]!;
    await Promise.all(
      groups.map((group, rank) => {
        const data = tensors[rank]![which]!;
        if (kind === 0) return group.allReduce(data, { op });
        if (kind === 1) return group.broadcast(data, { root });
        if (kind === 2) return group.reduce(data, { root, op });
        return group.barrier();
      }),
    );
    for (const rank of RANKS) {
      const reduced = kind === 0 || (kind === 2 && rank === root);
      const want = reduced ? apply(values) : values[kind === 1 ? root : rank]!;
      const got = elements(tensors[rank]![which]!);
      if (got.some((value) => value !== want)) {
        expect.fail(`call ${call}, kind ${kind}, rank ${rank}, tensor ${which}: expected ${want}, got ${got}`);
      }
    }
  }
});

test('calls on the parts of arrays, alike and nearly alike, each give their own result', async () => {
  const groups = await openGroups();
  const size = RANKS.length;
  const own = groups.map((group) => [
    {
      whole: group.allocate('f32', 2 * size).data as Float32Array,
      part: group.allocate('f32', 2).data as Float32Array,
    },
    { whole: new Float32Array(2 * size), part: new Float32Array(2) },
    { whole: new Float32Array(4 * size), part: new Float32Array(2) },
  ]);
  const even = RANKS.map(() => new Float32Array(2 * size));
  const uneven = RANKS.map((rank) => new Float32Array(size * (rank + 1)));
  const pick = numbers(11);
  let [which, kind, fold] = [0, 0, 0];
  for (let call = 0; call < 900; call++) {
    const change = pick(6);
    if (change === 0) which = pick(3);
    if (change === 1) kind = pick(4);
    if (change === 2) fold = pick(FOLDS.length);
    const { op, fold: apply } = FOLDS[fold]!;
    const value = (rank: number, at: number) => ((call * 7 + rank * 31 + at * 3) % 251) + 1;
    // Of the third, another view in every call: the same bytes, by an array that was never seen.
    const views = RANKS.map((rank) => {
      const { whole, part } = own[rank]![which]!;
      return which === 2 ? { whole: whole.subarray(2, 2 + 2 * size), part } : { whole, part };
    });
    for (const rank of RANKS) {
      const { whole, part } = views[rank]!;
      for (const result of [even[rank]!, uneven[rank]!]) result.fill(-1);
      for (let at = 0; at < 2 * size; at++) whole[at] = kind === 0 ? -1 : value(rank, at);
      for (let at = 0; at < 2; at++) part[at] = kind === 0 ? value(rank, at) : -1;
    }
    await Promise.all(
      groups.map((group, rank) => {
        const { whole, part } = views[rank]!;
        if (kind === 0) return group.allGatherIntoTensor(whole, part);
        if (kind === 1) return group.reduceScatterTensor(part, whole, { op });
        if (kind === 2) return group.allToAllSingle(even[rank]!, whole);
        return group.allToAllSingle(uneven[rank]!, whole, {
          inputSplits: RANKS.map((to) => to + 1),
          outputSplits: RANKS.map(() => rank + 1),
        });
      }),
    );
    for (const rank of RANKS) {
      const { whole, part } = views[rank]!;
      const begin = (rank * (rank + 1)) / 2;
      const from = (first: number, count: number) =>
        RANKS.flatMap((sender) => Array.from({ length: count }, (_, at) => value(sender, first + at)));
      const reduced = [0, 1].map((at) => apply(RANKS.map((sender) => value(sender, 2 * rank + at))));
      const want = [from(0, 2), reduced, from(2 * rank, 2), from(begin, rank + 1)][kind];
      const got = [whole, part, even[rank]!, uneven[rank]!][kind]!;
      expect(Array.from(got), `call ${call}, kind ${kind}, rank ${rank}, arrays ${which}`).toEqual(want);
    }
  }
});

test('a whole that is taken away between two calls is refused, and its parts are not written', async () => {
  const groups = await openGroups();
  const wholes = RANKS.map(() => new Float32Array(2 * RANKS.length));
  const parts = RANKS.map((rank) => Float32Array.of(rank, rank));
  const gather = () =>
    Promise.allSettled(groups.map(async (group, rank) => await group.allGatherIntoTensor(wholes[rank]!, parts[rank]!)));
  for (let i = 0; i < 3; i++) expect((await gather()).every(({ status }) => status === 'fulfilled')).toBe(true);
  for (const whole of wholes) structuredClone(whole.buffer, { transfer: [whole.buffer] });
  for (const end of await gather()) {
    expect(end).toMatchObject({ status: 'rejected', reason: { code: 'EP_DETACHED' } });
  }
});

test('an array that was taken away after a call is refused, not read', async () => {
  const store = memoryStore();
  const group = await initProcessGroup({ backend: 'shm', store, rank: 0, worldSize: 1 });
  onTestFinished(async () => {
    await group.close();
    await store.close();
  });
  const data = Float32Array.of(1, 2);
  for (let i = 0; i < 3; i++) await group.allReduce(data);
  structuredClone(data.buffer, { transfer: [data.buffer] });
  await failure('EP_DETACHED', () => group.allReduce(data));
  const other = Float32Array.of(4);
  await group.allReduce(other);
  expect(other).toEqual(Float32Array.of(4));
});

test('a repetition after close() is refused', async () => {
  const store = memoryStore();
  const group = await initProcessGroup({ backend: 'shm', store, rank: 0, worldSize: 1 });
  const data = group.allocate('f32', 4);
  for (let i = 0; i < 3; i++) group.allReduce(data);
  await group.close();
  await failure('EP_CLOSED', () => group.allReduce(data));
  await store.close();
});

test('a factor that the caller changed counts', async () => {
  const store = memoryStore();
  const group = await initProcessGroup({ backend: 'shm', store, rank: 0, worldSize: 1 });
  onTestFinished(async () => {
    await group.close();
    await store.close();
  });
  const op = { op: 'premul-sum' as const, factor: 2 };
  const data = Float32Array.of(1);
  for (const factor of [2, 2, 3, 3]) {
    op.factor = factor;
    await group.allReduce(data, { op });
  }
  expect(data).toEqual(Float32Array.of(36));
});
