/** Ranks that come late or not at all, deadlines, and callers that give up. */
import assert from 'node:assert/strict';
import { isEpError } from '@ep/core';
import type { GroupCase, GroupRank } from './case.js';
import { failsWith, failsWithReason } from './expect.js';
import { ranksOf, sleep } from './oracle.js';

const LATE_MS = 300;
/** No deadline of a case here is as long: what takes longer has hung. */
const HUNG_MS = 20_000;

/**
 * The call waits in vain for `missing`. Every rank that waited learns who is missing. Whose deadline comes first ends with EP_TIMEOUT and says who had come;
 * the others with that too, or with EP_ABORTED because that rank gave up.
 */
async function timesOut(rank: GroupRank, missing: number, call: () => PromiseLike<unknown>): Promise<void> {
  const error = await failsWith(['EP_TIMEOUT', 'EP_ABORTED'], call);
  const { awaited } = error.context;
  const named =
    new RegExp(`\\b${missing}\\b`).test(error.message) || (Array.isArray(awaited) && awaited.includes(missing));
  assert.ok(named, `expected rank ${missing} to be named: ${error.message}`);
  if (error.code === 'EP_TIMEOUT') {
    assert.deepEqual(error.context.awaited, [missing], error.message);
    assert.deepEqual(error.context.arrived, ranksOf(missing), error.message);
  }
  await rank.store.append('codes', Buffer.from(`${error.code} `));
}

/** At least one deadline passed by itself. */
async function someTimedOut(rank: GroupRank): Promise<void> {
  const codes = Buffer.from(await rank.store.get('codes')).toString();
  assert.match(codes, /EP_TIMEOUT/);
}

