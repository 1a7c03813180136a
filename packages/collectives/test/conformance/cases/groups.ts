/** Several groups: overlapping, split, nested, closed and opened again. */
import assert from 'node:assert/strict';
import type { ProcessGroup } from '../../../src/index.js';
import type { GroupCase, GroupRank } from './case.js';
import { failsWith } from './expect.js';
import { ranksOf } from './oracle.js';

/** The sum of the members' world ranks, which tells a group from any other here. */
async function sumOfRanks(group: ProcessGroup, rank: GroupRank): Promise<number> {
  const data = new Int32Array(9).fill(rank.rank + 1);
  await group.allReduce(data, { op: 'sum' });
  return data[8]!;
}

const expectedSum = (ranks: readonly number[]): number => ranks.reduce((sum, rank) => sum + rank + 1, 0);

/** Everybody makes all of these groups, in this order, and gets those that it is in. */
async function makeAll(
  world: ProcessGroup,
  rank: GroupRank,
  lists: readonly (readonly number[])[],
): Promise<{ readonly ranks: readonly number[]; readonly group: ProcessGroup }[]> {
  const made: { readonly ranks: readonly number[]; readonly group: ProcessGroup }[] = [];
  for (const ranks of lists) {
    const group = await world.newGroup(ranks);
    assert.equal(group !== undefined, ranks.includes(rank.rank), `newGroup([${ranks}]) on rank ${rank.rank}`);
    if (group !== undefined) made.push({ ranks, group });
  }
  return made;
}

