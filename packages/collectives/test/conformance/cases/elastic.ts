/** Members that are taken out and come back, and groups that agree anew. Processes that come in the place of others are in test/elastic. */
import assert from 'node:assert/strict';
import type { ProcessGroup } from '../../../src/index.js';
import type { GroupCase, GroupRank } from './case.js';
import { failsWith } from './expect.js';
import { ranksOf, sleep } from './oracle.js';

const HUNG_MS = 20_000;
const LIMITS = { timeoutMs: HUNG_MS };

/** All have come, and are members. */
async function openAll(rank: GroupRank, options: Parameters<GroupRank['open']>[0] = {}): Promise<ProcessGroup> {
  const group = await rank.open(options);
  await group.barrier(LIMITS);
  assert.equal(await group.numSyncedRanks(LIMITS), rank.worldSize);
  // Who is still at its last step when others take it out has lost that call.
  await rank.meet();
  return group;
}

/** Small and of many chunks, over exactly these members. */
async function worksOver(group: ProcessGroup, { rank }: GroupRank, members: readonly number[]): Promise<void> {
  assert.deepEqual([...group.activeRanks], [...members]);
  const sum = members.reduce((total, one) => total + 2 ** one, 0);
  for (const length of [1, 40_000]) {
    const data = new Float64Array(length).fill(2 ** rank);
    const work = group.allReduce(data, { op: 'sum', ...LIMITS });
    await work;
    assert.deepEqual([...work.contributors], [...members]);
    assert.ok(data.every((one) => one === sum));
  }
  await group.barrier(LIMITS);
}

async function takesIn(group: ProcessGroup, comer: number): Promise<void> {
  while ((await group.peerState([comer], LIMITS))[0] !== 'joining') await sleep(2);
  await group.recoverRanks([comer], LIMITS);
}

/** What the members say, who must all say the same. */
async function agrees(group: ProcessGroup, rank: GroupRank, members: readonly number[]): Promise<void> {
  const states = await group.peerState(ranksOf(rank.worldSize), LIMITS);
  const synced = await group.numSyncedRanks(LIMITS);
  for (const one of members) assert.equal(states[one], 'active', `rank ${one}`);
  assert.equal(states.filter((state) => state === 'active').length, members.length, states.join());
  assert.ok(synced >= members.length && synced <= rank.worldSize, `${synced}`);
  await rank.store.set(`states/${rank.rank}`, Buffer.from(JSON.stringify([states, synced])));
  const said = await Promise.all(members.map((one) => rank.store.get(`states/${one}`, LIMITS)));
  for (const one of said) assert.deepEqual(Buffer.from(one).toString(), Buffer.from(said[0]!).toString());
}