export const latenessCases: readonly GroupCase[] = [
  {
    id: 'late/delays-who-needs-it',
    sentence:
      'a rank that joins 300 ms late delays only what needs it: messages between the others pass before it comes',
    ranks: 3,
    async body(rank) {
      const late = rank.worldSize - 1;
      // A transport's own opening is collective: there the late rank delays open() itself.
      const joinsLater = rank.backend === 'shm';
      if (rank.rank === late) await sleep(LATE_MS);
      if (rank.rank === late && joinsLater) await rank.store.wait(['passed'], { timeoutMs: HUNG_MS });
      const joined = process.hrtime.bigint();
      const group = await rank.open();
      let passed = 0n;
      if (rank.rank < 2) {
        const data = new Int32Array([rank.rank]);
        if (rank.rank === 0) await group.send(data, 1);
        else await group.recv(data, 0);
        assert.equal(data[0], 0);
        passed = process.hrtime.bigint();
        if (rank.rank === 1) await rank.store.set('passed', new Uint8Array(1));
      }
      const data = new Int32Array([1]);
      await group.allReduce(data, { op: 'sum' });
      assert.equal(data[0], rank.worldSize);
      const all = await rank.share({ joined: String(joined), passed: String(passed) });
      if (joinsLater) assert.ok(BigInt(all[1]!.passed) < BigInt(all[late]!.joined), JSON.stringify(all));
    },
  },
  {
    id: 'late/operation-waits',
    sentence: 'an operation of which one rank comes 300 ms late waits for it and is right',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      const late = rank.worldSize - 1;
      if (rank.rank === late) await sleep(LATE_MS);
      const came = process.hrtime.bigint();
      const data = new Int32Array([rank.rank + 1]);
      await group.allReduce(data, { op: 'sum' });
      const ended = process.hrtime.bigint();
      assert.equal(data[0], (rank.worldSize * (rank.worldSize + 1)) / 2);
      const all = await rank.share({ came: String(came), ended: String(ended) });
      for (const one of all) assert.ok(BigInt(one.ended) >= BigInt(all[late]!.came), JSON.stringify(all));
    },
  },
  {
    id: 'late/subgroup-goes-on',
    sentence: 'a group without the late rank works while the world waits for it',
    ranks: 3,
    async body(rank) {
      const world = await rank.open();
      const late = rank.worldSize - 1;
      const others = ranksOf(late);
      const group = await world.newGroup(others);
      await world.barrier();
      if (rank.rank === late) {
        await rank.meet();
        await world.allReduce(new Int32Array([1]), { op: 'sum' });
        return;
      }
      const waiting = new Int32Array([1]);
      const work = world.allReduce(waiting, { op: 'sum' });
      for (let round = 0; round < 10; round++) {
        const data = new Int32Array([1]);
        await group!.allReduce(data, { op: 'sum' });
        assert.equal(data[0], late);
      }
      assert.equal(work.status, 'pending');
      await rank.meet();
      await work;
      assert.equal(waiting[0], rank.worldSize);
    },
  },
  {
    id: 'timeout/names-ranks',
    sentence:
      'a timeout names who had come and who was awaited, and poisons the group; every rank that waited learns who is missing',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      const missing = rank.worldSize - 1;
      if (rank.rank === missing) {
        await rank.meet();
        return;
      }
      const work = group.allReduce(new Float32Array(100_000), { op: 'sum', timeoutMs: 400 });
      await timesOut(rank, missing, () => work);
      assert.equal(work.status, 'failed');
      await failsWith('EP_POISONED', () => group.barrier());
      await rank.meet();
      await someTimedOut(rank);
    },
  },
  {
    id: 'timeout/poisons-what-is-queued',
    sentence: 'calls that were queued behind one that timed out fail as well: none of them passes for done',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      const missing = rank.worldSize - 1;
      if (rank.rank !== missing) {
        const first = group.allReduce(new Float32Array(8), { op: 'sum', timeoutMs: 300 });
        const queued = [
          group.allReduce(new Float32Array(8), { op: 'sum' }),
          group.broadcast(new Float32Array(8), { root: 0 }),
          group.barrier(),
        ];
        const poisoned = queued.map((work) => failsWith('EP_POISONED', () => work));
        await timesOut(rank, missing, () => first);
        await Promise.all(poisoned);
      }
      await rank.meet();
      await someTimedOut(rank);
    },
  },
  {
    id: 'timeout/of-the-group',
    sentence: 'the timeout of the group ends calls that give none, of every kind; root and others alike',
    ranks: 2,
    async body(rank) {
      const missing = rank.worldSize - 1;
      const data = (): Float32Array => new Float32Array(8);
      // Long enough for a busy machine to open the group in it.
      const own = await rank.open({ timeoutMs: 1_500 });
      for (const kind of ['all-gather', 'barrier', 'reduce'] as const) {
        const group = kind === 'all-gather' ? own : await rank.open();
        const limits = kind === 'all-gather' ? {} : { timeoutMs: 300 };
        await group.barrier({ timeoutMs: HUNG_MS });
        if (rank.rank !== missing) {
          await timesOut(rank, missing, () => {
            if (kind === 'barrier') return group.barrier(limits);
            if (kind === 'reduce') return group.reduce(data(), { root: missing, op: 'sum', ...limits });
            return group.allGatherIntoTensor(new Float32Array(8 * rank.worldSize), data(), limits);
          });
        }
        await rank.meet();
        await group.destroy();
      }
      await someTimedOut(rank);
    },
  },
  {
    id: 'timeout/counts-from-the-front',
    sentence: 'time spent behind other operations does not count: a short deadline behind a slow one is kept',
    ranks: 2,
    async body(rank) {
      // On a machine that takes longer than the deadline for a call of which nobody is late, nothing has been shown: with twice as long ones again.
      for (let limitMs = LATE_MS / 2, kept = false; !kept; limitMs *= 2) {
        assert.ok(limitMs < 4_000, 'the time behind a slow call counted, however long the deadline was');
        const group = await rank.open();
        await group.barrier();
        if (rank.rank === 0) await sleep(2 * limitMs);
        const first = group.allReduce(new Int32Array(4), { op: 'sum', timeoutMs: HUNG_MS });
        const second = group.allReduce(new Int32Array(4), { op: 'sum', timeoutMs: limitMs });
        const ended = second.then(
          () => true,
          (error: unknown) => {
            // Whose deadline comes first gives up; the others hear of it.
            if (isEpError(error) && ['EP_TIMEOUT', 'EP_ABORTED'].includes(error.code)) return false;
            throw error;
          },
        );
        await first;
        kept = (await rank.share(await ended)).every(Boolean);
      }
    },
  },
  {
    id: 'timeout/monitored-barrier',
    sentence: 'monitoredBarrier names the ranks that did not come',
    ranks: 2,
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      const missing = rank.worldSize - 1;
      if (rank.rank === missing) {
        await rank.meet();
        return;
      }
      await timesOut(rank, missing, () => group.monitoredBarrier({ timeoutMs: 400 }));
      await rank.meet();
      await someTimedOut(rank);
    },
  },
  {
    id: 'abort/by-signal',
    sentence: "a caller's abort ends its operation with its own reason, and the peers' with EP_ABORTED naming the rank",
    ranks: 2,
    async body(rank) {
      const group = await rank.open({ timeoutMs: 10_000 });
      await group.barrier();
      const missing = rank.worldSize - 1;
      if (rank.rank === missing) {
        await rank.meet();
        // Comes to the operation only after it was given up. What all had given to it by then may do for this rank; never for the next one.
        await failsWith(['EP_ABORTED', 'EP_POISONED'], async () => {
          for (let call = 0; call < 2; call++) await group.allReduce(new Float32Array(9), { op: 'sum' });
        });
        return;
      }
      if (rank.rank === 0) {
        const abort = new AbortController();
        const reason = new Error('the caller has had enough');
        const work = group.allReduce(new Float32Array(9), { op: 'sum', signal: abort.signal });
        setTimeout(() => abort.abort(reason), 50);
        await failsWithReason(reason, () => work);
        await failsWith('EP_POISONED', () => group.allReduce(new Float32Array(9), { op: 'sum' }));
      } else {
        const error = await failsWith('EP_ABORTED', () => group.allReduce(new Float32Array(9), { op: 'sum' }));
        assert.match(error.message, /rank 0\b/);
      }
      await rank.meet();
    },
  },
  {
    id: 'abort/before-the-call',
    sentence:
      'a signal that had fired before the call refuses it with its reason; nothing was posted and the group goes on',
    async body(rank) {
      const group = await rank.open();
      const reason = new Error('never mind');
      await failsWithReason(reason, () => group.allReduce(new Float32Array(9), { signal: AbortSignal.abort(reason) }));
      const data = new Int32Array([1]);
      await group.allReduce(data, { op: 'sum' });
      assert.equal(data[0], rank.worldSize);
    },
  },
  {
    id: 'abort/close-ends-work',
    sentence: 'closing a group ends what is under way on the rank that closes, and its peers do not wait for ever',
    ranks: 2,
    async body(rank) {
      const group = await rank.open({ timeoutMs: 5_000 });
      await group.barrier();
      if (rank.rank === 0) {
        await rank.meet();
        await group.close({ signal: AbortSignal.timeout(50) }).catch(() => {});
        return;
      }
      const work = group.allReduce(new Float32Array(9), { op: 'sum' });
      await rank.meet();
      const error = await failsWith(['EP_PEER_LOST', 'EP_ABORTED', 'EP_TIMEOUT'], () => work);
      assert.match(error.message, /\b0\b/);
    },
  },
];
