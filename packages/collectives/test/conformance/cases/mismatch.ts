/** Ranks that call something else at the same place of the sequence. Detected and named on every rank; never hung on. */
import assert from 'node:assert/strict';
import { inspect } from 'node:util';
import type { ProcessGroup } from '../../../src/index.js';
import type { GroupCase, GroupRank } from './case.js';
import { failsWith } from './expect.js';
import { vector } from './oracle.js';

/** All call `usual`, the last rank `odd`; every rank must learn who differs. Returns what this rank was told about it. */
async function mismatch(
  rank: GroupRank,
  usual: (group: ProcessGroup) => unknown,
  odd: (group: ProcessGroup) => unknown,
): Promise<string> {
  const group = await rank.open({ timeoutMs: 10_000 });
  for (let call = 0; call < 3; call++) await group.barrier();
  const different = rank.worldSize - 1;
  const error = await failsWith('EP_MISMATCH', async () => {
    await (rank.rank === different ? odd(group) : usual(group));
    // Whoever awaited nobody, as the root of a small broadcast, is told at its next call.
    await group.barrier();
  });
  const ranks = error.context.ranks as readonly number[];
  // Of two ranks either may be called the odd one.
  if (rank.worldSize > 2) assert.deepEqual(ranks, [different], error.message);
  assert.equal(error.context.sequence, 4, error.message);
  for (const odd of ranks) assert.match(error.message, new RegExp(`\\b${odd}\\b`));
  await failsWith('EP_POISONED', () => group.barrier());
  await rank.meet();
  const { expected, found } = error.context;
  return `${error.message} ${inspect({ expected, found }, { depth: 6 })}`;
}

const floats = (length = 16): Float32Array => new Float32Array(length);

/** Of four bytes each. */
const inElementsOrBytes = (length: number): RegExp => new RegExp(`\\b(${length}|${4 * length})\\b`);

export const mismatchCases: readonly GroupCase[] = [
  {
    id: 'mismatch/kind',
    sentence: 'another operation is named on every rank, with both operations',
    ranks: 2,
    async body(rank) {
      const told = await mismatch(
        rank,
        (group) => group.allReduce(floats(), { op: 'sum' }),
        (group) => group.broadcast(floats(), { root: 0 }),
      );
      assert.match(told, /all-?reduce/i);
      assert.match(told, /broadcast/i);
    },
  },
  {
    id: 'mismatch/barrier',
    sentence: 'so it is when it meets a barrier, which moves nothing',
    ranks: 2,
    async body(rank) {
      await mismatch(
        rank,
        (group) => group.barrier(),
        (group) => group.allReduce(floats(), { op: 'sum' }),
      );
    },
  },
  {
    id: 'mismatch/dtype',
    sentence: 'another dtype of the same width is named on every rank, with both dtypes',
    ranks: 2,
    async body(rank) {
      const told = await mismatch(
        rank,
        (group) => group.allReduce(floats(), { op: 'sum' }),
        (group) => group.allReduce(new Int32Array(16), { op: 'sum' }),
      );
      assert.match(told, /f32/);
      assert.match(told, /i32/);
    },
  },
  {
    id: 'mismatch/length',
    sentence: 'another length is named on every rank, with both lengths, small or of many chunks',
    ranks: 2,
    async body(rank) {
      for (const [usual, odd] of [
        [16, 17],
        [700_000, 700_001],
        [16, 700_000],
      ] as const) {
        const told = await mismatch(
          rank,
          (group) => group.allReduce(floats(usual), { op: 'sum' }),
          (group) => group.allReduce(floats(odd), { op: 'sum' }),
        );
        assert.match(told, inElementsOrBytes(usual));
        assert.match(told, inElementsOrBytes(odd));
      }
    },
  },
  {
    id: 'mismatch/reduction',
    sentence: 'another reduction is named on every rank, another factor of premul-sum too',
    ranks: 2,
    async body(rank) {
      const told = await mismatch(
        rank,
        (group) => group.allReduce(floats(), { op: 'min' }),
        (group) => group.allReduce(floats(), { op: 'max' }),
      );
      assert.match(told, /\bmin\b/);
      assert.match(told, /\bmax\b/);
      await mismatch(
        rank,
        (group) => group.allReduce(floats(), { op: { op: 'premul-sum', factor: 2 } }),
        (group) => group.allReduce(floats(), { op: { op: 'premul-sum', factor: 3 } }),
      );
    },
  },
  {
    id: 'mismatch/root',
    sentence: 'another root is named on every rank, also where two ranks each think to be the only root',
    ranks: 2,
    async body(rank) {
      const last = rank.worldSize - 1;
      await mismatch(
        rank,
        (group) => group.broadcast(floats(), { root: 0 }),
        (group) => group.broadcast(floats(), { root: last }),
      );
      await mismatch(
        rank,
        (group) => group.reduce(floats(), { root: last, op: 'sum' }),
        (group) => group.reduce(floats(), { root: 0, op: 'sum' }),
      );
    },
  },
  {
    id: 'mismatch/splits',
    sentence:
      'an all-to-all in which one sends more than the other takes is named on the one that takes, and nobody goes on as if nothing had been',
    ranks: 2,
    async body(rank) {
      const { worldSize } = rank;
      const even = Array.from({ length: worldSize }, () => 4);
      const group = await rank.open({ timeoutMs: 10_000 });
      await group.barrier();
      const odd = rank.rank === worldSize - 1;
      // The last rank sends one element more to rank 0, which expects four.
      const inputSplits = odd ? even.map((length, to) => (to === 0 ? length + 1 : length)) : even;
      const input = vector('u8', new Uint8Array(inputSplits.reduce((sum, length) => sum + length, 0)));
      const output = vector('u8', new Uint8Array(4 * worldSize));
      const call = async (): Promise<void> => {
        await group.allToAllSingle(output, input, { inputSplits, outputSplits: even });
      };
      if (rank.rank === 0) {
        const error = await failsWith('EP_MISMATCH', call);
        assert.equal(error.context.sequence, 2);
        assert.match(error.message, new RegExp(`\\b${worldSize - 1}\\b`));
      } else {
        // Whom it does not concern may have got all of its parts, but not go on as if nothing had been.
        await failsWith(['EP_MISMATCH', 'EP_ABORTED', 'EP_POISONED'], async () => {
          await call();
          await group.barrier();
        });
      }
      await rank.meet();
    },
  },
  {
    id: 'mismatch/one-call-missing',
    sentence: 'a rank that leaves out a call is found at the first call that differs',
    ranks: 2,
    async body(rank) {
      const group = await rank.open({ timeoutMs: 10_000 });
      const odd = rank.rank === rank.worldSize - 1;
      const error = await failsWith('EP_MISMATCH', async () => {
        for (let step = 0; step < 6; step++) {
          if (!(odd && step === 3)) await group.allReduce(floats(step + 1), { op: 'sum' });
        }
        await group.barrier();
      });
      assert.equal(error.context.sequence, 4, error.message);
      await rank.meet();
    },
  },
];
