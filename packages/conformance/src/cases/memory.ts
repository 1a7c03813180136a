/** Symmetric memory. */
import assert from 'node:assert/strict';
import type { TransportCase } from './case.js';
import { checkBytes, checkPattern, fillPattern, refused } from './expect.js';

export const memoryCases: readonly TransportCase[] = [
  {
    id: 'memory/bounds',
    sentence: 'regions and views outside of the memory, or with numbers that are none, are refused',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 100, signalSlots: 1 });
      const bad: readonly (readonly [number, number])[] = [
        [0, 101],
        [100, 1],
        [101, 0],
        [-1, 1],
        [0, -1],
        [0.5, 1],
        [0, 1.5],
        [Number.NaN, 1],
        [0, Number.NaN],
        [2 ** 53, 1],
        [1, 2 ** 53],
        [Number.POSITIVE_INFINITY, 0],
      ];
      for (const [offset, length] of bad) {
        await refused('EP_INVALID_ARGUMENT', () => memory.local(offset, length));
        await refused('EP_INVALID_ARGUMENT', () => memory.remote(rank.next, offset, length));
        await refused('EP_INVALID_ARGUMENT', () => memory.view('u8', offset, length));
      }
      for (const peer of [-1, rank.worldSize, 0.5, Number.NaN]) {
        const error = await refused('EP_INVALID_ARGUMENT', () => memory.remote(peer, 0, 1));
        assert.match(error.message, /peer/);
        await refused('EP_INVALID_ARGUMENT', () => transport.connect(peer));
      }
      await refused('EP_INVALID_ARGUMENT', () => memory.view('u64', 4, 1));
      await refused('EP_INVALID_ARGUMENT', () => memory.view('f64', 0, 13));
      await refused('EP_INVALID_ARGUMENT', () => memory.view('u8', 0, 2 ** 33));
      memory.local(0, 100);
      memory.remote(rank.next, 100, 0);
      await rank.meet();
    },
  },
  {
    id: 'memory/arguments',
    sentence: 'allocation refuses sizes that are none and more slots than it has, and the transport goes on',
    async body(rank) {
      const transport = await rank.open();
      for (const byteLength of [-1, 0.5, Number.NaN, 2 ** 53]) {
        await refused('EP_INVALID_ARGUMENT', () => transport.allocate({ byteLength, signalSlots: 1 }));
      }
      for (const signalSlots of [-1, 0.5, transport.capabilities.maxSignalSlots + 1]) {
        await refused(['EP_INVALID_ARGUMENT', 'EP_CAPACITY'], () => transport.allocate({ byteLength: 8, signalSlots }));
      }
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      assert.equal(memory.byteLength, 8);
      await rank.meet();
    },
  },
  {
    id: 'memory/too-large',
    sentence: 'what cannot fit is refused before it is allocated, on every rank, and the transport goes on',
    async body(rank) {
      const transport = await rank.open();
      await refused('EP_MEMORY_LIMIT', () => transport.allocate({ byteLength: 2 ** 45, signalSlots: 1 }));
      const memory = await transport.allocate({ byteLength: 8, signalSlots: 1 });
      assert.equal(memory.view('u8', 0, 8).length, 8);
      await rank.meet();
    },
  },
  {
    id: 'memory/zeroed',
    sentence: 'new memory and new signals are zero, also where dirty memory was closed before',
    async body(rank) {
      const transport = await rank.open();
      for (let round = 0; round < 3; round++) {
        const memory = await transport.allocate({ byteLength: 100_000, signalSlots: 8 });
        checkBytes(memory, 0, 100_000, 0, `round ${round}`);
        for (let slot = 0; slot < 8; slot++) assert.equal(memory.signals.peek(slot), 0n);
        await rank.meet();
        memory.view('u8', 0, 100_000).fill(0xee);
        const endpoint = await transport.connect(rank.next);
        await endpoint.signal(memory, { slot: 3, op: 'add', value: 77n });
        await endpoint.flush();
        await rank.meet();
        await memory.close();
      }
    },
  },
  {
    id: 'memory/empty',
    sentence: 'memory may have no bytes, or no signals',
    async body(rank) {
      const transport = await rank.open();
      const signals = await transport.allocate({ byteLength: 0, signalSlots: 2 });
      const bytes = await transport.allocate({ byteLength: 16, signalSlots: 0 });
      assert.equal(signals.byteLength, 0);
      assert.equal(signals.view('u8', 0, 0).length, 0);
      assert.equal(bytes.signals.slots, 0);
      const endpoint = await transport.connect(rank.next);
      await endpoint.signal(signals, { slot: 1, op: 'inc' });
      await signals.signals.until(1, { cmp: 'ge', value: 1n });
      await refused('EP_INVALID_ARGUMENT', () => endpoint.signal(bytes, { slot: 0, op: 'inc' }));
      await rank.meet();
    },
  },
  {
    id: 'memory/over-of-none',
    sentence:
      "no memory is allocated over one of the transport's own, one that is closed, or what is no memory, and the ranks can go on",
    async body(rank) {
      const transport = await rank.open();
      const size = { byteLength: 64, signalSlots: 2 };
      const [own, closed] = [await transport.allocate(size), await transport.allocate(size)];
      await rank.meet();
      await closed.close();
      for (const over of [own, closed, {} as never]) {
        await refused(['EP_UNSUPPORTED', 'EP_INVALID_ARGUMENT', 'EP_CLOSED'], () =>
          transport.allocate({ ...size, over }),
        );
      }
      await refused('EP_INVALID_ARGUMENT', () => transport.allocate({ ...size, near: [rank.next] }));
      const again = await transport.allocate(size);
      assert.equal(again.byteLength, 64);
      await rank.meet();
    },
  },
  {
    id: 'memory/size-mismatch',
    sentence: 'ranks that ask for different sizes all get an error that names the odd one, and can go on',
    ranks: 3,
    async body(rank) {
      const transport = await rank.open();
      const odd = rank.worldSize - 1;
      const error = await refused('EP_MISMATCH', () =>
        transport.allocate({ byteLength: rank.rank === odd ? 128 : 64, signalSlots: 1 }),
      );
      if (rank.rank !== odd) assert.match(error.message, new RegExp(`rank ${odd}\\b`));
      // Any of those it differs from: on several hosts it may have heard of its mates alone.
      else assert.match(error.message, new RegExp(`rank (?!${odd}\\b)\\d+\\b`));
      const slots = await refused('EP_MISMATCH', () =>
        transport.allocate({ byteLength: 64, signalSlots: rank.rank === odd ? 2 : 1 }),
      );
      assert.match(slots.message, /slots/);
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      assert.equal(memory.byteLength, 64);
      await rank.meet();
    },
  },
  {
    id: 'memory/read-write',
    sentence: "read and write copy between JS bytes and this rank's part, and check both lengths",
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const other = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      await memory.write(Uint8Array.of(1, 2, 3), memory.local(5, 3));
      const back = new Uint8Array(5);
      await memory.read(memory.local(4, 5), back);
      assert.deepEqual([...back], [0, 1, 2, 3, 0]);
      assert.deepEqual([...memory.view('u8', 5, 3)], [1, 2, 3]);
      await refused('EP_INVALID_ARGUMENT', () => memory.write(new Uint8Array(2), memory.local(5, 3)));
      await refused('EP_INVALID_ARGUMENT', () => memory.read(memory.local(5, 3), new Uint8Array(4)));
      await refused('EP_INVALID_ARGUMENT', () => memory.read(other.local(0, 3), new Uint8Array(3)));
      await memory.read(memory.local(64, 0), new Uint8Array(0));
      await rank.meet();
    },
  },
  {
    id: 'memory/detached-buffer',
    sentence: 'a JS buffer that was detached, transferred or resized is an error, not a crash and not a silent nothing',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const gone = new Uint8Array(8);
      structuredClone(gone.buffer, { transfer: [gone.buffer] });
      await refused('EP_DETACHED', () => memory.write(gone, memory.local(0, 8)));
      await refused('EP_DETACHED', () => memory.read(memory.local(0, 8), gone));
      await refused('EP_DETACHED', () => memory.write(gone, memory.local(0, 0)));
      type Resizable = new (
        length: number,
        options: { maxByteLength: number },
      ) => ArrayBuffer & { resize(n: number): void };
      const buffer = new (ArrayBuffer as unknown as Resizable)(16, { maxByteLength: 32 });
      const shrunk = new Uint8Array(buffer, 4, 8);
      buffer.resize(8);
      await refused(['EP_DETACHED', 'EP_INVALID_ARGUMENT'], () => memory.write(shrunk, memory.local(0, 8)));
      await refused(['EP_DETACHED', 'EP_INVALID_ARGUMENT'], () => memory.read(memory.local(0, 8), shrunk));
      checkBytes(memory, 0, 64, 0, 'after refused writes');
      await rank.meet();
    },
  },
  {
    id: 'memory/views-alias',
    sentence: 'views of any dtype show the same bytes, and what peers put',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const [bytes, words] = [memory.view('u8', 0, 64), memory.view('u64', 32, 4)];
      const endpoint = await transport.connect(rank.next);
      fillPattern(memory, 0, 32, rank.rank, 1);
      await endpoint.put(memory.local(0, 32), memory.remote(rank.next, 32, 32), { signal: { slot: 0, op: 'inc' } });
      await memory.signals.until(0, { cmp: 'ge', value: 1n });
      checkPattern(memory, 32, 32, rank.previous, 1, 'the put');
      assert.equal(words[0], new DataView(bytes.buffer, bytes.byteOffset + 32).getBigUint64(0, true));
      await rank.meet();
    },
  },
];
