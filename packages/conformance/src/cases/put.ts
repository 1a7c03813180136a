/** Moving bytes. */
import assert from 'node:assert/strict';
import type { TransportCase } from './case.js';
import { checkBytes, checkPattern, fillPattern, patternByte, ranksOf, refused, sleep } from './expect.js';

/** Beyond this a finite limit is one that no test can afford to reach. */
const LARGEST_TRIED = 64 * 2 ** 20;

export const putCases: readonly TransportCase[] = [
  {
    id: 'put/unaligned-offsets',
    sentence: 'any length at any offset arrives whole and touches nothing beside it',
    async body(rank) {
      const transport = await rank.open();
      const lengths = [1, 2, 3, 7, 8, 9, 31, 63, 64, 65, 255, 4095, 4096, 4097];
      const memory = await transport.allocate({ byteLength: 32_768, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      let expected = 0n;
      for (const length of lengths) {
        for (const [from, to] of [
          [0, 16_384],
          [1, 16_387],
          [13, 16_391],
        ] as const) {
          fillPattern(memory, from, length, rank.rank, length);
          memory.view('u8', 16_384 - 64, 8192).fill(0xaa);
          await rank.meet();
          await endpoint.put(memory.local(from, length), memory.remote(rank.next, to, length), {
            signal: { slot: 0, op: 'inc' },
          });
          await memory.signals.until(0, { cmp: 'ge', value: ++expected });
          checkPattern(memory, to, length, rank.previous, length, `length ${length}`);
          checkBytes(memory, to - 32, 32, 0xaa, `before length ${length}`);
          checkBytes(memory, to + length, 32, 0xaa, `after length ${length}`);
          await rank.meet();
        }
      }
    },
  },
  {
    id: 'put/zero-bytes',
    sentence: 'a put of no bytes moves none and still signals',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 32, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      memory.view('u8', 0, 32).fill(5);
      await rank.meet();
      for (const offset of [0, 16, 32]) {
        await endpoint.put(memory.local(offset, 0), memory.remote(rank.next, offset, 0), {
          signal: { slot: 0, op: 'inc' },
        });
      }
      assert.equal(await memory.signals.until(0, { cmp: 'ge', value: 3n }), 3n);
      checkBytes(memory, 0, 32, 5, 'after empty puts');
      await rank.meet();
    },
  },
  {
    id: 'put/last-byte',
    sentence: 'the last byte of the memory can be written, and nothing after it',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 4097, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      memory.view('u8', 0, 1)[0] = 100 + rank.rank;
      await endpoint.put(memory.local(0, 1), memory.remote(rank.next, 4096, 1), { signal: { slot: 0, op: 'inc' } });
      await memory.signals.until(0, { cmp: 'ge', value: 1n });
      assert.equal(memory.view('u8', 4096, 1)[0], 100 + rank.previous);
      await refused('EP_INVALID_ARGUMENT', () => memory.remote(rank.next, 4097, 1));
      await refused('EP_INVALID_ARGUMENT', () => memory.remote(rank.next, 4096, 2));
      await rank.meet();
    },
  },
  {
    id: 'put/max-message',
    sentence: 'one byte less than, exactly, and one byte more than the largest message arrive whole',
    inapplicable: ({ maxMessageBytes }) =>
      maxMessageBytes > LARGEST_TRIED ? 'has no limit on messages that a test could reach' : undefined,
    async body(rank) {
      const transport = await rank.open();
      const most = transport.capabilities.maxMessageBytes;
      const memory = await transport.allocate({ byteLength: 2 * most + 2, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      for (const [round, length] of [most - 1, most, most + 1].entries()) {
        fillPattern(memory, 0, length, rank.rank, round);
        await rank.meet();
        await endpoint.put(memory.local(0, length), memory.remote(rank.next, most + 1, length), {
          signal: { slot: 0, op: 'inc' },
        });
        await memory.signals.until(0, { cmp: 'ge', value: BigInt(round + 1) });
        checkPattern(memory, most + 1, length, rank.previous, round, `${length} bytes`);
        await rank.meet();
      }
    },
  },
  {
    id: 'put/large',
    sentence: 'several megabytes arrive whole before their signal',
    async body(rank) {
      const transport = await rank.open();
      const length = 5 * 2 ** 20 + 3;
      const memory = await transport.allocate({ byteLength: 2 * length, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      fillPattern(memory, 0, length, rank.rank, 0);
      const work = endpoint.put(memory.local(0, length), memory.remote(rank.next, length, length), {
        signal: { slot: 0, op: 'inc' },
      });
      await memory.signals.until(0, { cmp: 'ge', value: 1n });
      checkPattern(memory, length, length, rank.previous, 0, 'the large put');
      await work;
      await rank.meet();
    },
  },
  {
    id: 'put/value-widths',
    sentence: 'putValue writes 1, 2, 4 or 8 bytes, little-endian, and refuses other widths',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      memory.view('u8', 0, 64).fill(0xcc);
      await rank.meet();
      const value = 0xf1e2_d3c4_b5a6_9788n;
      const widths = [1, 2, 4, 8];
      for (const [i, width] of widths.entries()) {
        await endpoint.putValue(memory.remote(rank.next, 16 * i, width), BigInt.asUintN(8 * width, value), {
          signal: { slot: 0, op: 'inc' },
        });
      }
      await memory.signals.until(0, { cmp: 'ge', value: 4n });
      const bytes = memory.view('u8', 0, 64);
      for (const [i, width] of widths.entries()) {
        for (let byte = 0; byte < 16; byte++) {
          const expected = byte < width ? Number((value >> BigInt(8 * byte)) & 0xffn) : 0xcc;
          assert.equal(bytes[16 * i + byte], expected, `width ${width}, byte ${byte}`);
        }
      }
      for (const width of [0, 3, 5, 16]) {
        await refused('EP_INVALID_ARGUMENT', () => endpoint.putValue(memory.remote(rank.next, 0, width), 1n));
      }
      await rank.meet();
    },
  },
  {
    id: 'put/self',
    sentence: 'a rank puts to itself like to any other',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 256, signalSlots: 1 });
      const endpoint = await transport.connect(rank.rank);
      fillPattern(memory, 0, 100, rank.rank, 4);
      await endpoint.put(memory.local(0, 100), memory.remote(rank.rank, 128, 100), {
        signal: { slot: 0, op: 'add', value: 5n },
      });
      assert.equal(await memory.signals.until(0, { cmp: 'ge', value: 5n }), 5n);
      checkPattern(memory, 128, 100, rank.rank, 4, 'own put');
      await rank.meet();
    },
  },
  {
    id: 'put/refuses-mismatched-regions',
    sentence:
      'regions of different lengths, of another peer or of a foreign memory are refused, and nothing is written',
    async body(rank) {
      const [transport, foreign] = [await rank.open(), await rank.open()];
      const memory = await transport.allocate({ byteLength: 64, signalSlots: 1 });
      const other = await foreign.allocate({ byteLength: 64, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      memory.view('u8', 0, 32).fill(9);
      await refused('EP_INVALID_ARGUMENT', () => endpoint.put(memory.local(0, 8), memory.remote(rank.next, 32, 4)));
      await refused('EP_INVALID_ARGUMENT', () => endpoint.put(memory.local(0, 8), memory.remote(rank.rank, 32, 8)));
      await refused('EP_INVALID_ARGUMENT', () => endpoint.putValue(memory.remote(rank.rank, 32, 8), 1n));
      const nonsense = { byteLength: 8, byteOffset: 32, memory: {}, peer: rank.next } as never;
      await refused('EP_INVALID_ARGUMENT', () => endpoint.put(memory.local(0, 8), nonsense));
      await endpoint.flush();
      await rank.meet();
      checkBytes(memory, 32, 32, 0, 'after refused puts');
      checkBytes(other, 0, 64, 0, 'the foreign memory');
      await rank.meet();
    },
  },
  {
    id: 'put/source-reuse',
    sentence: 'a source may be overwritten as soon as its Work is done',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 40 * 512, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      for (let round = 0; round < 32; round++) {
        fillPattern(memory, 0, 512, rank.rank, round);
        await endpoint.put(memory.local(0, 512), memory.remote(rank.next, 512 * (round + 1), 512), {
          signal: { slot: 0, op: 'inc' },
        });
        memory.view('u8', 0, 512).fill(0);
      }
      await memory.signals.until(0, { cmp: 'ge', value: 32n });
      for (let round = 0; round < 32; round++) {
        checkPattern(memory, 512 * (round + 1), 512, rank.previous, round, `round ${round}`);
      }
      await rank.meet();
    },
  },
  {
    id: 'put/all-to-all',
    sentence: 'every rank sends to every rank and counts what arrives',
    async body(rank) {
      const transport = await rank.open();
      const { worldSize } = rank;
      const length = 1000;
      const memory = await transport.allocate({ byteLength: 2 * worldSize * length, signalSlots: 1 });
      const target = worldSize * length;
      const endpoints = await Promise.all(ranksOf(worldSize).map((peer) => transport.connect(peer)));
      for (const peer of ranksOf(worldSize)) fillPattern(memory, peer * length, length, rank.rank, peer);
      for (const [peer, endpoint] of endpoints.entries()) {
        endpoint.put(memory.local(peer * length, length), memory.remote(peer, target + rank.rank * length, length), {
          signal: { slot: 0, op: 'inc' },
        });
      }
      await memory.signals.until(0, { cmp: 'ge', value: BigInt(worldSize) });
      for (const peer of ranksOf(worldSize)) {
        checkPattern(memory, target + peer * length, length, peer, rank.rank, `from rank ${peer}`);
      }
      for (const endpoint of endpoints) await endpoint.flush();
      await rank.meet();
    },
  },
  {
    id: 'put/ring-wraps',
    sentence: '100 000 small puts, far more than any queue holds, all arrive',
    // HAZARD: over a network each put is two ways there and back, which take 0.1 ms where cores are free, and several times that where they are not.
    limitMs: 240_000,
    async body(rank) {
      const total = 100_000;
      const batch = 250;
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 8 * batch, signalSlots: 1 });
      if (rank.rank === 0) {
        const endpoint = await transport.connect(rank.next);
        for (let sent = 0; sent < total; sent += batch) {
          if (sent % 10_000 === 0) rank.report(`sent ${sent}`);
          const requests = Array.from({ length: batch }, (_, i) => ({
            kind: 'put-value' as const,
            to: memory.remote(rank.next, 8 * i, 8),
            value: BigInt(sent + i),
            signal: { slot: 0, op: 'inc' as const },
          }));
          for (const work of endpoint.submit(requests)) await work;
        }
      }
      if (rank.rank === 1) {
        await memory.signals.until(0, { cmp: 'ge', value: BigInt(total) }, { timeoutMs: 120_000 });
        assert.equal(memory.signals.peek(0), BigInt(total));
        const words = memory.view('u64', 0, batch);
        for (let i = 0; i < batch; i++) assert.equal(words[i], BigInt(total - batch + i));
      }
      await rank.meet();
    },
  },
  {
    id: 'put/slow-reader',
    sentence: 'a reader that looks late and seldom sees every arrival counted, never more than were sent',
    async body(rank) {
      const transport = await rank.open();
      const memory = await transport.allocate({ byteLength: 400 * 16, signalSlots: 1 });
      const endpoint = await transport.connect(rank.next);
      const send = (async () => {
        for (let i = 0; i < 399; i++) {
          memory.view('u8', 0, 16).fill(patternByte(rank.rank, 0, i));
          await endpoint.put(memory.local(0, 16), memory.remote(rank.next, 16 * (i + 1), 16), {
            signal: { slot: 0, op: 'inc' },
          });
        }
      })();
      let seen = 0n;
      while (seen < 399n) {
        await sleep(rank.rank === 0 ? 25 : 1);
        const now = await memory.signals.until(0, { cmp: 'gt', value: seen });
        assert.ok(now > seen && now <= 399n, `found ${now} after ${seen}`);
        seen = now;
      }
      for (let i = 0; i < 399; i++) {
        checkBytes(memory, 16 * (i + 1), 16, patternByte(rank.previous, 0, i), `arrival ${i}`);
      }
      await send;
      await rank.meet();
    },
  },
];
