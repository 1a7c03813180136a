/** Ranks that die, in threads and in processes. The whole matrix, with signals at stepped moments, is in test/failure. */
import assert from 'node:assert/strict';
import { isEpError } from '@ep/core';
import type { CollectiveWork, ProcessGroup } from '../../../src/index.js';
import type { GroupCase, GroupRank } from './case.js';
import { failsWith } from './expect.js';
import { ranksOf } from './oracle.js';

const HUNG_MS = 20_000;

/** HAZARD: a rank that passes a barrier and dies with its last words to the others under way takes theirs with it; the cases are about later calls. */
async function passBarrier(group: ProcessGroup, rank: GroupRank): Promise<void> {
  await group.barrier();
  await rank.meet();
}

/** After a loss the group works over the survivors. */
export async function worksOver(
  group: ProcessGroup,
  rank: GroupRank,
  survivors: readonly number[],
  timeoutMs = HUNG_MS,
): Promise<void> {
  assert.deepEqual([...group.activeRanks], survivors);
  for (let round = 0; round < 5; round++) {
    const data = new Float64Array(5_000).fill(2 ** rank.rank);
    const work = group.allReduce(data, { op: 'sum', timeoutMs });
    await work;
    assert.deepEqual([...work.contributors], survivors);
    assert.equal(
      data[4_999],
      survivors.reduce((sum, one) => sum + 2 ** one, 0),
    );
    await group.barrier({ timeoutMs });
  }
}

/** Each survivor's value, through the store: what the group under test says is what is compared. */
export async function shareAmong<T>(
  rank: GroupRank,
  survivors: readonly number[],
  value: T,
  timeoutMs = HUNG_MS,
): Promise<readonly T[]> {
  await rank.store.set(`among/${rank.rank}`, Buffer.from(JSON.stringify(value)));
  const all = survivors.map((one) => rank.store.get(`among/${one}`, { timeoutMs }));
  return (await Promise.all(all)).map((bytes) => JSON.parse(Buffer.from(bytes).toString()) as T);
}

/** How an operation ended: over these ranks, or because those were lost. */
export interface EndOfCall {
  readonly contributors?: readonly number[];
  readonly lost?: readonly number[];
}

export async function endOf(work: CollectiveWork): Promise<EndOfCall> {
  try {
    await work;
    return { contributors: [...work.contributors] };
  } catch (error) {
    assert.ok(isEpError(error) && error.code === 'EP_PEER_LOST', String(error));
    const lost = error.context.lost as readonly number[];
    for (const one of lost) assert.match(error.message, new RegExp(`\\b${one}\\b`));
    assert.deepEqual([...work.failedRanks], [...lost]);
    return { lost };
  }
}

/** Whom these ends tell to be gone: a rank that was dead when an operation began is missing from its contributors, or ends it. */
function missingIn(outcomes: readonly EndOfCall[], worldSize: number): ReadonlySet<number> {
  const missing = outcomes.flatMap(({ contributors, lost = [] }) =>
    contributors === undefined ? lost : ranksOf(worldSize).filter((one) => !contributors.includes(one)),
  );
  return new Set(missing);
}

function lossCase(
  id: string,
  sentence: string,
  victimsOf: (size: number) => readonly number[],
  length: number,
): GroupCase {
  return {
    id,
    sentence,
    ranks: 3,
    mortal: true,
    async body(rank) {
      const group = await rank.open();
      const victims = victimsOf(rank.worldSize);
      const survivors = ranksOf(rank.worldSize).filter((one) => !victims.includes(one));
      await passBarrier(group, rank);
      if (victims.includes(rank.rank)) await rank.die();
      const outcomes: EndOfCall[] = [];
      while (missingIn(outcomes, rank.worldSize).size < victims.length) {
        const work = group.allReduce(new Float32Array(length), { op: 'sum', timeoutMs: HUNG_MS });
        outcomes.push(await endOf(work));
      }
      assert.deepEqual([...missingIn(outcomes, rank.worldSize)].sort(), [...victims].sort());
      const all = await shareAmong(rank, survivors, outcomes);
      for (const one of all) assert.deepEqual(one, all[0], 'survivors were told differently');
      await worksOver(group, rank, survivors);
      if (outcomes.some((one) => one.lost !== undefined)) {
        assert.ok(isEpError(group.failed.reason) && group.failed.reason.code === 'EP_PEER_LOST');
      }
      const states = group.connections();
      for (const one of victims) assert.equal(states.find((each) => each.rank === one)?.state, 'lost');
      await rank.meet(survivors);
    },
  };
}

