/** Waits always end, and say why. */
import assert from 'node:assert/strict';
import type { TransportCase } from './case.js';
import { refused, rejectsWith, sleep } from './expect.js';

export const waitCases: readonly TransportCase[] = [
  {
    id: 'wait/timeout-names-peers',
    sentence: 'a wait that times out names whom it awaited, what it expected and what it found',
    needs: ['add'],
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      await endpoint.signal(memory, { slot: 0, op: 'add', value: 3n });
      await memory.signals.until(0, { cmp: 'ge', value: 3n });
      const error = await refused('EP_TIMEOUT', () =>
        memory.signals.until(0, { cmp: 'ge', value: 10n }, { timeoutMs: 30, peers: [rank.previous] }),
      );
      assert.match(error.message, new RegExp(`rank ${rank.previous}\\b`));
      assert.match(error.message, /30 ms/);
      assert.deepEqual(error.context.awaited, [rank.previous]);
      assert.equal(error.context.expected, 10n);
      assert.equal(error.context.found, 3n);
      await rank.meet();
    },
  },
  {
    id: 'wait/already-true',
    sentence: 'a wait whose value is there resolves, even with no time left',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      assert.equal(await memory.signals.until(0, { cmp: 'ge', value: 0n }, { timeoutMs: 0 }), 0n);
      await refused('EP_TIMEOUT', () => memory.signals.until(0, { cmp: 'ge', value: 1n }, { timeoutMs: 0 }));
      await rank.meet();
    },
  },
  {
    id: 'wait/bad-options',
    sentence: 'peers outside of the world are refused',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      for (const peers of [[rank.worldSize], [-1], [0.5]]) {
        await refused('EP_INVALID_ARGUMENT', () =>
          memory.signals.until(0, { cmp: 'ge', value: 1n }, { peers, timeoutMs: 1000 }),
        );
      }
      await rank.meet();
    },
  },
  {
    id: 'abort/before-post',
    sentence: "a signal that was aborted before rejects with the caller's own reason and starts nothing",
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      const reason = { mine: true };
      const signal = AbortSignal.abort(reason);
      await rejectsWith(reason, () => memory.signals.until(0, { cmp: 'ge', value: 1n }, { signal }));
      await rejectsWith(reason, () => endpoint.flush({ signal }));
      await rejectsWith(reason, () => transport.allocate({ byteLength: 8, signalSlots: 1, signal }));
      await rejectsWith(reason, () => rank.open({ signal }));
      const again = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      assert.equal(again.byteLength, 8);
      await rank.meet();
    },
  },
  {
    id: 'abort/after-post',
    sentence: "an abort ends a wait that is under way with the caller's own reason, and the memory stays usable",
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 2 });
      const endpoint = await transport.connect(rank.next);
      const controller = new AbortController();
      const reason = new Error('mine');
      const wait = rejectsWith(reason, () =>
        memory.signals.until(0, { cmp: 'ge', value: 99n }, { signal: controller.signal }),
      );
      const other = memory.signals.until(1, { cmp: 'ge', value: 1n });
      await sleep(10);
      controller.abort(reason);
      await wait;
      await rank.meet();
      await endpoint.signal(memory, { slot: 1, op: 'inc' });
      assert.equal(await other, 1n);
      await rank.meet();
    },
  },
];
