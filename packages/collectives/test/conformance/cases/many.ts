/** A little of everything among more ranks than a mask of 64 bits has: what one case can do where starting the ranks takes longest. */
import assert from 'node:assert/strict';
import type { GroupCase } from './case.js';
import { endOf, shareAmong, worksOver } from './failure.js';
import { ranksOf } from './oracle.js';

/** Ranks that share few cores come late to everything. */
const LATE_MS = 90_000;

export const manyCases: readonly GroupCase[] = [
  {
    id: 'many/ranks',
    sentence:
      'all of them sum, gather, and send in a ring and to one; half of them are a group; one dies, which ends the same call alike on all others, and they go on',
    ranks: 4,
    mortal: true,
    async body(rank) {
      const { rank: me, worldSize } = rank;
      const all = ranksOf(worldSize);
      const group = await rank.open({ timeoutMs: LATE_MS });
      rank.report('sums');
      const ones = new Int32Array(20_000).fill(me);
      await group.allReduce(ones);
      assert.ok(ones.every((value) => value === (worldSize * (worldSize - 1)) / 2));
      rank.report('gathers');
      const gathered = new Int32Array(3 * worldSize);
      await group.allGatherIntoTensor(gathered, new Int32Array(3).fill(me));
      assert.deepEqual(
        [...gathered],
        all.flatMap((one) => [one, one, one]),
      );
      rank.report('exchanges');
      const received = new Int32Array(worldSize);
      await group.allToAllSingle(
        received,
        Int32Array.from(all, (one) => me * worldSize + one),
      );
      assert.deepEqual(
        [...received],
        all.map((one) => one * worldSize + me),
      );
      rank.report('sends in a ring');
      const fromPrevious = new Int32Array(1_000);
      const previous = (me + worldSize - 1) % worldSize;
      const sent = group.send(new Int32Array(1_000).fill(me), (me + 1) % worldSize);
      await group.recv(fromPrevious, previous);
      await sent;
      assert.ok(fromPrevious.every((value) => value === previous));
      rank.report('sends to the last one');
      if (me === worldSize - 1) {
        const senders = new Set<number>();
        for (const one of all.slice(1)) {
          const data = new Int32Array(1);
          const { source } = await group.recvAnySource(data, { tag: 1 });
          assert.equal(data[0], source, `message ${one}`);
          senders.add(source);
        }
        assert.equal(senders.size, worldSize - 1);
      } else await group.send(Int32Array.of(me), worldSize - 1, { tag: 1 });
      rank.report('every second one');
      const odd = all.filter((one) => one % 2 === 1);
      const half = await group.newGroup(odd);
      if (me % 2 === 1) {
        const count = Int32Array.of(1);
        await half!.allReduce(count);
        assert.equal(count[0], odd.length);
      }
      rank.report('a rank dies');
      const victim = worldSize - 2;
      await group.barrier();
      await rank.meet();
      if (me === victim) await rank.die();
      const survivors = all.filter((one) => one !== victim);
      const work = group.allReduce(Int32Array.of(1), { timeoutMs: LATE_MS });
      const end = await endOf(work);
      assert.deepEqual(end.lost ?? all.filter((one) => !end.contributors!.includes(one)), [victim]);
      const ends = await shareAmong(rank, survivors, end, LATE_MS);
      for (const one of ends) assert.deepEqual(one, ends[0], 'survivors were told differently');
      rank.report('goes on');
      await worksOver(group, rank, survivors, LATE_MS);
      await rank.meet(survivors);
    },
  },
];
