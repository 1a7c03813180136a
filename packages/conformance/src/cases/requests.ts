/** Batches, Works, flush, one-sided reads. */
import assert from 'node:assert/strict';
import type { Need, Request } from '@ep/core';
import type { TransportCase } from './case.js';
import { checkBytes, checkPattern, fillPattern, refused } from './expect.js';

export const requestCases: readonly TransportCase[] = [
  {
    id: 'submit/one-status-each',
    sentence: 'a batch gives one Work per request; a wrong one fails alone and none is lost',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 256, signalSlots: 2 });
      const endpoint = await transport.connect(rank.next);
      fillPattern(memory, 0, 64, rank.rank, 0);
      const signal = { slot: 0, op: 'inc' } as const;
      const batch: Request<Need>[] = [
        { kind: 'put', from: memory.local(0, 64), to: memory.remote(rank.next, 128, 64), signal },
        { kind: 'put', from: memory.local(0, 8), to: memory.remote(rank.next, 200, 4), signal },
        { kind: 'put-value', to: memory.remote(rank.next, 192, 8), value: 77n, signal },
        { kind: 'signal', memory, signal: { slot: 9, op: 'inc' } },
        { kind: 'signal', memory, signal },
        { kind: 'nonsense' } as never,
      ];
      const works = endpoint.submit(batch);
      assert.equal(works.length, batch.length);
      const ends = await Promise.all(
        works.map((work) =>
          work.then(
            () => 'done',
            (error) => error.code,
          ),
        ),
      );
      const wrong = 'EP_INVALID_ARGUMENT';
      assert.deepEqual(ends, ['done', wrong, 'done', wrong, 'done', wrong]);
      assert.deepEqual(
        works.map((work) => work.status),
        ['done', 'failed', 'done', 'failed', 'done', 'failed'],
      );
      assert.equal(await memory.signals.until(0, { cmp: 'ge', value: 3n }), 3n);
      checkPattern(memory, 128, 64, rank.previous, 0, 'the put of the batch');
      assert.equal(memory.view('u64', 192, 1)[0], 77n);
      assert.equal(memory.view('u8', 200, 1)[0], 0);
      assert.deepEqual(endpoint.submit([]), []);
      await rank.meet();
    },
  },
  {
    id: 'flush/lands',
    sentence: 'when flush resolves, everything before it has landed at the peer',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 20_000, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      await endpoint.flush();
      for (let round = 0; round < 10; round++) {
        fillPattern(memory, 0, 10_000, rank.rank, round);
        await rank.meet();
        for (let i = 0; i < 10; i++) {
          endpoint.put(memory.local(i * 1000, 1000), memory.remote(rank.next, 10_000 + i * 1000, 1000));
        }
        await endpoint.flush();
        await rank.meet();
        checkPattern(memory, 10_000, 10_000, rank.previous, round, `round ${round}`);
        await rank.meet();
      }
    },
  },
  {
    id: 'work/awaitable',
    sentence: 'a Work can be kept, awaited, waited for with a limit, and counts up',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      const works = Array.from({ length: 4 }, () => endpoint.put(memory.local(0, 8), memory.remote(rank.next, 32, 8)));
      for (const [i, work] of works.entries()) {
        if (i > 0) assert.ok(work.sequence > works[i - 1]!.sequence);
        assert.equal(work.op, 'put');
        await work.wait({ timeoutMs: 10_000 });
        await work;
        assert.equal(await work.finally(() => {}), undefined);
        assert.equal(work.status, 'done');
      }
      await rank.meet();
    },
  },
  {
    id: 'work/unseen-failure',
    sentence: 'a failure that nobody looked at is thrown, with its cause, by the next call and then forgotten',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      endpoint.put(memory.local(0, 8), memory.remote(rank.next, 8, 4));
      const error = await refused('EP_INVALID_ARGUMENT', () => endpoint.flush());
      assert.ok(error.cause !== undefined, 'expected the original failure as cause');
      await endpoint.flush();
      await endpoint.put(memory.local(0, 8), memory.remote(rank.next, 8, 8));
      await rank.meet();
    },
  },
  {
    id: 'get/reads',
    sentence: 'get copies from a peer, any length at any offset',
    needs: ['get'],
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 40_000, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      fillPattern(memory, 0, 9000, rank.rank, 3);
      await rank.meet();
      for (const length of [0, 1, 7, 64, 4097, 9000]) {
        memory.view('u8', 20_000, 10_000).fill(0xdd);
        await endpoint.get(memory.remote(rank.next, 0, length), memory.local(20_001, length));
        checkPattern(memory, 20_001, length, rank.next, 3, `${length} bytes`);
        checkBytes(memory, 20_001 + length, 16, 0xdd, `after ${length} bytes`);
      }
      await refused('EP_INVALID_ARGUMENT', () => endpoint.get(memory.remote(rank.next, 0, 8), memory.local(0, 4)));
      await rank.meet();
    },
  },
  {
    id: 'capabilities/refused',
    sentence: 'what a transport does not offer is refused with an alternative, not imitated and not ignored',
    async body(rank) {
      const transport = await rank.open();
      const { needs } = transport.capabilities;
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 2 });
      const endpoint = await transport.connect(rank.next);
      const attempts: readonly (readonly [Need, () => PromiseLike<unknown>])[] = [
        ['get', () => endpoint.get(memory.remote(rank.next, 0, 8), memory.local(8, 8))],
        ['set', () => endpoint.signal(memory, { slot: 0, op: 'set', value: 1n })],
        ['add', () => endpoint.signal(memory, { slot: 1, op: 'add', value: 1n })],
        ['inc', () => endpoint.signal(memory, { slot: 1, op: 'inc' })],
        ['prior', () => endpoint.signal(memory, { slot: 1, op: 'inc', order: 'prior' })],
        ['bundled', () => endpoint.signal(memory, { slot: 1, op: 'inc', order: 'bundled' })],
        // Absent, which nobody can call, or refused.
        ...(endpoint.fetchAdd === undefined
          ? []
          : [['atomics', () => endpoint.fetchAdd!(memory.remote(rank.next, 0, 8), 1n)] as const]),
      ];
      for (const [need, attempt] of attempts) {
        if (needs.has(need)) await attempt();
        else assert.ok((await refused('EP_UNSUPPORTED', attempt)).message.length > 20);
      }
      await refused(['EP_UNSUPPORTED', 'EP_INVALID_ARGUMENT'], () =>
        endpoint.signal(memory, { slot: 1, op: 'xor' as never, value: 1n }),
      );
      await refused('EP_INVALID_ARGUMENT', () => endpoint.signal(memory, { slot: 1, op: 'add', value: 1 as never }));
      await rank.meet();
    },
  },
];