export const failureCases: readonly GroupCase[] = [
  lossCase(
    'failure/last-rank',
    'when the last rank dies, the operation that needed it ends alike on every survivor, with EP_PEER_LOST or over those who are left, and the next ones work',
    (size) => [size - 1],
    10,
  ),
  lossCase('failure/rank-0', 'so it is when rank 0 dies, in an operation of many chunks', () => [0], 400_000),
  {
    ...lossCase('failure/two-at-once', 'so it is when two die at once', (size) => [0, size - 1], 10),
    ranks: 4,
  },
  {
    id: 'failure/idle',
    sentence: 'a rank that dies while nobody calls is missing from the next operation, or ends it, on all alike',
    ranks: 3,
    mortal: true,
    async body(rank) {
      const group = await rank.open();
      await passBarrier(group, rank);
      const victim = 1;
      const survivors = ranksOf(rank.worldSize).filter((one) => one !== victim);
      if (rank.rank === victim) await rank.die();
      await new Promise((resolve) => setTimeout(resolve, 500));
      const data = new Int32Array([1]);
      const work = group.allReduce(data, { op: 'sum', timeoutMs: HUNG_MS });
      const outcome = { ...(await endOf(work)), data: data[0] };
      if (outcome.contributors !== undefined) assert.equal(outcome.data, survivors.length);
      else outcome.data = 0;
      await worksOver(group, rank, survivors);
      const all = await shareAmong(rank, survivors, outcome);
      for (const one of all) assert.deepEqual(one, all[0]);
    },
  },
  {
    id: 'failure/message',
    sentence:
      'a send to a dead rank and a receive from it end with EP_PEER_LOST naming it; messages between others pass',
    ranks: 3,
    mortal: true,
    async body(rank) {
      const group = await rank.open();
      await passBarrier(group, rank);
      const victim = rank.worldSize - 1;
      if (rank.rank === victim) await rank.die();
      const recv = await failsWith('EP_PEER_LOST', () =>
        group.recv(new Float32Array(4), victim, { timeoutMs: HUNG_MS }),
      );
      assert.match(recv.message, new RegExp(`\\b${victim}\\b`));
      const send = await failsWith('EP_PEER_LOST', () =>
        group.send(new Float32Array(2 ** 20), victim, { timeoutMs: HUNG_MS }),
      );
      assert.match(send.message, new RegExp(`\\b${victim}\\b`));
      if (rank.rank === 0) await group.send(new Int32Array([5]), 1);
      if (rank.rank === 1) {
        const data = new Int32Array(1);
        await group.recv(data, 0);
        assert.equal(data[0], 5);
      }
      await rank.meet(ranksOf(victim));
    },
  },
  {
    id: 'failure/queue',
    sentence: 'of many operations under way when a rank dies, each ends alike on all survivors, and none hangs',
    ranks: 3,
    mortal: true,
    async body(rank) {
      const group = await rank.open();
      await passBarrier(group, rank);
      const victim = rank.worldSize - 1;
      const survivors = ranksOf(victim);
      const count = 200;
      const posted = rank.rank === victim ? count / 2 : count;
      const tensors = Array.from({ length: posted }, () => new Float64Array(50).fill(2 ** rank.rank));
      const works = tensors.map((data) => group.allReduce(data, { op: 'sum', timeoutMs: HUNG_MS }));
      if (rank.rank === victim) await rank.die();
      const ends = await Promise.all(works.map(endOf));
      const outcomes = ends.map((end, i) => ({ ...end, value: tensors[i]![49]! }));
      for (const one of outcomes) {
        if (one.contributors === undefined) continue;
        assert.equal(
          one.value,
          one.contributors.reduce((sum, from) => sum + 2 ** from, 0),
        );
      }
      assert.ok(
        ends.filter((one) => one.lost !== undefined).length <= 1,
        'more than one operation was lost to one death',
      );
      const all = await shareAmong(rank, survivors, ends);
      for (const one of all) assert.deepEqual(one, all[0]);
      await worksOver(group, rank, survivors);
    },
  },
  {
    id: 'failure/every-operation-after',
    sentence: 'after a loss every operation works over the survivors, and they make a new group of themselves',
    ranks: 3,
    mortal: true,
    async body(rank) {
      const group = await rank.open();
      await passBarrier(group, rank);
      const victim = 1;
      const survivors = ranksOf(rank.worldSize).filter((one) => one !== victim);
      if (rank.rank === victim) await rank.die();
      const first = await endOf(group.barrier({ timeoutMs: HUNG_MS }));
      assert.deepEqual([...missingIn([first], rank.worldSize)], [victim]);
      const root = rank.worldSize - 1;
      const amRoot = rank.rank === root;
      const own = Int32Array.of(rank.rank, rank.rank);
      const rows = (): Int32Array[] => ranksOf(rank.worldSize).map(() => Int32Array.of(-1, -1));
      const checkRows = (found: readonly Int32Array[], what: string): void => {
        for (const one of survivors) assert.deepEqual([...found[one]!], [one, one], what);
        assert.deepEqual([...found[victim]!], [-1, -1], `${what}: place of the lost rank`);
      };
      const gathered = rows();
      await group.allGather(gathered, own);
      checkRows(gathered, 'allGather');
      const atRoot = rows();
      await group.gather(own, amRoot ? { root, outputs: atRoot } : { root });
      if (amRoot) checkRows(atRoot, 'gather');
      const exchanged = rows();
      await group.allToAll(
        exchanged,
        ranksOf(rank.worldSize).map(() => own.slice()),
      );
      checkRows(exchanged, 'allToAll');
      const scattered = Int32Array.of(-1, -1);
      const inputs = ranksOf(rank.worldSize).map((one) => Int32Array.of(one, one));
      await group.scatter(scattered, amRoot ? { root, inputs } : { root });
      assert.deepEqual([...scattered], [rank.rank, rank.rank]);
      const reduced = Int32Array.of(1, 1);
      await group.reduceScatter(reduced, inputs, { op: 'sum' });
      assert.deepEqual([...reduced], [rank.rank * survivors.length, rank.rank * survivors.length]);
      const rooted = Int32Array.of(1);
      await group.reduce(rooted, { root, op: 'sum' });
      assert.equal(rooted[0], amRoot ? survivors.length : 1);
      const sent = Int32Array.of(rank.rank);
      await group.broadcast(sent, { root });
      assert.equal(sent[0], root);
      const mean = Float32Array.of(rank.rank);
      await group.allReduce(mean, { op: 'avg' });
      assert.equal(mean[0], Math.fround(survivors.reduce((sum, one) => sum + one, 0) / survivors.length));
      const smaller = await group.newGroup(survivors);
      const counted = Int32Array.of(1);
      await smaller!.allReduce(counted, { op: 'sum' });
      assert.equal(counted[0], survivors.length);
      await rank.meet(survivors);
    },
  },
];
