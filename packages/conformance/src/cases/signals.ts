/** Signals and what they promise about bytes. */
import assert from 'node:assert/strict';
import type { Comparison } from '@ep/core';
import type { TransportCase } from './case.js';
import { checkPattern, fillPattern, refused } from './expect.js';

const WORD_MAX = 2n ** 64n - 1n;

export const signalCases: readonly TransportCase[] = [
  {
    id: 'signal/inc',
    sentence: 'inc adds one; without bytes too',
    needs: ['inc'],
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 3 });
      const endpoint = await transport.connect(rank.next);
      for (let i = 0; i < 10; i++) await endpoint.signal(memory, { slot: 1, op: 'inc' });
      assert.equal(await memory.signals.until(1, { cmp: 'ge', value: 10n }), 10n);
      assert.equal(memory.signals.peek(0), 0n);
      assert.equal(memory.signals.peek(2), 0n);
      await rank.meet();
    },
  },
  {
    id: 'signal/add',
    sentence: 'add adds its value, from all ranks at once without loss',
    needs: ['add'],
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      for (let peer = 0; peer < rank.worldSize; peer++) {
        const endpoint = await transport.connect(peer);
        for (let i = 1; i <= 50; i++) endpoint.signal(memory, { slot: 0, op: 'add', value: BigInt(i) });
      }
      const total = BigInt(rank.worldSize) * 1275n;
      assert.equal(await memory.signals.until(0, { cmp: 'ge', value: total }), total);
      await rank.meet();
    },
  },
  {
    id: 'signal/set',
    sentence: 'set overwrites',
    needs: ['set'],
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      for (const value of [7n, 3n, WORD_MAX, 0n, 42n]) {
        await endpoint.signal(memory, { slot: 0, op: 'set', value });
        await endpoint.flush();
        await rank.meet();
        assert.equal(memory.signals.peek(0), value);
        await rank.meet();
      }
    },
  },
  {
    id: 'signal/wraps',
    sentence: 'a signal wraps from 2^64-1 to 0, and compares unsigned before that',
    needs: ['add', 'inc'],
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      await endpoint.signal(memory, { slot: 0, op: 'add', value: WORD_MAX });
      assert.equal(await memory.signals.until(0, { cmp: 'ge', value: WORD_MAX }), WORD_MAX);
      await rank.meet();
      await endpoint.signal(memory, { slot: 0, op: 'inc' });
      assert.equal(await memory.signals.until(0, { cmp: 'eq', value: 0n }), 0n);
      await rank.meet();
      await endpoint.signal(memory, { slot: 0, op: 'add', value: 5n });
      assert.equal(await memory.signals.until(0, { cmp: 'eq', value: 5n }), 5n);
      await rank.meet();
    },
  },
  {
    id: 'signal/slot-bounds',
    sentence: 'slots outside of the pad are refused by every call that takes one',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 16, signalSlots: 4 });
      const endpoint = await transport.connect(rank.next);
      for (const slot of [4, -1, 0.5, Number.NaN, 2 ** 40]) {
        await refused('EP_INVALID_ARGUMENT', () => memory.signals.peek(slot));
        await refused('EP_INVALID_ARGUMENT', () => memory.signals.until(slot, { cmp: 'ge', value: 0n }));
        await refused('EP_INVALID_ARGUMENT', () => endpoint.signal(memory, { slot, op: 'inc' }));
        await refused('EP_INVALID_ARGUMENT', () =>
          endpoint.put(memory.local(0, 8), memory.remote(rank.next, 8, 8), { signal: { slot, op: 'inc' } }),
        );
      }
      await endpoint.flush();
      await rank.meet();
      assert.equal(memory.signals.peek(3), 0n);
      await rank.meet();
    },
  },
  {
    id: 'signal/until-comparisons',
    sentence: 'until knows six unsigned comparisons and refuses others',
    needs: ['add'],
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      await endpoint.signal(memory, { slot: 0, op: 'add', value: 2n ** 63n });
      const at = 2n ** 63n;
      await memory.signals.until(0, { cmp: 'ge', value: at });
      const holds: readonly (readonly [Comparison, bigint])[] = [
        ['eq', at],
        ['ne', 0n],
        ['lt', at + 1n],
        ['le', at],
        ['gt', 1n],
        ['ge', at],
      ];
      for (const [cmp, value] of holds) assert.equal(await memory.signals.until(0, { cmp, value }), at);
      const fails: readonly (readonly [Comparison, bigint])[] = [
        ['eq', 0n],
        ['ne', at],
        ['lt', at],
        ['le', 5n],
        ['gt', at],
        ['ge', WORD_MAX],
      ];
      for (const [cmp, value] of fails) {
        await refused('EP_TIMEOUT', () => memory.signals.until(0, { cmp, value }, { timeoutMs: 3 }));
      }
      await refused('EP_INVALID_ARGUMENT', () => memory.signals.until(0, { cmp: 'near' as never, value: 0n }));
      await rank.meet();
    },
  },
  {
    id: 'signal/many-waits',
    sentence: '64 waits on different slots at one time all end, in whatever order their signals come',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 64 });
      const endpoint = await transport.connect(rank.next);
      const waits = Array.from({ length: 64 }, (_, slot) => memory.signals.until(slot, { cmp: 'ge', value: 1n }));
      await rank.meet();
      for (let i = 0; i < 64; i++) endpoint.signal(memory, { slot: (i * 37) % 64, op: 'inc' });
      assert.deepEqual(new Set(await Promise.all(waits)), new Set([1n]));
      await rank.meet();
    },
  },
  {
    id: 'order/bundled',
    sentence: 'a visible signal means that its own put has landed, whatever the others do',
    needs: ['bundled'],
    async body(rank) {
      const transport = await rank.open();
      const puts = 96;
      const length = 777;
      const memory = await transport.allocate({ byteLength: 2 * puts * length, signalSlots: puts });
      const endpoint = await transport.connect(rank.next);
      const target = puts * length;
      for (let i = 0; i < puts; i++) fillPattern(memory, i * length, length, rank.rank, i);
      await rank.meet();
      for (let i = 0; i < puts; i++) {
        endpoint.put(memory.local(i * length, length), memory.remote(rank.next, target + i * length, length), {
          signal: { slot: i, op: 'inc', order: 'bundled' },
        });
      }
      const open = new Set(Array.from({ length: puts }, (_, i) => i));
      while (open.size > 0) {
        for (const i of open) {
          if (memory.signals.peek(i) === 0n) continue;
          checkPattern(memory, target + i * length, length, rank.previous, i, `put ${i}`);
          open.delete(i);
        }
        await new Promise((resolve) => setImmediate(resolve));
      }
      await endpoint.flush();
      await rank.meet();
    },
  },
  {
    id: 'order/prior',
    sentence: 'a visible signal of order prior means that every earlier put to that peer has landed',
    needs: ['prior', 'inc'],
    async body(rank) {
      const transport = await rank.open();
      const puts = 64;
      const length = 4096;
      const memory = await transport.allocate({ byteLength: 2 * puts * length, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      const target = puts * length;
      for (let round = 0; round < 4; round++) {
        for (let i = 0; i < puts; i++) fillPattern(memory, i * length, length, rank.rank, round + i);
        await rank.meet();
        for (let i = 0; i < puts; i++) {
          endpoint.put(memory.local(i * length, length), memory.remote(rank.next, target + i * length, length));
        }
        endpoint.signal(memory, { slot: 0, op: 'inc', order: 'prior' });
        await memory.signals.until(0, { cmp: 'ge', value: BigInt(round + 1) });
        for (let i = 0; i < puts; i++) {
          checkPattern(memory, target + i * length, length, rank.previous, round + i, `round ${round}, put ${i}`);
        }
        await endpoint.flush();
        await rank.meet();
      }
    },
  },
  {
    id: 'order/counted-completion',
    sentence: 'counting arrivals works over rounds without any order: credit before writing, counters never reset',
    needs: ['bundled', 'inc'],
    async body(rank) {
      const transport = await rank.open();
      const chunks = 24;
      const length = 300;
      const [arrived, credit] = [0, 1];
      const memory = await transport.allocate({ byteLength: 2 * chunks * length, signalSlots: 2 });
      const [forward, back] = [await transport.connect(rank.next), await transport.connect(rank.previous)];
      const target = chunks * length;
      for (let round = 0; round < 20; round++) {
        if (round > 0) await memory.signals.until(credit, { cmp: 'ge', value: BigInt(round) });
        await forward.flush();
        for (let i = 0; i < chunks; i++) fillPattern(memory, i * length, length, rank.rank, round * chunks + i);
        for (let i = 0; i < chunks; i++) {
          forward.put(memory.local(i * length, length), memory.remote(rank.next, target + i * length, length), {
            signal: { slot: arrived, op: 'inc' },
          });
        }
        await memory.signals.until(arrived, { cmp: 'ge', value: BigInt((round + 1) * chunks) });
        for (let i = 0; i < chunks; i++) {
          checkPattern(memory, target + i * length, length, rank.previous, round * chunks + i, `round ${round}`);
        }
        back.signal(memory, { slot: credit, op: 'inc' });
      }
      await Promise.all([forward.flush(), back.flush()]);
      await rank.meet();
    },
  },
];
