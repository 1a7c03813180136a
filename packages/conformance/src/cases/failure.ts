/** Ranks that die or leave. Real SIGKILL, or worker.terminate(). */
import assert from 'node:assert/strict';
import { type EpError, isEpError } from '@ep/core';
import type { TransportCase } from './case.js';
import { checkPattern, fillPattern, ranksOf, refused } from './expect.js';

// HAZARD: where ranks have memory first, all meet before one dies. Over a network `allocate` may have ended on a rank whose last words to the others are still under way; they are lost with it, and
// then the others' calls end as `failure/collective-ends` says.

/** Far more than death takes to be seen, far less than a hang. */
const BOUND_MS = 15_000;

export const failureCases: readonly TransportCase[] = [
  {
    id: 'failure/killed-mid-put',
    sentence: 'when a rank dies in the middle of its puts, every wait of every other rank ends and names it',
    async body(rank) {
      const transport = await rank.open();
      const victim = rank.worldSize - 1;
      const memory = await transport.allocate({ byteLength: 2 ** 20, signalSlots: 2 });
      await rank.meet();
      if (rank.rank === victim) {
        const endpoints = await Promise.all(ranksOf(victim).map((peer) => transport.connect(peer)));
        void rank.die();
        for (;;) {
          for (const [peer, endpoint] of endpoints.entries()) {
            await endpoint.put(memory.local(0, 2 ** 19), memory.remote(peer, 2 ** 19, 2 ** 19), {
              signal: { slot: 0, op: 'inc' },
            });
          }
          await new Promise((resolve) => setImmediate(resolve));
        }
      }
      const never = { cmp: 'ge', value: 2n ** 60n } as const;
      const errors = await Promise.all([
        refused('EP_PEER_LOST', () => memory.signals.until(0, never, { peers: [victim], timeoutMs: BOUND_MS })),
        refused('EP_PEER_LOST', () => memory.signals.until(1, never, { timeoutMs: BOUND_MS })),
      ]);
      for (const error of errors) {
        assert.match(error.message, new RegExp(`rank ${victim}\\b`));
        assert.deepEqual(error.context.lost, [victim]);
      }
      const later = await refused('EP_PEER_LOST', () =>
        memory.signals.until(0, never, { peers: [victim], timeoutMs: BOUND_MS }),
      );
      assert.match(later.message, new RegExp(`rank ${victim}\\b`));
    },
  },
  {
    id: 'failure/failed-fires',
    sentence: 'a transport that found a peer dead says so by its failed signal, with the error as reason',
    async body(rank) {
      const transport = await rank.open();
      const victim = rank.worldSize - 1;
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      await rank.meet();
      if (rank.rank === victim) await rank.die();
      await refused('EP_PEER_LOST', () =>
        memory.signals.until(0, { cmp: 'ge', value: 1n }, { peers: [victim], timeoutMs: BOUND_MS }),
      );
      assert.equal(transport.failed.aborted, true, 'expected transport.failed to have fired');
      const { reason } = transport.failed;
      assert.ok(isEpError(reason) && (reason as EpError).code === 'EP_PEER_LOST', String(reason));
    },
  },
  {
    id: 'failure/collective-ends',
    sentence: 'a collective call that awaits a dead rank ends in time and names it',
    async body(rank) {
      const transport = await rank.open();
      const victim = rank.worldSize - 1;
      await rank.meet();
      if (rank.rank === victim) await rank.die();
      const error = await refused(['EP_PEER_LOST', 'EP_TIMEOUT'], () =>
        transport.allocate({ byteLength: 64, signalSlots: 1, timeoutMs: 2_000 }),
      );
      assert.match(error.message, new RegExp(`rank ${victim}\\b`));
    },
  },
  {
    id: 'failure/survivors-go-on',
    sentence: 'after a death the others still put and signal among themselves',
    ranks: 3,
    async body(rank) {
      const transport = await rank.open();
      const victim = rank.worldSize - 1;
      const memory = await transport.allocate({ byteLength: 4096, signalSlots: 2 });
      await rank.meet();
      if (rank.rank === victim) await rank.die();
      const others = rank.worldSize - 1;
      const [next, previous] = [(rank.rank + 1) % others, (rank.rank + others - 1) % others];
      const never = { cmp: 'ge', value: 2n ** 60n } as const;
      await refused('EP_PEER_LOST', () => memory.signals.until(1, never, { peers: [victim], timeoutMs: BOUND_MS }));
      const endpoint = await transport.connect(next);
      fillPattern(memory, 0, 1000, rank.rank, 0);
      for (let round = 1; round <= 10; round++) {
        await endpoint.put(memory.local(0, 1000), memory.remote(next, 2048, 1000), {
          signal: { slot: 0, op: 'inc' },
        });
        await memory.signals.until(0, { cmp: 'ge', value: BigInt(round) }, { peers: [previous], timeoutMs: BOUND_MS });
        checkPattern(memory, 2048, 1000, previous, 0, `round ${round}`);
      }
      await endpoint.flush();
      await rank.meet(ranksOf(others));
    },
  },
  {
    id: 'failure/fence',
    sentence: 'once a dead rank is cut off, nothing lands that it had under way; who lives is left alone',
    ranks: 3,
    async body(rank) {
      const transport = await rank.open();
      const victim = rank.worldSize - 1;
      const [begin, length] = [2 ** 19, 2 ** 19];
      const memory = await transport.allocate({ byteLength: 2 ** 20, signalSlots: 2 });
      assert.ok(transport.fence !== undefined, 'the transport cannot cut ranks off');
      await rank.meet();
      if (rank.rank === victim) {
        const endpoints = await Promise.all(ranksOf(victim).map((peer) => transport.connect(peer)));
        const source = memory.view('u8', 0, length);
        void rank.die();
        for (let round = 0; ; round++) {
          source.fill(round);
          for (const [peer, endpoint] of endpoints.entries()) {
            await endpoint.put(memory.local(0, length), memory.remote(peer, begin, length), {
              signal: { slot: 0, op: 'inc' },
            });
          }
          await new Promise((resolve) => setImmediate(resolve));
        }
      }
      const never = { cmp: 'ge', value: 2n ** 60n } as const;
      await refused('EP_PEER_LOST', () => memory.signals.until(0, never, { peers: [victim], timeoutMs: BOUND_MS }));
      const all = ranksOf(rank.worldSize);
      // Its process may be ending still.
      let cutOff = await transport.fence(all);
      for (const end = performance.now() + BOUND_MS; cutOff.length === 0 && performance.now() < end; ) {
        cutOff = await transport.fence(all);
      }
      assert.deepEqual(cutOff, [victim]);
      const [bytes, word] = [memory.view('u8', begin, length).slice(), memory.signals.peek(0)];
      await new Promise((resolve) => setTimeout(resolve, 200));
      assert.ok(
        Buffer.compare(memory.view('u8', begin, length), bytes) === 0,
        'bytes of a rank landed that was cut off',
      );
      assert.equal(memory.signals.peek(0), word, 'a signal of a rank landed that was cut off');
      assert.deepEqual(await transport.fence([victim]), [victim]);
      assert.deepEqual(await transport.fence([rank.rank]), []);
      const others = rank.worldSize - 1;
      const endpoint = await transport.connect((rank.rank + 1) % others);
      await endpoint.signal(memory, { slot: 1, op: 'inc' });
      const previous = (rank.rank + others - 1) % others;
      await memory.signals.until(1, { cmp: 'ge', value: 1n }, { peers: [previous], timeoutMs: BOUND_MS });
      await endpoint.flush();
      await rank.meet(ranksOf(others));
    },
  },
  {
    id: 'failure/close-ends-waits-on-it',
    sentence: 'a wait on a rank that closes in order ends too, and names it',
    async body(rank) {
      const transport = await rank.open();
      const leaver = rank.worldSize - 1;
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      if (rank.rank === leaver) {
        await rank.meet();
        await transport.close();
        return;
      }
      const wait = refused('EP_PEER_LOST', () =>
        memory.signals.until(0, { cmp: 'ge', value: 1n }, { peers: [leaver], timeoutMs: BOUND_MS }),
      );
      await rank.meet();
      assert.match((await wait).message, new RegExp(`rank ${leaver}\\b`));
    },
  },
];
