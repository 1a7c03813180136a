/** Lengths where engines change their ways: none, one, around 48 B and 8 KB, at the border of a 256 KB chunk, several MB, and odd addresses. */
import type { GroupCase, GroupRank } from './case.js';
import { expectElements, pattern, patterns, ranksOf, reducedPatterns, vector } from './oracle.js';

const SMALL_BYTES = [0, 4, 44, 48, 52, 60, 64, 68, 1_020, 8_188, 8_192, 8_196, 65_536];
const CHUNK_BYTES = [262_140, 262_144, 262_148, 524_292];
const LARGE_BYTES = [1_048_580, 3_000_004];
const FULL_BYTES = [8_388_604, 16_777_220];

function lengthsOf({ sizes }: GroupRank): readonly number[] {
  const bytes = [...SMALL_BYTES, ...CHUNK_BYTES];
  if (sizes !== 'small') bytes.push(...LARGE_BYTES);
  if (sizes === 'full') bytes.push(...FULL_BYTES);
  return bytes.map((count) => count / 4);
}

/** As many elements for each rank as make up such a message, or its neighbour. */
const blockLengths = (rank: GroupRank): readonly number[] => [
  ...new Set(lengthsOf(rank).map((length) => Math.ceil(length / rank.worldSize))),
];

export const sizeCases: readonly GroupCase[] = [
  {
    id: 'sizes/all-reduce',
    sentence: 'allReduce is right at every length around which engines change their ways',
    async body(rank) {
      const group = await rank.open();
      for (const [round, length] of lengthsOf(rank).entries()) {
        rank.report(`${length} elements`);
        const data = pattern('f32', length, rank.rank, round);
        await group.allReduce(data, { op: 'sum' });
        const expected = reducedPatterns('f32', 'sum', length, rank.worldSize, round);
        expectElements('f32', data, expected, `${length} elements`);
      }
    },
  },
  {
    id: 'sizes/all-reduce-in-group-memory',
    sentence: 'so it is in memory of the group, of two bytes an element, and at odd offsets into it',
    async body(rank) {
      const group = await rank.open();
      const lengths = lengthsOf(rank);
      const memory = group.allocate('bf16', 2 * lengths.at(-1)! + 1).data;
      for (const [round, words] of lengths.entries()) {
        const length = 2 * words;
        const data = memory.subarray(round % 2, (round % 2) + length);
        data.set(pattern('bf16', length, rank.rank, round));
        await group.allReduce({ dtype: 'bf16', shape: [length], data }, { op: 'sum' });
        const expected = reducedPatterns('bf16', 'sum', length, rank.worldSize, round);
        expectElements('bf16', data, expected, `${length} elements`);
      }
    },
  },
  {
    id: 'sizes/broadcast',
    sentence: 'broadcast is right at every such length',
    async body(rank) {
      const group = await rank.open();
      for (const [round, length] of lengthsOf(rank).entries()) {
        const root = round % rank.worldSize;
        const data = pattern('i32', length, rank.rank, round);
        await group.broadcast(data, { root });
        expectElements('i32', data, pattern('i32', length, root, round), `${length} elements from ${root}`);
      }
    },
  },
  {
    id: 'sizes/all-gather',
    sentence: 'allGatherIntoTensor and gather are right at every such length of the whole',
    async body(rank) {
      const group = await rank.open();
      for (const [round, length] of blockLengths(rank).entries()) {
        const root = round % rank.worldSize;
        const mine = pattern('i32', length, rank.rank, round);
        const output = new Int32Array(length * rank.worldSize);
        await group.allGatherIntoTensor(output, mine);
        const outputs = ranksOf(rank.worldSize).map(() => new Int32Array(length));
        await group.gather(mine, rank.rank === root ? { root, outputs } : { root });
        for (const [writer, expected] of patterns('i32', length, rank.worldSize, round).entries()) {
          const what = `${length} elements of ${writer}`;
          expectElements('i32', output.subarray(writer * length, (writer + 1) * length), expected, what);
          if (rank.rank === root) expectElements('i32', outputs[writer]!, expected, `${what}, gathered`);
        }
      }
    },
  },
  {
    id: 'sizes/reduce-scatter',
    sentence: 'reduceScatterTensor and scatter are right at every such length of the whole',
    async body(rank) {
      const group = await rank.open();
      for (const [round, length] of blockLengths(rank).entries()) {
        const root = round % rank.worldSize;
        const whole = length * rank.worldSize;
        const [output, scattered] = [new Float32Array(length), new Float32Array(length)];
        await group.reduceScatterTensor(output, pattern('f32', whole, rank.rank, round), { op: 'sum' });
        const given = pattern('f32', whole, root, round);
        const blocks = ranksOf(rank.worldSize).map((to) => given.subarray(to * length, (to + 1) * length));
        await group.scatter(scattered, rank.rank === root ? { root, inputs: blocks } : { root });
        const [from, to] = [rank.rank * length, (rank.rank + 1) * length];
        expectElements(
          'f32',
          output,
          reducedPatterns('f32', 'sum', whole, rank.worldSize, round).subarray(from, to),
          `${length} elements`,
        );
        expectElements('f32', scattered, blocks[rank.rank]!, `${length} elements scattered`);
      }
    },
  },
  {
    id: 'sizes/all-to-all',
    sentence: 'allToAllSingle is right at every such length of the whole',
    async body(rank) {
      const group = await rank.open();
      for (const [round, length] of blockLengths(rank).entries()) {
        const output = new Int32Array(length * rank.worldSize);
        await group.allToAllSingle(output, pattern('i32', output.length, rank.rank, round));
        for (const from of ranksOf(rank.worldSize)) {
          const sent = pattern('i32', output.length, from, round);
          const expected = sent.subarray(rank.rank * length, (rank.rank + 1) * length);
          const found = output.subarray(from * length, (from + 1) * length);
          expectElements('i32', found, expected, `${length} elements of ${from}`);
        }
      }
    },
  },
  {
    id: 'sizes/odd-addresses',
    sentence: 'bytes at any address, in odd lengths, arrive as they are and touch nothing beside them',
    async body(rank) {
      const group = await rank.open();
      for (const [round, length] of [1, 3, 47, 49, 8_191, 262_145, 300_001].entries()) {
        const room = new Uint8Array(length + 16).fill(0xee);
        const at = 1 + 2 * (round % 4);
        const data = room.subarray(at, at + length);
        data.set(pattern('u8', length, rank.rank, round));
        await group.allReduce(vector('u8', data), { op: 'sum' });
        expectElements('u8', data, reducedPatterns('u8', 'sum', length, rank.worldSize, round), `${length} bytes`);
        const beside = new Uint8Array(16).fill(0xee);
        expectElements('u8', Buffer.concat([room.subarray(0, at), room.subarray(at + length)]), beside, 'beside');
      }
    },
  },
  {
    id: 'sizes/larger-than-any-buffer',
    sentence: 'an allReduce of more than any staging buffer (16 MB of i32; in full 64 MB) is right',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      const length = { small: 2 ** 18, usual: 2 ** 22, full: 2 ** 24 }[rank.sizes];
      const data = new Int32Array(length);
      for (let i = 0; i < length; i++) data[i] = i * (rank.rank + 1);
      await group.allReduce(data, { op: 'sum' });
      const factor = (rank.worldSize * (rank.worldSize + 1)) / 2;
      const expected = new Int32Array(length);
      for (let i = 0; i < length; i++) expected[i] = i * factor;
      expectElements('i32', data, expected, `${length} elements`);
    },
  },
];