export const groupCases: readonly GroupCase[] = [
  {
    id: 'groups/facts',
    sentence: 'a group says its rank, size, members and epoch truly, and that nothing has failed',
    async body(rank) {
      const group = await rank.open();
      await group.barrier();
      assert.equal(group.rank, rank.rank);
      assert.equal(group.size, rank.worldSize);
      assert.deepEqual([...group.ranks], [...ranksOf(rank.worldSize)]);
      assert.deepEqual([...group.activeRanks], [...ranksOf(rank.worldSize)]);
      assert.equal(group.failed.aborted, false);
      // Before share(): afterwards a rank may be gone that has nothing more to do here.
      const states = group.connections().map(({ state }) => state);
      const epochs = await rank.share(group.epoch);
      assert.equal(new Set(epochs).size, 1);
      assert.equal(states[rank.rank], 'self');
      assert.ok(
        states.every((state) => state === 'self' || state === 'connected'),
        states.join(', '),
      );
    },
  },
  {
    id: 'groups/of-one',
    sentence: 'a group of one does everything, alone',
    async body(rank) {
      const world = await rank.open();
      const groups = await makeAll(
        world,
        rank,
        ranksOf(rank.worldSize).map((one) => [one]),
      );
      assert.equal(groups.length, 1);
      const { group } = groups[0]!;
      assert.equal(await sumOfRanks(group, rank), rank.rank + 1);
      const data = new Float32Array([3, 5]);
      const output = new Float32Array(2);
      await group.broadcast(data, { root: 0 });
      await group.allReduce(data, { op: 'avg' });
      await group.allGatherIntoTensor(output, data);
      await group.reduceScatterTensor(output, data, { op: 'sum' });
      await group.allToAllSingle(output, data);
      await group.barrier();
      assert.deepEqual([...output], [3, 5]);
    },
  },
  {
    id: 'groups/overlapping',
    sentence: 'overlapping groups work at the same time, each with its own sequence',
    ranks: 3,
    async body(rank) {
      const world = await rank.open();
      const last = rank.worldSize - 1;
      const lists = [
        [0, 1],
        [1, 2],
        [0, last],
        ranksOf(rank.worldSize),
        [last, 0, 1].filter((r, i, all) => all.indexOf(r) === i),
      ];
      const groups = await makeAll(world, rank, lists);
      const works: Promise<void>[] = [];
      for (let round = 0; round < 20; round++) {
        for (const { ranks, group } of groups) {
          works.push(
            sumOfRanks(group, rank).then((sum) => assert.equal(sum, expectedSum(ranks), `[${ranks}], round ${round}`)),
          );
        }
      }
      await Promise.all(works);
    },
  },
  {
    id: 'groups/order-of-ranks',
    sentence: 'ranks of a group are numbered as they were listed',
    ranks: 2,
    async body(rank) {
      const world = await rank.open();
      const reversed = [...ranksOf(rank.worldSize)].reverse();
      const { group } = (await makeAll(world, rank, [reversed]))[0]!;
      assert.equal(group.rank, rank.worldSize - 1 - rank.rank);
      assert.deepEqual([...group.ranks], reversed);
      const data = new Int32Array([rank.rank]);
      await group.broadcast(data, { root: 0 });
      assert.equal(data[0], rank.worldSize - 1);
    },
  },
  {
    id: 'groups/split',
    sentence: 'split parts the ranks by colour and orders them by key; a rank without colour gets no group',
    ranks: 2,
    async body(rank) {
      const world = await rank.open();
      const color = rank.rank % 2;
      const group = await world.split(color, -rank.rank);
      const members = ranksOf(rank.worldSize).filter((one) => one % 2 === color);
      assert.ok(group !== undefined);
      assert.deepEqual([...group.ranks], [...members].reverse());
      assert.equal(await sumOfRanks(group, rank), expectedSum(members));
      const some = await world.split(rank.rank === 0 ? undefined : 7);
      assert.equal(some === undefined, rank.rank === 0);
      if (some !== undefined) assert.equal(await sumOfRanks(some, rank), expectedSum(ranksOf(rank.worldSize).slice(1)));
    },
  },
  {
    id: 'groups/nested',
    sentence: 'a group of a group has ranks of the world, and both work',
    ranks: 3,
    async body(rank) {
      const world = await rank.open();
      const upper = ranksOf(rank.worldSize).slice(1);
      const outer = await world.newGroup(upper);
      if (outer !== undefined) {
        const inner = await outer.newGroup([1, 0]);
        if (inner !== undefined) {
          assert.deepEqual([...inner.ranks], [2, 1]);
          assert.equal(await sumOfRanks(inner, rank), expectedSum([1, 2]));
        }
        assert.equal(await sumOfRanks(outer, rank), expectedSum(upper));
      }
      assert.equal(await sumOfRanks(world, rank), expectedSum(ranksOf(rank.worldSize)));
    },
  },
  {
    id: 'groups/topologies',
    sentence:
      'tensor-, pipeline-, data- and expert-parallel groups of one job work three times over, messages between stages too',
    ranks: 4,
    async body(rank) {
      const world = await rank.open();
      const four = ranksOf(4);
      const topologies = {
        tp: [four],
        tpPp: [
          [0, 1],
          [2, 3],
          [0, 2],
          [1, 3],
        ],
        prefillDecode: [[0, 1], [2, 3], four],
        dpTp: [[0, 1], [2, 3], [0, 2], [1, 3], four],
        dpTpEp: [[0, 1], [2, 3], [0, 2], [1, 3], four, [0, 3], [1, 2]],
      };
      for (const [name, lists] of Object.entries(topologies)) {
        const groups = await makeAll(world, rank, lists);
        for (let round = 0; round < 3; round++) {
          for (const { ranks, group } of groups) {
            const where = `${name}: [${ranks}], round ${round}`;
            rank.report(where);
            assert.equal(await sumOfRanks(group, rank), expectedSum(ranks), where);
            const output = new Int32Array(ranks.length);
            await group.allGatherIntoTensor(output, new Int32Array([rank.rank]));
            assert.deepEqual([...output], ranks, where);
          }
          // Stage 0 is ranks 0 and 1, stage 1 the others.
          if (name === 'tpPp' && rank.rank < 4) {
            const activations = new Float32Array(1_000).fill(rank.rank + round);
            if (rank.rank < 2) await world.send(activations, rank.rank + 2);
            else {
              await world.recv(activations, rank.rank - 2);
              assert.ok(activations.every((value) => value === rank.rank - 2 + round));
            }
          }
        }
        for (const { group } of groups) await group.destroy();
      }
    },
  },
  {
    id: 'groups/destroy-one',
    sentence:
      'a group that was destroyed refuses calls; its parent, its sisters and new groups of the same ranks go on',
    ranks: 2,
    async body(rank) {
      const world = await rank.open();
      const all = ranksOf(rank.worldSize);
      for (let round = 0; round < 3; round++) {
        const [first, second] = await makeAll(world, rank, [all, all]);
        assert.ok(first !== undefined && second !== undefined);
        assert.equal(await sumOfRanks(first.group, rank), expectedSum(all));
        await first.group.destroy();
        assert.equal(first.group.closed, true);
        await failsWith('EP_CLOSED', () => first.group.allReduce(new Float32Array(1), { op: 'sum' }));
        assert.equal(await sumOfRanks(second.group, rank), expectedSum(all));
        await second.group.destroy();
      }
      assert.equal(await sumOfRanks(world, rank), expectedSum(all));
    },
  },
  {
    id: 'groups/init-again',
    sentence: 'after destroy the same ranks open the world again, several times',
    async body(rank) {
      for (let round = 0; round < 4; round++) {
        const world = await rank.open();
        assert.equal(await sumOfRanks(world, rank), expectedSum(ranksOf(rank.worldSize)), `round ${round}`);
        await world.destroy();
        await world.destroy();
      }
    },
  },
  {
    id: 'groups/two-worlds',
    sentence:
      'two groups of all ranks, used in different orders by different ranks without waiting, do not disturb each other',
    ranks: 2,
    async body(rank) {
      const groups = [await rank.open(), await rank.open()];
      for (let round = 0; round < 20; round++) {
        const order = rank.rank % 2 === 0 ? groups : [...groups].reverse();
        const tensors = order.map((_, i) => new Int32Array(7).fill(order[i] === groups[0] ? 1 : 100));
        await Promise.all(order.map((group, i) => group.allReduce(tensors[i]!, { op: 'sum' })));
        for (const [i, group] of order.entries()) {
          assert.equal(tensors[i]![6], rank.worldSize * (group === groups[0] ? 1 : 100), `round ${round}`);
        }
      }
    },
  },
];
