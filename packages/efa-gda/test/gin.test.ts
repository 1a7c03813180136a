/** Contexts of the GIN device API over a transport's memory, as JS makes them. What kernels do in them is tested in native/tests/efa and in e2e/gin-putvalue. */
import type { GinCall } from '@ep/native';
import { efaMemoryLayout, readEfaMemory } from '@ep/native/abi';
import { afterEach, describe, expect, it } from 'vitest';
import { openPair, openSides, type Pair } from './pair.js';

let pair: Pair | undefined;
afterEach(async () => {
  await pair?.close();
  pair = undefined;
});

describe('a context', () => {
  it('carries the test of values, and counts what has arrived', { timeout: 60_000 }, async () => {
    pair = await openPair([{ seed: 5 }, { seed: 6 }]);
    const sides = await openSides(pair);
    const gins = await Promise.all(pair.transports.map((one) => one.openGin({ signals: 2, counters: 1 })));
    const outcomes = await Promise.all(sides.map(({ memory }, i) => gins[i]!.testValues(memory, 200)));
    expect(outcomes[0]!.behind).toBe(0);
    for (const gin of gins) expect([gin.readSignal(0), gin.readSignal(1), gin.readCounter(0)]).toEqual([200n, 0n, 0n]);
    const words = [...sides[1].memory.view('u64', 0, 10)].map((word) => [word >> 32n, word & 0xffffffffn]);
    const sentinels = Array.from({ length: 8 }, (_, i) => 0x44440000n + BigInt(i));
    expect(words).toEqual([0x42424242n, 0x43434343n, ...sentinels].map((value) => [200n, value]));
    // The memory's own signals are others.
    for (const { memory } of sides) expect(memory.signals.peek(0)).toBe(0n);
    expect(pair.transports.map((one) => one.violations())).toEqual([[], []]);
  });

  it('gives kernels a handle of a memory that names it', async () => {
    pair = await openPair();
    const [side] = await openSides(pair, 512);
    const [gin, other] = await Promise.all(pair.transports.map((one) => one.openGin({ signals: 0, counters: 3 })));
    const { kind, bytes } = gin!.device(side.memory);
    expect([kind, bytes.byteLength]).toEqual(['gin:efa', efaMemoryLayout.byteLength]);
    const view = (of: Uint8Array) => readEfaMemory(new DataView(of.buffer, of.byteOffset));
    const found = view(bytes);
    expect([found.byteLength, found.targets]).toEqual([512n, 0n]);
    const again = await Promise.all(pair.transports.map((one) => one.openGin({ signals: 0, counters: 0 })));
    expect(view(again[0]!.device(side.memory).bytes)).toEqual({
      ...found,
      device: expect.not.toSatisfy((x) => x === found.device),
    });
    expect(() => other!.device(side.memory)).toThrow('device: the memory belongs to another transport');
  });

  it('takes counters of the device and gives them back, and is refused on both ranks where one has too few', async () => {
    pair = await openPair([{ maxCounters: 20 }, { maxCounters: 12 }]);
    const [a, b] = pair.transports;
    const refused = await Promise.allSettled([a, b].map((one) => one.openGin({ signals: 9, counters: 4 })));
    expect(refused.map((one) => (one as PromiseRejectedResult).reason)).toEqual([
      expect.objectContaining({ code: 'EP_CAPACITY', message: 'openGin: rank 1 could not make a context' }),
      expect.objectContaining({
        code: 'EP_CAPACITY',
        message: '9 signals and 4 counters need as many completion counters, and efa_soft0 has 12 left',
      }),
    ]);
    for (let time = 0; time < 3; time++) {
      const gins = await Promise.all([a, b].map((one) => one.openGin({ signals: 8, counters: 4 })));
      await expect(a.allocate({ byteLength: 8, signalSlots: 9 })).rejects.toMatchObject({ code: 'EP_CAPACITY' });
      await Promise.all(gins.map((gin) => gin.close()));
    }
  });

  it('is the same on all ranks', async () => {
    pair = await openPair();
    const odd = await Promise.allSettled(
      pair.transports.map((one, rank) => one.openGin({ signals: rank, counters: 0 })),
    );
    for (const one of odd) expect((one as PromiseRejectedResult).reason).toMatchObject({ code: 'EP_MISMATCH' });
    expect(String((odd[0] as PromiseRejectedResult).reason)).toContain('1 signals and 0 counters');
  });

  it('refuses ids that it has not, numbers that are none, and use after close()', async () => {
    pair = await openPair();
    const sides = await openSides(pair);
    const gins = await Promise.all(pair.transports.map((one) => one.openGin({ signals: 1, counters: 0 })));
    const gin = gins[0]!;
    expect(() => gin.readSignal(1)).toThrow('signal must be');
    expect(() => gin.readCounter(0)).toThrow('counter must be');
    for (const signals of [-1, 1.5, 1025]) {
      await expect(pair.transports[0].openGin({ signals, counters: 0 })).rejects.toThrow('openGin: signals must be');
    }
    await expect(pair.transports[0].openGin(null as never)).rejects.toThrow('openGin: options must be an object');
    await expect(gin.testValues(sides[0].memory, 0)).rejects.toThrow('rounds 0 is not in');
    await expect(gin.testValues(sides[0].memory, 1, { timeoutMs: 20 })).rejects.toMatchObject({ code: 'EP_TIMEOUT' });
    await gin.close();
    expect(() => gin.readSignal(0)).toThrow('readSignal was called after close()');
    await expect(gin.testValues(sides[0].memory, 1)).rejects.toMatchObject({ code: 'EP_CLOSED' });
  });

  it.each<[message: string, call: GinCall]>([
    ['peer must be an integer from 0 to 1, found 2', { op: 'put', peer: 2, from: 0, to: 0, bytes: 8 }],
    ['peer must be an integer from 0 to 1, found -1', { op: 'signal', peer: -1, signal: 0 }],
    ['signal must be an integer from 0 to 1, found 2', { op: 'signal', peer: 1, signal: 2 }],
    ['counter must be an integer from 0 to 0, found 1', { op: 'put', peer: 1, from: 0, to: 0, bytes: 8, counter: 1 }],
    ['signal must be an integer from 0 to 1, found 7', { op: 'waitSignal', signal: 7, value: 1n }],
    ['counter must be an integer from 0 to 0, found 3', { op: 'readCounter', counter: 3 }],
    ['signal must be an integer from 0 to 1, found 2', { op: 'resetSignal', signal: 2 }],
    ['bytes must be an integer from 0 to 4096, found 4097', { op: 'put', peer: 1, from: 0, to: 0, bytes: 4097 }],
    ['to must be an integer from 0 to 4088, found 4090', { op: 'put', peer: 1, from: 0, to: 4090, bytes: 8 }],
    ['from must be an integer from 0 to 4088, found 4089', { op: 'get', peer: 1, from: 4089, to: 0, bytes: 8 }],
    ['to must be an integer from 0 to 4088, found 4090', { op: 'putValue', peer: 1, to: 4090, bytes: 8, value: 1n }],
    ['bytes must be 1, 2, 4, 8, found 3', { op: 'putValue', peer: 1, to: 0, bytes: 3 as 4, value: 1n }],
  ])('names what it refuses of a call, as it was given: %s', async (message, call) => {
    pair = await openPair();
    const sides = await openSides(pair);
    const gins = await Promise.all(pair.transports.map((one) => one.openGin({ signals: 2, counters: 1 })));
    const calls: readonly GinCall[] = [{ op: 'flush' }, call];
    await expect(gins[0]!.run(sides[0].memory, calls)).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: `run: call 1 (${call.op}): ${message}`,
    });
  });

  it('goes with its transport, also under a test that waits', async () => {
    pair = await openPair();
    const sides = await openSides(pair);
    const gins = await Promise.all(pair.transports.map((one) => one.openGin({ signals: 1, counters: 1 })));
    const waiting = gins[1]!.testValues(sides[1].memory, 1);
    waiting.catch(() => {});
    await pair.transports[1].close();
    await expect(waiting).rejects.toMatchObject({ code: 'EP_ABORTED' });
    expect(gins[1]!.closed).toBe(true);
  });
});