export const elasticCases: readonly GroupCase[] = [
  {
    id: 'elastic/agreed',
    sentence: 'peerState and numSyncedRanks say of all members the same on all of them, and are no barrier',
    ranks: 2,
    async body(rank) {
      const all = ranksOf(rank.worldSize);
      const group = await openAll(rank);
      await agrees(group, rank, all);
      const [own] = await group.peerState([rank.rank], LIMITS);
      assert.equal(own, 'active');
      const before = Object.keys(group.trace());
      await group.numSyncedRanks(LIMITS);
      assert.deepEqual(Object.keys(group.trace()), before);
      await worksOver(group, rank, all);
    },
  },
  {
    id: 'elastic/taken-out',
    sentence: 'members that are alive and are taken out learn it from their next call, and the others work on without',
    ranks: 3,
    async body(rank) {
      const victim = rank.worldSize - 1;
      const others = ranksOf(victim);
      const group = await openAll(rank);
      if (rank.rank === victim) {
        await rank.meet();
        await failsWith('EP_EVICTED', () => group.barrier(LIMITS));
        assert.ok(!group.activeRanks.includes(victim));
        await failsWith('EP_EVICTED', () => group.allReduce(new Float32Array(3), LIMITS));
      } else {
        await group.deactivate([victim], LIMITS);
        await worksOver(group, rank, others);
        await rank.meet();
        await agrees(group, rank, others);
        const lost = await failsWith('EP_PEER_LOST', () => group.recv(new Float32Array(1), victim, LIMITS));
        assert.match(lost.message, new RegExp(`\\b${victim}\\b`));
        await worksOver(group, rank, others);
        const made = await group.newGroup(others, LIMITS);
        await made!.barrier(LIMITS);
      }
      await rank.meet();
    },
  },
  {
    id: 'elastic/leaves-in-order',
    sentence: 'a member that takes itself out with the others ends its calls as they do, many of them under way',
    ranks: 3,
    async body(rank) {
      const leaver = 0;
      const others = ranksOf(rank.worldSize).filter((one) => one !== leaver);
      const group = await openAll(rank);
      const tensors = Array.from({ length: 20 }, () => new Float64Array(500).fill(2 ** rank.rank));
      const works = tensors.map((data) => group.allReduce(data, { op: 'sum', ...LIMITS }));
      await group.deactivate([leaver], LIMITS);
      for (const [i, work] of works.entries()) {
        await work;
        assert.deepEqual([...work.contributors], ranksOf(rank.worldSize));
        assert.equal(tensors[i]![499], 2 ** rank.worldSize - 1);
      }
      assert.deepEqual([...group.activeRanks], others);
      if (rank.rank === leaver) await failsWith('EP_EVICTED', () => group.barrier(LIMITS));
      else await worksOver(group, rank, others);
    },
  },
  {
    id: 'elastic/agrees-anew',
    sentence: 'a group that failed works again after deactivate, however many calls each member has made in vain',
    ranks: 2,
    async body(rank) {
      const all = ranksOf(rank.worldSize);
      const group = await openAll(rank);
      for (let round = 0; round < 3; round++) {
        const isOdd = rank.rank === round % rank.worldSize;
        // Whoever knows already may have gone on to deactivate().
        await failsWith(['EP_MISMATCH', 'EP_ABORTED'], () =>
          isOdd ? group.barrier(LIMITS) : group.allReduce(new Float64Array(300_000), LIMITS),
        );
        for (let i = 0; i < rank.rank + round; i++) {
          await failsWith(['EP_POISONED', 'EP_ABORTED'], () => group.barrier(LIMITS));
        }
        await group.deactivate([], LIMITS);
        await worksOver(group, rank, all);
      }
      // What one member has under way, and ends badly, while all agree anew already. A question is one behind a look at the store: its signal fires before it begins.
      for (const how of ['late', 'aborted', 'asked in vain'] as const) {
        const aborting = new AbortController();
        const limits = how === 'late' ? { timeoutMs: 300 } : { ...LIMITS, signal: aborting.signal };
        if (rank.rank === 0) {
          const vain =
            how === 'asked in vain' ? group.peerState([0], limits) : group.allReduce(new Float64Array(2000), limits);
          aborting.abort();
          vain.then(
            () => assert.fail(`${how}: a call that nobody else makes has ended well`),
            () => {},
          );
        }
        await group.deactivate([], LIMITS);
        await worksOver(group, rank, all);
      }
    },
  },
  {
    id: 'elastic/late-is-out',
    sentence: 'where a deadline takes out who is late, the call ends alike on those who came, and the next ones work',
    ranks: 3,
    async body(rank) {
      const late = 1;
      const others = ranksOf(rank.worldSize).filter((one) => one !== late);
      const group = await openAll(rank, { onTimeout: 'evict' });
      if (rank.rank === late) {
        await rank.meet();
        await failsWith('EP_EVICTED', () => group.barrier(LIMITS));
      } else {
        // Rank 0 comes last, and waits for a moment only.
        const waited = others.filter((one) => one !== 0).map((one) => `called/${one}`);
        if (rank.rank === 0) await rank.store.wait(waited, LIMITS);
        const timeoutMs = rank.rank === 0 ? 100 : HUNG_MS;
        const work = group.allReduce(new Float64Array(9), { timeoutMs });
        if (rank.rank !== 0) await rank.store.set(`called/${rank.rank}`, new Uint8Array(1));
        const lost = await failsWith('EP_PEER_LOST', () => work);
        assert.deepEqual(lost.context.lost, [late]);
        await worksOver(group, rank, others);
        await rank.meet();
        await worksOver(group, rank, others);
      }
      await rank.meet();
    },
  },
  {
    id: 'elastic/comes-back',
    sentence: 'a member that was taken out comes back, again and again, and takes part in all that the others do',
    ranks: 3,
    async body(rank) {
      const all = ranksOf(rank.worldSize);
      const leaver = 1;
      const others = all.filter((one) => one !== leaver);
      const group = await openAll(rank);
      for (let round = 0; round < 3; round++) {
        rank.report(`round ${round}: deactivate`);
        await group.deactivate([leaver], LIMITS);
        rank.report(`round ${round}: join`);
        if (rank.rank === leaver) {
          await group.joinGroup(LIMITS);
        } else {
          await worksOver(group, rank, others);
          await takesIn(group, leaver);
        }
        rank.report(`round ${round}: all`);
        await worksOver(group, rank, all);
        const passed = Int32Array.of(rank.rank);
        if (rank.rank === leaver) await group.send(passed, 0, LIMITS);
        if (rank.rank === 0) await group.recv(passed, leaver, LIMITS);
        if (rank.rank === 0) assert.equal(passed[0], leaver);
        const gathered = all.map(() => new Int32Array(1));
        await group.allGather(gathered, Int32Array.of(round + rank.rank), LIMITS);
        for (const one of all) assert.equal(gathered[one]![0], round + one);
        await rank.meet();
      }
      await agrees(group, rank, all);
    },
  },
  {
    id: 'elastic/empty-place',
    sentence: 'a group begins with an empty place, whose rank is taken in once it asks, and not before, on all alike',
    ranks: 3,
    async body(rank) {
      const all = ranksOf(rank.worldSize);
      const late = 1;
      const first = all.filter((one) => one !== late);
      const group = await rank.open({ activeRanks: first, ...(rank.rank === late && { isExtension: true }) });
      assert.deepEqual(await group.peerState([rank.rank], LIMITS), ['active']);
      if (rank.rank === late) {
        assert.deepEqual([...group.activeRanks], [late]);
        await rank.meet();
        await group.joinGroup(LIMITS);
      } else {
        await worksOver(group, rank, first);
        await failsWith('EP_NOT_READY', () => group.recoverRanks([late], LIMITS));
        await failsWith('EP_PEER_LOST', () => group.send(new Int32Array(1), late, LIMITS));
        await worksOver(group, rank, first);
        await rank.meet();
        await takesIn(group, late);
      }
      await worksOver(group, rank, all);
      await agrees(group, rank, all);
    },
  },
  {
    id: 'elastic/grows',
    sentence:
      'a group of fewer ranks than it may have grows while it works: the new rank is taken in, lists are as long as there are ranks, and each change counts in `epoch`',
    ranks: 3,
    async body(rank) {
      const all = ranksOf(rank.worldSize);
      const late = rank.worldSize - 1;
      const first = ranksOf(late);
      const isLate = rank.rank === late;
      const sizes = { worldSize: late, maxGroupSize: rank.worldSize };
      const group = await rank.open({ ...sizes, ...(isLate && { isExtension: true }) });
      const gathers = async (members: readonly number[]): Promise<void> => {
        const outputs = ranksOf(group.size).map(() => new Int32Array(2));
        const work = group.allGather(outputs, Int32Array.of(1, rank.rank), LIMITS);
        await work;
        assert.deepEqual([...work.contributors], [...members]);
        for (const one of ranksOf(group.size)) {
          assert.deepEqual([...outputs[one]!], members.includes(one) ? [1, one] : [0, 0]);
        }
      };
      if (isLate) {
        await rank.meet();
        await group.joinGroup(LIMITS);
      } else {
        assert.equal(group.size, late);
        await worksOver(group, rank, first);
        await gathers(first);
        await failsWith('EP_INVALID_ARGUMENT', () => group.recoverRanks([late], LIMITS));
        const before = group.epoch;
        await group.extendGroupSizeTo(rank.worldSize, LIMITS);
        assert.deepEqual([group.size, [...group.ranks], group.epoch], [rank.worldSize, all, before + 1]);
        await group.extendGroupSizeTo(rank.worldSize, LIMITS);
        assert.equal(group.epoch, before + 1, 'nothing has changed');
        await gathers(first);
        await failsWith('EP_NOT_READY', () => group.recoverRanks([late], LIMITS));
        await rank.meet();
        const works = Array.from({ length: 20 }, () => group.allReduce(new Float64Array(700), LIMITS));
        await takesIn(group, late);
        await Promise.all(works);
      }
      assert.equal(group.size, rank.worldSize);
      const epochs = await rank.share(group.epoch);
      assert.equal(new Set(epochs).size, 1, `epochs ${epochs}`);
      await gathers(all);
      await worksOver(group, rank, all);
      await agrees(group, rank, all);
      const made = await group.newGroup([late, 0], LIMITS);
      await made?.barrier(LIMITS);
    },
  },
];
