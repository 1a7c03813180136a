/** Operations that move elements and change none: broadcast, gathers, scatter, all-to-all. */
import assert from 'node:assert/strict';
import { DTYPES, type DType, type Storage } from '@ep/core';
import type { GroupCase } from './case.js';
import { expectElements, MOVABLE_ONLY, pattern, patterns, ranksOf, vector } from './oracle.js';

const LENGTH = 67;

/** Elements that rank `from` sends to rank `to`: uneven, with zeros. */
const split = (from: number, to: number, round: number): number => ((from * 3 + to * 5 + round) % 4) * 11;

const sum = (values: readonly number[]): number => values.reduce((total, value) => total + value, 0);

function joined<D extends DType>(dtype: D, parts: readonly Storage[D][]): Storage[D] {
  const whole = pattern(dtype, sum(parts.map((part) => part.length)), 0);
  let at = 0;
  for (const part of parts) {
    whole.set(part as never, at);
    at += part.length;
  }
  return whole;
}

export const movementCases: readonly GroupCase[] = [
  {
    id: 'broadcast/every-dtype-and-root',
    sentence: 'broadcast hands the bits of the root, each rank in turn, of every dtype to everybody',
    async body(rank) {
      const group = await rank.open();
      for (const [round, dtype] of DTYPES.entries()) {
        for (const root of ranksOf(rank.worldSize)) {
          const data = pattern(dtype, LENGTH, rank.rank, round);
          await group.broadcast(vector(dtype, data), { root });
          expectElements(dtype, data, pattern(dtype, LENGTH, root, round), `${dtype} from ${root}`);
        }
      }
    },
  },
  {
    id: 'all-gather/every-dtype',
    sentence: 'allGather and allGatherIntoTensor hand the bits of every rank, of every dtype, to everybody',
    async body(rank) {
      const group = await rank.open();
      for (const [round, dtype] of DTYPES.entries()) {
        const mine = pattern(dtype, LENGTH, rank.rank, round);
        const outputs = ranksOf(rank.worldSize).map(() => pattern(dtype, LENGTH, 99));
        await group.allGather(
          outputs.map((output) => vector(dtype, output)),
          vector(dtype, mine),
        );
        const whole = group.allocate(dtype, LENGTH * rank.worldSize);
        await group.allGatherIntoTensor(whole, vector(dtype, mine));
        const expected = patterns(dtype, LENGTH, rank.worldSize, round);
        for (const [writer, output] of outputs.entries()) {
          expectElements(dtype, output, expected[writer]!, `${dtype} of ${writer}`);
        }
        expectElements(dtype, whole.data, joined(dtype, expected), `${dtype} in one tensor`);
        expectElements(dtype, mine, expected[rank.rank]!, `${dtype}, input`);
      }
    },
  },
  {
    id: 'gather/every-root',
    sentence: 'gather hands every rank to the root and writes nowhere else',
    async body(rank) {
      const group = await rank.open();
      for (const root of ranksOf(rank.worldSize)) {
        const mine = pattern('f64', LENGTH, rank.rank, root);
        const outputs = ranksOf(rank.worldSize).map(() => new Float64Array(LENGTH));
        await group.gather(mine, rank.rank === root ? { root, outputs } : { root });
        const expected = patterns('f64', LENGTH, rank.worldSize, root);
        if (rank.rank === root) {
          for (const [writer, output] of outputs.entries())
            expectElements('f64', output, expected[writer]!, `${writer}`);
        }
        expectElements('f64', mine, expected[rank.rank]!, 'input');
      }
    },
  },
  {
    id: 'scatter/every-root',
    sentence: 'scatter hands each rank its tensor of the root and no other',
    async body(rank) {
      const group = await rank.open();
      for (const root of ranksOf(rank.worldSize)) {
        const inputs = patterns('u16', LENGTH, rank.worldSize, root).map((data) => vector('u16', data));
        const output = vector('u16', new Uint16Array(LENGTH));
        await group.scatter(output, rank.rank === root ? { root, inputs } : { root });
        expectElements('u16', output.data, inputs[rank.rank]!.data, `from ${root}`);
      }
    },
  },
  {
    id: 'all-to-all/equal',
    sentence: 'allToAll with equal parts, of every dtype, hands part b of rank a to place a of rank b',
    async body(rank) {
      const group = await rank.open();
      for (const [round, dtype] of DTYPES.entries()) {
        const part = (from: number, to: number): Storage[DType] => pattern(dtype, LENGTH, from * 16 + to, round);
        const inputs = ranksOf(rank.worldSize).map((to) => vector(dtype, part(rank.rank, to)));
        const outputs = ranksOf(rank.worldSize).map(() => vector(dtype, pattern(dtype, LENGTH, 99)));
        await group.allToAll(outputs, inputs);
        for (const [from, output] of outputs.entries()) {
          expectElements(dtype, output.data, part(from, rank.rank), `${dtype} of ${from}`);
        }
      }
    },
  },
  {
    id: 'all-to-all/uneven',
    sentence: 'allToAll and allToAllSingle take parts of any lengths, none at all among them',
    async body(rank) {
      const group = await rank.open();
      const { worldSize } = rank;
      for (let round = 0; round < 8; round++) {
        const inputSplits = ranksOf(worldSize).map((to) => split(rank.rank, to, round));
        const outputSplits = ranksOf(worldSize).map((from) => split(from, rank.rank, round));
        const part = (from: number, to: number): Float32Array =>
          pattern('f32', split(from, to, round), from * 16 + to, round);
        const sent = ranksOf(worldSize).map((to) => part(rank.rank, to));
        const expected = joined(
          'f32',
          ranksOf(worldSize).map((from) => part(from, rank.rank)),
        );

        const output = new Float32Array(sum(outputSplits));
        await group.allToAllSingle(output, joined('f32', sent), { outputSplits, inputSplits });
        expectElements('f32', output, expected, `round ${round}`);

        const outputs = outputSplits.map((length) => new Float32Array(length));
        await group.allToAll(outputs, sent);
        expectElements('f32', joined('f32', outputs), expected, `round ${round}, lists`);
      }
    },
  },
  {
    id: 'all-to-all/one-gives-all',
    sentence: 'a rank that sends everything and ranks that send nothing make an all-to-all too, of several chunks',
    async body(rank) {
      const group = await rank.open();
      const length = 150_001;
      const giver = rank.worldSize - 1;
      const inputSplits = ranksOf(rank.worldSize).map(() => (rank.rank === giver ? length : 0));
      const outputSplits = ranksOf(rank.worldSize).map((from) => (from === giver ? length : 0));
      const input = pattern('i32', sum(inputSplits), rank.rank);
      const output = new Int32Array(length);
      await group.allToAllSingle(output, input, { outputSplits, inputSplits });
      const whole = pattern('i32', length * rank.worldSize, giver);
      expectElements('i32', output, whole.subarray(rank.rank * length, (rank.rank + 1) * length), 'of the giver');
    },
  },
  {
    id: 'movement/every-code',
    sentence: 'every code of the 8-bit formats, NaN and all, and every code of f16 and bf16 moves unchanged',
    async body(rank) {
      const group = await rank.open();
      const codes8 = Uint8Array.from({ length: 256 }, (_, i) => i);
      for (const dtype of MOVABLE_ONLY) {
        const data = rank.rank === 0 ? codes8.slice() : new Uint8Array(256);
        await group.broadcast(vector(dtype, data), { root: 0 });
        assert.deepEqual(data, codes8, dtype);
      }
      const codes16 = Uint16Array.from({ length: 65_536 }, (_, i) => i);
      for (const dtype of ['f16', 'bf16'] as const) {
        const output = new Uint16Array(65_536 * rank.worldSize);
        await group.allGatherIntoTensor(vector(dtype, output), vector(dtype, codes16.slice()));
        for (const writer of ranksOf(rank.worldSize)) {
          assert.deepEqual(output.subarray(writer * 65_536, (writer + 1) * 65_536), codes16, dtype);
        }
      }
    },
  },
  {
    id: 'movement/zero-elements',
    sentence: 'every operation takes tensors without elements, and the next one is right',
    async body(rank) {
      const group = await rank.open();
      const none = (): Float32Array => new Float32Array(0);
      const nones = (): Float32Array[] => ranksOf(rank.worldSize).map(none);
      const root = rank.worldSize - 1;
      const amRoot = rank.rank === root;
      await group.broadcast(none(), { root });
      await group.allReduce(none(), { op: 'sum' });
      await group.reduce(none(), { root, op: 'sum' });
      await group.allGather(nones(), none());
      await group.gather(none(), amRoot ? { root, outputs: nones() } : { root });
      await group.scatter(none(), amRoot ? { root, inputs: nones() } : { root });
      await group.reduceScatter(none(), nones(), { op: 'sum' });
      await group.allToAll(nones(), nones());
      await group.allToAllSingle(none(), none());
      const one = new Float64Array([1]);
      await group.allReduce(one, { op: 'sum' });
      assert.equal(one[0], rank.worldSize);
    },
  },
  {
    id: 'movement/random-sequence',
    sentence: 'a random sequence of operations, dtypes, lengths and roots, many under way at once, is right',
    async body(rank) {
      const group = await rank.open();
      // The same on every rank: drawn from numbers that are not this rank's own.
      const draw = (index: number, below: number): number => pattern('u32', 1, 1_000, index)[0]! % below;
      const checks: (() => void)[] = [];
      const works: PromiseLike<unknown>[] = [];
      for (let step = 0; step < 120; step++) {
        const length = draw(step * 4, 6) === 0 ? draw(step * 4 + 1, 70_000) : draw(step * 4 + 1, 300);
        const root = draw(step * 4 + 2, rank.worldSize);
        const kind = draw(step * 4 + 3, 5);
        const mine = pattern('i32', length, rank.rank, step);
        const parts = patterns('i32', length, rank.worldSize, step);
        if (kind === 0) {
          works.push(group.allReduce(mine, { op: 'bxor' }));
          const expected = parts.reduce((all, part) => all.map((value, i) => value ^ part[i]!));
          checks.push(() => expectElements('i32', mine, expected, `step ${step}`));
        } else if (kind === 1) {
          works.push(group.broadcast(mine, { root }));
          checks.push(() => expectElements('i32', mine, parts[root]!, `step ${step}`));
        } else if (kind === 2) {
          const output = new Int32Array(length * rank.worldSize);
          works.push(group.allGatherIntoTensor(output, mine));
          checks.push(() => expectElements('i32', output, joined('i32', parts), `step ${step}`));
        } else if (kind === 3) {
          works.push(group.barrier());
        } else {
          const outputs = parts.map(() => new Int32Array(length));
          works.push(group.gather(mine, rank.rank === root ? { root, outputs } : { root }));
          if (rank.rank === root) {
            checks.push(() => expectElements('i32', joined('i32', outputs), joined('i32', parts), `step ${step}`));
          }
        }
        if (step % 40 === 39) await Promise.all(works.splice(0));
      }
      for (const check of checks) check();
    },
  },
];
