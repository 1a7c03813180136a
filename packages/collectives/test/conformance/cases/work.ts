/** Many operations under way, what a Work tells, and barriers. */
import assert from 'node:assert/strict';
import type { GroupCase } from './case.js';
import { failsWith, failsWithReason } from './expect.js';
import { pattern, ranksOf, sleep, vector } from './oracle.js';

export const workCases: readonly GroupCase[] = [
  {
    id: 'work/thousand',
    sentence: 'a thousand asynchronous allReduces queue up and end, each with its own result',
    async body(rank) {
      const group = await rank.open();
      const tensors = Array.from({ length: 1_000 }, (_, i) => new Float32Array(3).fill(i + rank.rank));
      const works = tensors.map((data) => group.allReduce(data, { op: 'sum' }));
      await Promise.all(works);
      const offset = (rank.worldSize * (rank.worldSize - 1)) / 2;
      for (const [i, data] of tensors.entries()) {
        assert.deepEqual([...data], [0, 0, 0].fill(i * rank.worldSize + offset), `all-reduce ${i}`);
      }
    },
  },
  {
    id: 'work/large-and-small',
    sentence: 'small operations behind large ones, awaited last to first, are right and in order',
    async body(rank) {
      const group = await rank.open();
      const tensors = Array.from({ length: 24 }, (_, i) => new Int32Array(i % 6 === 0 ? 200_003 : 5).fill(i + 1));
      const works = tensors.map((data) => group.allReduce(data, { op: 'sum' }));
      const ended: number[] = [];
      for (const [i, work] of works.entries()) void work.then(() => ended.push(i));
      for (const work of [...works].reverse()) await work;
      await sleep(0);
      assert.deepEqual(ended, [...ranksOf(24)], 'order of the ends');
      for (const [i, data] of tensors.entries()) {
        assert.ok(
          data.every((value) => value === (i + 1) * rank.worldSize),
          `all-reduce ${i}`,
        );
      }
    },
  },
  {
    id: 'work/tells',
    sentence: 'a Work tells its status, its contributors (everybody) and that nobody failed',
    async body(rank) {
      const group = await rank.open();
      const work = group.allReduce(new Float32Array(100_000), { op: 'sum' });
      await work;
      assert.equal(work.status, 'done');
      assert.deepEqual([...work.contributors], [...ranksOf(rank.worldSize)]);
      assert.deepEqual([...work.failedRanks], []);
      const later = group.barrier();
      await later.wait({ timeoutMs: 20_000 });
      assert.ok(later.sequence > work.sequence);
    },
  },
  {
    id: 'work/wait-is-not-the-operation',
    sentence: 'a wait that is over, by its time or its signal, leaves the operation to end well',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      if (rank.rank !== 0) {
        await rank.meet();
        await group.allReduce(new Int32Array([1]), { op: 'sum' });
        return;
      }
      const data = new Int32Array([1]);
      const work = group.allReduce(data, { op: 'sum' });
      await failsWith('EP_TIMEOUT', () => work.wait({ timeoutMs: 20 }));
      const abort = new AbortController();
      const reason = new Error('enough');
      const wait = work.wait({ signal: abort.signal });
      abort.abort(reason);
      await failsWithReason(reason, () => wait);
      assert.equal(work.status, 'pending');
      await rank.meet();
      await work;
      assert.equal(data[0], rank.worldSize);
    },
  },
  {
    id: 'barrier/holds',
    sentence: 'nobody leaves a barrier before the last one has come to it',
    async body(rank) {
      const group = await rank.open();
      for (let round = 0; round < 5; round++) {
        await sleep(rank.random() * 20);
        // One clock for all processes of the machine.
        const came = process.hrtime.bigint();
        await group.barrier();
        const left = process.hrtime.bigint();
        const all = await rank.share({ came: String(came), left: String(left) });
        const early = all.filter((one) => all.some((other) => BigInt(one.left) < BigInt(other.came)));
        assert.deepEqual(early, [], `round ${round}: of ${JSON.stringify(all)}`);
      }
    },
  },
  {
    id: 'barrier/monitored',
    sentence: 'monitoredBarrier holds like a barrier, and the next operation is right',
    async body(rank) {
      const group = await rank.open();
      await sleep(rank.random() * 20);
      await group.monitoredBarrier({ timeoutMs: 20_000 });
      const data = vector('u8', pattern('u8', 9, 4));
      await group.broadcast(data, { root: 0 });
    },
  },
  {
    id: 'arguments/refused',
    sentence: 'wrong roots, lengths, dtypes and lists are refused before anything moves, and the group goes on',
    async body(rank) {
      const group = await rank.open();
      const data = new Float32Array(4);
      const list = (count: number): Float32Array[] => Array.from({ length: count }, () => new Float32Array(4));
      const wrong: readonly (() => unknown)[] = [
        () => group.broadcast(data, { root: rank.worldSize }),
        () => group.broadcast(data, { root: -1 }),
        () => group.allGather(list(rank.worldSize + 1), data),
        () => group.allGatherIntoTensor(new Float32Array(4 * rank.worldSize + 1), data),
        () => group.allGatherIntoTensor(new Int32Array(4 * rank.worldSize), data),
        () => group.reduceScatterTensor(data, new Float32Array(4 * rank.worldSize + 1), { op: 'sum' }),
        () => group.allToAll(list(rank.worldSize), list(rank.worldSize - 1)),
        () => group.allToAllSingle(data, data, { inputSplits: [5], outputSplits: [4] }),
        () => group.send(data, rank.worldSize),
      ];
      for (const call of wrong) await failsWith('EP_INVALID_ARGUMENT', call);
      await group.allReduce(data, { op: 'sum' });
    },
  },
];
