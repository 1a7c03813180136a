/** Opening and closing. */
import assert from 'node:assert/strict';
import type { TransportCase } from './case.js';
import { fillPattern, refused, sleep } from './expect.js';

export const lifecycleCases: readonly TransportCase[] = [
  {
    id: 'lifecycle/facts',
    sentence: 'an open transport says its rank, size and name truly, and that nothing has failed',
    async body(rank) {
      const transport = await rank.open();
      assert.equal(transport.rank, rank.rank);
      assert.equal(transport.worldSize, rank.worldSize);
      assert.equal(transport.name, rank.provider.name);
      assert.equal(transport.closed, false);
      assert.equal(transport.failed.aborted, false);
      await rank.meet();
      await transport.close();
      assert.equal(transport.closed, true);
      assert.equal(transport.failed.aborted, false, 'an orderly close is not a failure');
    },
  },
  {
    id: 'lifecycle/double-close',
    sentence: 'closing twice, at once or later, by close() or by asyncDispose, is fine',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      await rank.meet();
      for (const one of [endpoint, memory, transport]) {
        await Promise.all([one.close(), one.close(), one[Symbol.asyncDispose]()]);
        assert.equal(one.closed, true);
        await one.close();
      }
    },
  },
  {
    id: 'lifecycle/close-in-flight',
    sentence: 'close() with puts in flight ends each of them, and what ended as done has landed',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 4096, signalSlots: 1 });
      fillPattern(memory, 0, 1024, rank.rank, 0);
      const endpoint = await transport.connect(rank.next);
      const works = Array.from({ length: 200 }, () =>
        endpoint.put(memory.local(0, 1024), memory.remote(rank.next, 2048, 1024), { signal: { slot: 0, op: 'inc' } }),
      );
      const ends = works.map((work) =>
        work.then(
          () => 1,
          () => 0,
        ),
      );
      await endpoint.close().catch((error) => rank.report(`close said ${String(error)}`));
      const done = (await Promise.all(ends)).reduce<number>((sum, one) => sum + one, 0);
      for (const work of works) assert.notEqual(work.status, 'pending');
      const promised = await rank.share(done);
      const seen = await memory.signals.until(0, { cmp: 'ge', value: BigInt(promised[rank.previous]!) });
      assert.equal(seen, BigInt(promised[rank.previous]!), 'more landed than was called done');
      await rank.meet();
    },
  },
  {
    id: 'lifecycle/parents-close-children',
    sentence: 'closing a transport closes its memories and endpoints first',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      const view = memory.view('u8', 0, 64);
      await rank.meet();
      await transport.close();
      assert.equal(memory.closed, true);
      assert.equal(endpoint.closed, true);
      assert.equal(view.length, 0);
    },
  },
  {
    id: 'lifecycle/use-after-close',
    sentence: 'after close() views are empty and inert, and every call is refused as closed',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 2 });
      const endpoint = await transport.connect(rank.next);
      const local = memory.local(0, 8);
      const remote = memory.remote(rank.next, 0, 8);
      const views = [memory.view('u8', 0, 64), memory.view('u64', 8, 2), memory.view('f32', 4, 3)];
      await rank.meet();
      await memory.close();
      for (const view of views) {
        assert.equal(view.length, 0);
        assert.equal(view[0], undefined);
        view[0] = view instanceof BigUint64Array ? 1n : 1;
      }
      await refused('EP_CLOSED', () => memory.local(0, 1));
      await refused('EP_CLOSED', () => memory.remote(rank.next, 0, 1));
      await refused('EP_CLOSED', () => memory.view('u8', 0, 1));
      await refused('EP_CLOSED', () => memory.read(local, new Uint8Array(8)));
      await refused('EP_CLOSED', () => memory.signals.peek(0));
      await refused('EP_CLOSED', () => memory.signals.until(0, { cmp: 'ge', value: 1n }, { timeoutMs: 5_000 }));
      await refused('EP_CLOSED', () => endpoint.put(local, remote));
      await rank.meet();
      await transport.close();
      await refused('EP_CLOSED', () => endpoint.put(local, remote));
      await refused('EP_CLOSED', () => endpoint.flush());
      await refused('EP_CLOSED', () => transport.allocate({ byteLength: 8, signalSlots: 1 }));
      await refused('EP_CLOSED', () => transport.connect(0));
      await refused('EP_CLOSED', () => transport.device(memory));
    },
  },
  {
    id: 'lifecycle/close-ends-waits',
    sentence: 'a wait that is pending when its own transport closes ends as closed',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      await rank.meet();
      // Only one of them: the close of a peer would end the others' waits as well.
      if (rank.rank === 0) {
        const wait = refused(['EP_CLOSED', 'EP_ABORTED'], () => memory.signals.until(0, { cmp: 'ge', value: 1n }));
        await sleep(5);
        await transport.close();
        await wait;
      }
      await rank.meet();
    },
  },
  {
    id: 'lifecycle/reopen',
    sentence: 'a process opens and closes transports one after the other',
    async body(rank) {
      for (let round = 0; round < 5; round++) {
        rank.report(`round ${round}`);
        const transport = await rank.open();
        const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
        const endpoint = await transport.connect(rank.next);
        await endpoint.signal(memory, { slot: 0, op: 'inc' });
        assert.equal(await memory.signals.until(0, { cmp: 'ge', value: 1n }), 1n);
        await rank.meet();
        await transport.close();
      }
    },
  },
];
