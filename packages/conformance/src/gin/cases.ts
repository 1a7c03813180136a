/** The suite of GIN contexts: signals and counters of their own, puts between memories of a transport. Calls are carried out by kernels. */
import assert from 'node:assert/strict';
import type { GinCall } from '@ep/native';
import type { CaseRank } from '../cases/case.js';
import { checkBytes, checkPattern, fillPattern, refused, rejectsWith } from '../cases/expect.js';
import { type GinCase, type GinSharing, type GinTransport, openGin } from './gin-case.js';

const ROUNDS = 24;
const LENGTH = 16_000;
/** No test waits so long. */
const FOREVER = 1n << 20n;

const put = (rank: CaseRank, from: number, to: number, bytes: number) =>
  ({ op: 'put', peer: rank.next, from, to, bytes }) as const;

const waitSignal = (signal: number, value: number): GinCall => ({ op: 'waitSignal', signal, value: BigInt(value) });

export const ginCases: readonly GinCase[] = [
  {
    id: 'gin/put-signal',
    sentence: 'whoever sees the signal of a put sees its bytes',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 1, counters: 0 }, 2 * LENGTH);
      for (let round = 1; round <= ROUNDS; round++) {
        fillPattern(memory, 0, LENGTH, rank.rank, round);
        await gin.run(memory, [{ ...put(rank, 0, LENGTH, LENGTH), signal: 0 }, waitSignal(0, round)]);
        checkPattern(memory, LENGTH, LENGTH, rank.previous, round, `round ${round}`);
        await gin.run(memory, [{ op: 'flush' }]);
        await rank.meet();
      }
    },
  },
  {
    id: 'gin/put-value',
    sentence: 'values of 1, 2, 4 and 8 bytes land at any offset, with nothing beside them',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 1, counters: 0 });
      const widths = [1, 2, 4, 8] as const;
      memory.view('u8', 0, 256).fill(0xcc);
      await rank.meet();
      const value = 0x8877665544332211n + BigInt(rank.rank);
      await gin.run(memory, [
        ...widths.map(
          (bytes, i) => ({ op: 'putValue', peer: rank.next, to: 3 + 33 * i, bytes, value, signal: 0 }) as const,
        ),
        waitSignal(0, widths.length),
      ]);
      const expected = Buffer.alloc(256, 0xcc);
      const whole = Buffer.alloc(8);
      whole.writeBigUInt64LE(0x8877665544332211n + BigInt(rank.previous));
      for (const [i, bytes] of widths.entries()) whole.copy(expected, 3 + 33 * i, 0, bytes);
      assert.deepEqual(Buffer.from(memory.view('u8', 0, 256)), expected);
      await rank.meet();
    },
  },
  {
    id: 'gin/add',
    sentence: 'adding N is N arrivals, of which all say that the bytes have landed',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 2, counters: 0 }, 2 * LENGTH);
      fillPattern(memory, 0, LENGTH, rank.rank, 1);
      await rank.meet();
      await gin.run(memory, [{ ...put(rank, 0, LENGTH, LENGTH), signal: 1, add: 5 }, waitSignal(1, 5)]);
      checkPattern(memory, LENGTH, LENGTH, rank.previous, 1, 'after five arrivals');
      await gin.run(memory, [{ op: 'signal', peer: rank.next, signal: 1, add: 3 }, waitSignal(1, 8), { op: 'flush' }]);
      await rank.meet();
      assert.deepEqual([gin.readSignal(0), gin.readSignal(1)], [0n, 8n]);
      await rank.meet();
    },
  },
  {
    id: 'gin/counter',
    sentence: 'a counter has come to N when the sources of its N puts may be reused, and counts no other put',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 1, counters: 2 }, 3 * LENGTH);
      fillPattern(memory, 2 * LENGTH, LENGTH, rank.rank, 99);
      for (let round = 1; round <= ROUNDS; round++) {
        fillPattern(memory, 0, LENGTH, rank.rank, round);
        const found = await gin.run(memory, [
          { ...put(rank, 0, LENGTH, LENGTH), signal: 0, counter: 1 },
          { op: 'waitCounter', counter: 1, value: BigInt(round) },
          { op: 'readCounter', counter: 1 },
          // Over the source: a put that still read it would send these bytes.
          { op: 'get', peer: rank.rank, from: 2 * LENGTH, to: 0, bytes: LENGTH },
          put(rank, 2 * LENGTH, 2 * LENGTH, 0),
          { op: 'flush' },
          waitSignal(0, round),
        ]);
        assert.deepEqual(found, [BigInt(round)]);
        checkPattern(memory, LENGTH, LENGTH, rank.previous, round, `round ${round}`);
        await rank.meet();
      }
      assert.deepEqual([gin.readCounter(0), gin.readCounter(1)], [0n, BigInt(ROUNDS)]);
      await rank.meet();
    },
  },
  {
    id: 'gin/counter-apart',
    sentence: 'a counter ticks nothing at the peer, and is chosen apart from the signal',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 3, counters: 4 });
      await gin.run(memory, [
        { ...put(rank, 0, 1024, 64), counter: 0 },
        { ...put(rank, 0, 1024, 64), counter: 3 },
        { ...put(rank, 0, 1024, 64), signal: 2, counter: 0 },
        { ...put(rank, 0, 1024, 64), signal: 1 },
        { op: 'flush' },
        waitSignal(2, 1),
        waitSignal(1, 1),
      ]);
      await rank.meet();
      const signals = [0, 1, 2].map((id) => gin.readSignal(id));
      const counters = [0, 1, 2, 3].map((id) => gin.readCounter(id));
      assert.deepEqual(
        [signals, counters],
        [
          [0n, 1n, 1n],
          [2n, 0n, 0n, 1n],
        ],
      );
      await rank.meet();
    },
  },
  {
    id: 'gin/flush',
    sentence: 'after a flush sources may be reused, and what was got is there',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 1, counters: 0 }, 3 * LENGTH);
      fillPattern(memory, 2 * LENGTH, LENGTH, rank.rank, 99);
      await rank.meet();
      for (let round = 1; round <= ROUNDS; round++) {
        fillPattern(memory, 0, LENGTH, rank.rank, round);
        await gin.run(memory, [
          { ...put(rank, 0, LENGTH, LENGTH), signal: 0 },
          { op: 'flush' },
          { op: 'get', peer: rank.next, from: 2 * LENGTH, to: 0, bytes: LENGTH },
          { op: 'flush' },
        ]);
        checkPattern(memory, 0, LENGTH, rank.next, 99, `got in round ${round}`);
        await gin.run(memory, [waitSignal(0, round)]);
        checkPattern(memory, LENGTH, LENGTH, rank.previous, round, `round ${round}`);
        await rank.meet();
      }
    },
  },
  {
    id: 'gin/flush-rings',
    sentence: 'a flush sends what aggregated calls have left',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 1, counters: 0 });
      const calls = [0, 1, 2].map((i) => ({ ...put(rank, 8 * i, 64 + 8 * i, 8), signal: 0, aggregate: true }));
      await gin.run(memory, [...calls, { op: 'flush' }]);
      await gin.run(memory, [waitSignal(0, 3)]);
      await rank.meet();
    },
  },
  {
    id: 'gin/aggregate',
    sentence: 'aggregated calls go with the next one that is not, also with one that carries nothing',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 1, counters: 0 });
      const value = (i: number, aggregate: boolean): GinCall => {
        return { op: 'putValue', peer: rank.next, to: 8 * i, bytes: 8, value: BigInt(i + 1), signal: 0, aggregate };
      };
      await gin.run(memory, [...[0, 1, 2, 3, 4, 5, 6].map((i) => value(i, true)), value(7, false), waitSignal(0, 8)]);
      assert.deepEqual([...memory.view('u64', 0, 8)], [1n, 2n, 3n, 4n, 5n, 6n, 7n, 8n]);
      await rank.meet();
      await gin.run(memory, [value(9, true), value(10, true), put(rank, 0, 0, 0), waitSignal(0, 10)]);
      await rank.meet();
    },
  },
  {
    id: 'gin/get',
    sentence: 'a get copies from the peer, any length at any offset',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 0, counters: 0 }, 40_000);
      fillPattern(memory, 0, 9000, rank.rank, 3);
      await rank.meet();
      for (const bytes of [0, 1, 7, 64, 4097, 9000]) {
        memory.view('u8', 20_000, 10_000).fill(0xdd);
        await gin.run(memory, [{ op: 'get', peer: rank.next, from: 0, to: 20_001, bytes }, { op: 'flush' }]);
        checkPattern(memory, 20_001, bytes, rank.next, 3, `${bytes} bytes`);
        checkBytes(memory, 20_001 + bytes, 16, 0xdd, `after ${bytes} bytes`);
      }
      await rank.meet();
    },
  },
  {
    id: 'gin/addresses',
    sentence: 'who looks at a count through its address finds what reading it gives, also after a reset',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 2, counters: 1 });
      const seen: readonly GinCall[] = [
        { op: 'lookSignal', signal: 1 },
        { op: 'readSignal', signal: 1 },
        { op: 'lookCounter', counter: 0 },
        { op: 'readCounter', counter: 0 },
      ];
      const puts = (count: number) =>
        Array.from({ length: count }, () => ({ ...put(rank, 0, 64, 8), signal: 1, counter: 0 }));
      const counted = (count: number): readonly GinCall[] => [
        { op: 'waitCounter', counter: 0, value: BigInt(count) },
        waitSignal(1, count),
      ];
      assert.deepEqual(await gin.run(memory, seen), [0n, 0n, 0n, 0n]);
      await rank.meet();
      assert.deepEqual(await gin.run(memory, [...puts(3), ...counted(3), ...seen]), [3n, 3n, 3n, 3n]);
      assert.deepEqual([gin.readSignal(1), gin.readCounter(0)], [3n, 3n]);
      await rank.meet();
      const reset: readonly GinCall[] = [
        { op: 'resetSignal', signal: 1 },
        { op: 'resetCounter', counter: 0 },
      ];
      assert.deepEqual(await gin.run(memory, [...reset, ...seen]), [0n, 0n, 0n, 0n]);
      await rank.meet();
      assert.deepEqual(await gin.run(memory, [...puts(2), ...counted(2), ...seen]), [2n, 2n, 2n, 2n]);
      assert.deepEqual([gin.readSignal(1), gin.readCounter(0)], [2n, 2n]);
      await rank.meet();
    },
  },
  {
    id: 'gin/reset',
    sentence: 'a reset begins one count at zero again, and no other',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 2, counters: 2 });
      const tick = (id: number): GinCall => ({ ...put(rank, 0, 64, 8), signal: id, counter: id });
      const all = () => [gin.readSignal(0), gin.readSignal(1), gin.readCounter(0), gin.readCounter(1)];
      // HAZARD: a put may have completed, and so been flushed, before its counter shows it.
      const counted = (...values: readonly bigint[]): readonly GinCall[] =>
        values.map((value, counter) => ({ op: 'waitCounter', counter, value }));
      const first = [tick(0), tick(1), tick(1), { op: 'flush' }, waitSignal(0, 1), waitSignal(1, 2)] as const;
      await gin.run(memory, [...first, ...counted(1n, 2n)]);
      await rank.meet();
      await gin.run(memory, [{ op: 'resetSignal', signal: 1 }]);
      assert.deepEqual(all(), [1n, 0n, 1n, 2n]);
      await gin.run(memory, [{ op: 'resetCounter', counter: 0 }]);
      assert.deepEqual(all(), [1n, 0n, 0n, 2n]);
      await rank.meet();
      const second = [tick(0), tick(1), { op: 'flush' }, waitSignal(0, 2), waitSignal(1, 1)] as const;
      await gin.run(memory, [...second, ...counted(1n, 3n)]);
      await rank.meet();
      assert.deepEqual(all(), [2n, 1n, 1n, 3n]);
      await rank.meet();
    },
  },
  {
    id: 'gin/own-counts',
    sentence: 'a context shares its counts with no other one, and with no memory',
    async body(rank) {
      const { transport, memory, gin } = await openGin(rank, { signals: 2, counters: 1 });
      const other = await transport.openGin({ signals: 2, counters: 1 });
      const endpoint = await transport.connect(rank.next);
      await endpoint.put(memory.local(0, 8), memory.remote(rank.next, 64, 8), { signal: { slot: 1, op: 'inc' } });
      await memory.signals.until(1, { cmp: 'ge', value: 1n });
      await gin.run(memory, [
        { ...put(rank, 0, 64, 8), signal: 0, counter: 0 },
        ...([{ op: 'flush' }, waitSignal(0, 1), { op: 'waitCounter', counter: 0, value: 1n }] as const),
      ]);
      await rank.meet();
      assert.deepEqual([memory.signals.peek(0), memory.signals.peek(1)], [0n, 1n]);
      assert.deepEqual([gin.readSignal(0), gin.readSignal(1), gin.readCounter(0)], [1n, 0n, 1n]);
      assert.deepEqual([other.readSignal(0), other.readSignal(1), other.readCounter(0)], [0n, 0n, 0n]);
      await rank.meet();
    },
  },
  {
    id: 'gin/refusals',
    sentence: 'an id, a rank or a range that there is not is refused before anything moves, and the context goes on',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 2, counters: 1 });
      const wrong: readonly GinCall[] = [
        { ...put(rank, 0, 64, 8), signal: 2 },
        { ...put(rank, 0, 64, 8), counter: 1 },
        { ...put(rank, 0, 64, 8), peer: rank.worldSize },
        { ...put(rank, 0, 64, 8), peer: -1 },
        put(rank, 0, 4089, 8),
        put(rank, 4089, 0, 8),
        put(rank, 0, 0, 4097),
        { op: 'putValue', peer: rank.next, to: 4093, bytes: 4, value: 0n },
        { op: 'putValue', peer: rank.next, to: 0, bytes: 3 as never, value: 0n },
        { op: 'get', peer: rank.next, from: 4089, to: 0, bytes: 8 },
        { op: 'signal', peer: rank.next, signal: 0xffff_ffff },
        { op: 'waitSignal', signal: 2, value: 0n },
        { op: 'waitCounter', counter: 1, value: 0n },
        { op: 'readSignal', signal: 2 },
        { op: 'readCounter', counter: 1 },
        { op: 'lookSignal', signal: 2 },
        { op: 'lookCounter', counter: 1 },
        { op: 'resetSignal', signal: 2 },
        { op: 'resetCounter', counter: 1 },
        { op: 'xor' } as never,
      ];
      for (const call of wrong) await refused('EP_INVALID_ARGUMENT', () => gin.run(memory, [call]));
      await refused('EP_INVALID_ARGUMENT', () => gin.readSignal(2));
      await refused('EP_INVALID_ARGUMENT', () => gin.readCounter(1));
      await refused('EP_INVALID_ARGUMENT', () => gin.run({} as never, []));
      const second = await refused('EP_INVALID_ARGUMENT', () =>
        gin.run(memory, [{ op: 'flush' }, { op: 'readSignal', signal: 5 }, { ...put(rank, 0, 64, 8), signal: 0 }]),
      );
      assert.match(second.message, /call 1 \(readSignal\)/);
      await rank.meet();
      assert.deepEqual([gin.readSignal(0), gin.readSignal(1), gin.readCounter(0)], [0n, 0n, 0n]);
      await rank.meet();
      await gin.run(memory, [{ ...put(rank, 0, 64, 8), signal: 1, counter: 0 }, { op: 'flush' }, waitSignal(1, 1)]);
      await rank.meet();
    },
  },
  {
    id: 'gin/sharing',
    sentence:
      'a context that is not shared by the device carries out one program at a time, and says so; the device shares any number',
    async body(rank) {
      const { transport, memory } = await openGin(rank, { signals: 0, counters: 0 });
      fillPattern(memory, 0, 512, rank.rank, 5);
      for (const sharing of ['device', 'block', 'thread'] satisfies readonly GinSharing[]) {
        memory.view('u8', 1024, 512).fill(0);
        const gin = await transport.openGin({ signals: 1, counters: 1, sharing });
        const puts = (count: number): readonly GinCall[] => [
          ...Array.from({ length: count }, (_, i) => {
            return { ...put(rank, 0, 1024, 512), signal: 0, counter: 0, aggregate: i % 8 !== 7 };
          }),
          { op: 'flush' },
        ];
        const alone = sharing !== 'device';
        // HAZARD: a put may have completed, and so been flushed, before its counter shows it.
        const all = [waitSignal(0, 300), { op: 'waitCounter', counter: 0, value: 300n }] as const;
        const first = gin.run(memory, [...puts(alone ? 300 : 150), ...all]);
        // HAZARD: where the case fails below, nobody awaits it any more, and its failure would end the rank before the case's is told.
        first.catch(() => {});
        if (alone) await refused('EP_BUSY', () => gin.run(memory, puts(1)));
        else await gin.run(memory, puts(150));
        await first;
        checkPattern(memory, 1024, 512, rank.previous, 5, sharing);
        await rank.meet();
        assert.deepEqual([gin.readSignal(0), gin.readCounter(0)], [300n, 300n]);
        await rank.meet();
      }
      await refused('EP_INVALID_ARGUMENT', () =>
        transport.openGin({ signals: 0, counters: 0, sharing: 'warp' as never }),
      );
    },
  },
  {
    id: 'gin/of-nothing',
    sentence: 'a context without signals and counters puts, gets and flushes',
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 0, counters: 0 });
      fillPattern(memory, 0, 512, rank.rank, 7);
      await rank.meet();
      await gin.run(memory, [put(rank, 0, 1024, 512), { op: 'flush' }]);
      await rank.meet();
      checkPattern(memory, 1024, 512, rank.previous, 7, 'put');
      await refused('EP_INVALID_ARGUMENT', () => gin.run(memory, [{ ...put(rank, 0, 0, 8), signal: 0 }]));
      await refused('EP_INVALID_ARGUMENT', () => gin.run(memory, [{ ...put(rank, 0, 0, 8), counter: 0 }]));
      await refused('EP_INVALID_ARGUMENT', () => gin.readSignal(0));
      await rank.meet();
    },
  },
  {
    id: 'gin/alike',
    sentence: 'ranks that ask for other numbers are told so, all of them, and may ask again',
    async body(rank) {
      const transport = (await rank.open()) as GinTransport;
      await refused('EP_MISMATCH', () => transport.openGin({ signals: 1 + rank.rank, counters: 0 }));
      const gin = await transport.openGin({ signals: 1, counters: 0 });
      assert.equal(gin.readSignal(0), 0n);
      await rank.meet();
    },
  },
  {
    id: 'gin/waits-end',
    sentence: "a call that waits ends by its deadline, by its caller's abort and by close(), and says which",
    async body(rank) {
      const { memory, gin } = await openGin(rank, { signals: 1, counters: 1 });
      const late = await refused('EP_TIMEOUT', () =>
        gin.run(memory, [{ op: 'flush' }, { op: 'waitSignal', signal: 0, value: FOREVER }], { timeoutMs: 20 }),
      );
      assert.match(late.message, /call 1 \(waitSignal\)/);
      const controller = new AbortController();
      const reason = { mine: true };
      const aborted = rejectsWith(reason, () =>
        gin.run(memory, [{ op: 'waitCounter', counter: 0, value: FOREVER }], { signal: controller.signal }),
      );
      controller.abort(reason);
      await aborted;
      // The context is whole.
      await gin.run(memory, [{ ...put(rank, 0, 64, 8), signal: 0, counter: 0 }, { op: 'flush' }, waitSignal(0, 1)]);
      await rank.meet();
      const closed = assert.rejects(gin.run(memory, [{ op: 'waitSignal', signal: 0, value: FOREVER }]));
      await gin.close();
      await closed;
      await refused('EP_CLOSED', () => gin.run(memory, []));
      await rank.meet();
    },
  },
];
