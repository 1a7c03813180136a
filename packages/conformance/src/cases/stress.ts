/** Many operations at once, and nothing left afterwards. */
import assert from 'node:assert/strict';
import type { Resources, TransportCase } from './case.js';
import { checkPattern, fillPattern, ranksOf, sleep } from './expect.js';

interface Planned {
  readonly to: number;
  readonly offset: number;
  readonly length: number;
}

export const stressCases: readonly TransportCase[] = [
  {
    id: 'stress/random-puts',
    sentence: 'hundreds of puts of random lengths to random peers at random times arrive whole and are counted',
    async body(rank) {
      const { worldSize } = rank;
      const puts = 300;
      const lane = puts * 200;
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: (worldSize + 1) * lane, signalSlots: worldSize });
      const plan: Planned[] = Array.from({ length: puts }, (_, i) => ({
        to: Math.floor(rank.random() * worldSize),
        offset: i * 200 + Math.floor(rank.random() * 8),
        length: Math.floor(rank.random() * 190),
      }));
      const plans = await rank.share(plan);
      const own = worldSize * lane;
      const endpoints = await Promise.all(ranksOf(worldSize).map((peer) => transport.connect(peer)));
      for (const [i, { to, offset, length }] of plan.entries()) {
        fillPattern(memory, own + offset, length, rank.rank, i);
        endpoints[to]!.put(memory.local(own + offset, length), memory.remote(to, rank.rank * lane + offset, length), {
          signal: { slot: rank.rank, op: 'inc' },
        });
        if (rank.random() < 0.05) await sleep(rank.random() * 3);
        if (rank.random() < 0.02) await endpoints[to]!.flush();
      }
      for (const sender of ranksOf(worldSize)) {
        const mine = plans[sender]!.map((one, i) => ({ ...one, i })).filter((one) => one.to === rank.rank);
        const seen = await memory.signals.until(sender, { cmp: 'ge', value: BigInt(mine.length) });
        assert.equal(seen, BigInt(mine.length));
        for (const { offset, length, i } of mine) {
          checkPattern(memory, sender * lane + offset, length, sender, i, `put ${i} of rank ${sender}`);
        }
      }
      for (const endpoint of endpoints) await endpoint.flush();
      await rank.meet();
    },
  },
  {
    id: 'leaks/nothing-left',
    sentence: 'after the last close no file descriptor, mapping, segment or pending operation is left',
    async body(rank) {
      const once = async (): Promise<void> => {
        const transport = await rank.open();
        const memory = await transport.allocate({ byteLength: 300_000, signalSlots: 4 });
        const endpoint = await transport.connect(rank.next);
        memory.view('u8', 0, 100);
        await endpoint.put(memory.local(0, 1000), memory.remote(rank.next, 5000, 1000), {
          signal: { slot: 0, op: 'inc' },
        });
        await memory.signals.until(0, { cmp: 'ge', value: 1n });
        const wait = memory.signals.until(1, { cmp: 'ge', value: 1n }, { peers: [rank.rank] }).catch(() => {});
        await rank.meet();
        await transport.close();
        await wait;
      };
      // The first use loads code and starts threads that stay; what comes after it must leave nothing.
      await once();
      // Twice: ranks of one process count the same things, so all must have collected before anyone counts.
      for (let look = 0; look < 2; look++) {
        await rank.meet();
        await rank.resources();
      }
      await rank.meet();
      const before = await rank.resources();
      await rank.meet();
      for (let round = 0; round < 8; round++) await once();
      await rank.meet();
      const kinds = Object.keys(before) as (keyof Resources)[];
      const more = (after: Resources): boolean => kinds.some((kind) => after[kind] > before[kind]);
      let after = await rank.resources();
      for (const end = Date.now() + 10_000; more(after) && Date.now() < end; ) {
        await sleep(20);
        after = await rank.resources();
      }
      assert.ok(!more(after), `before ${JSON.stringify(before)}, after ${JSON.stringify(after)}`);
      await rank.meet();
    },
  },
];
