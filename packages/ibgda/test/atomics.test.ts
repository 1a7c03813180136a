/** Fetch-add and compare-and-swap of JS: every old value is seen by one, and by one only. */
import { type Need, offers, type Transport } from '@ep/core';
import { afterEach, expect, test } from 'vitest';
import { decodeWqe } from '../src/index.js';
import { openPair, openSides, type Pair } from './pair.js';

let pair: Pair | undefined;
afterEach(async () => {
  await pair?.close();
  pair = undefined;
});

test('old values of concurrent additions are all different', async () => {
  pair = await openPair({ link: 'ethernet' });
  const [a, b] = await openSides(pair);
  expect(offers(a.transport as Transport<Need>, 'atomics')).toBe(true);
  const self = await a.transport.connect(0);
  const word = a.memory.remote(0, 64, 8);
  // More at once than words of one block.
  const adds = Array.from({ length: 150 }, () => [
    b.endpoint.fetchAdd(b.memory.remote(0, 64, 8), 1n),
    self.fetchAdd(word, 1n),
  ]).flat();
  const seen = await Promise.all(adds);
  expect([...seen].sort((x, y) => Number(x - y))).toEqual(Array.from({ length: 300 }, (_, i) => BigInt(i)));
  expect(a.memory.view('u64', 64, 1)[0]).toBe(300n);
});

test('additions wrap, and negative ones subtract', async () => {
  pair = await openPair();
  const [a, b] = await openSides(pair);
  a.memory.view('u64', 0, 1)[0] = 2n ** 64n - 1n;
  const word = b.memory.remote(0, 0, 8);
  expect(await b.endpoint.fetchAdd(word, 2n)).toBe(2n ** 64n - 1n);
  expect(await b.endpoint.fetchAdd(word, -3n)).toBe(1n);
  expect(a.memory.view('u64', 0, 1)[0]).toBe(2n ** 64n - 2n);
});

test('what is no number of 64 bits is refused, and by the request alone', async () => {
  pair = await openPair();
  const [, b] = await openSides(pair);
  const word = b.memory.remote(0, 0, 8);
  const { endpoint } = b;
  const [one, two] = [1, 2] as unknown as [bigint, bigint];
  for (const [begin, message] of [
    [() => endpoint.compareSwap(word, one, two), /^compareSwap: compare must be a bigint, found 1/],
    [() => endpoint.compareSwap(word, 1n, 1n << 64n), /^compareSwap: swap must be at most 64 bits/],
    [() => endpoint.compareSwap(word, -(1n << 63n) - 1n, 1n), /^compareSwap: compare must be at most 64 bits/],
    [() => endpoint.compareSwap(word, 1n, 1n, { compare: 1n << 70n }), /masks\.compare must be at most 64 bits/],
    [() => endpoint.fetchAdd(word, 1n << 70n), /^fetchAdd: add must be at most 64 bits/],
  ] as const) {
    await expect(begin()).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(message),
    });
  }
  expect(await endpoint.fetchAdd(word, 0n)).toBe(0n);
});

test('a swap happens where the word is as compared, and tells its old value either way', async () => {
  pair = await openPair();
  const [a, b] = await openSides(pair);
  a.memory.view('u64', 8, 1)[0] = 0x0102_0304_0506_0708n;
  const word = b.memory.remote(0, 8, 8);
  expect(await b.endpoint.compareSwap(word, 7n, 1n)).toBe(0x0102_0304_0506_0708n);
  expect(a.memory.view('u64', 8, 1)[0]).toBe(0x0102_0304_0506_0708n);
  expect(await b.endpoint.compareSwap(word, 0x0102_0304_0506_0708n, -1n)).toBe(0x0102_0304_0506_0708n);
  expect(a.memory.view('u64', 8, 1)[0]).toBe(2n ** 64n - 1n);
});

test('of some bits, only those are compared, and only those stored', async () => {
  pair = await openPair({ depth: 8, traceEvents: 1000 });
  const [a, b] = await openSides(pair);
  a.memory.view('u64', 8, 1)[0] = 0x0102_0304_0506_0708n;
  const word = b.memory.remote(0, 8, 8);
  const low = { compare: 0xffn, swap: 0xff00n };
  expect(await b.endpoint.compareSwap(word, 0x09n, 0xffffn, low)).toBe(0x0102_0304_0506_0708n);
  expect(a.memory.view('u64', 8, 1)[0]).toBe(0x0102_0304_0506_0708n);
  expect(await b.endpoint.compareSwap(word, 0x7708n, 0xaabbn, low)).toBe(0x0102_0304_0506_0708n);
  expect(a.memory.view('u64', 8, 1)[0]).toBe(0x0102_0304_0506_aa08n);
  expect(await b.endpoint.compareSwap(word, 0n, 5n, { compare: 0n })).toBe(0x0102_0304_0506_aa08n);
  expect(a.memory.view('u64', 8, 1)[0]).toBe(5n);
  // One behind the other and between others, around the ring many times: each swap takes three of its eight places.
  a.memory.view('u64', 8, 1)[0] = 0n;
  const step = (i: number, shift: bigint) => {
    const bits = 0xffn << shift;
    return b.endpoint.compareSwap(word, BigInt(i) << shift, BigInt(i + 1) << shift, { compare: bits, swap: bits });
  };
  const works = Array.from({ length: 60 }, (_, i) => [
    step(i, 8n),
    step(i, 16n),
    ...(i % 3 === 0 ? [b.endpoint.fetchAdd(word, 1n)] : []),
  ]).flat();
  await Promise.all(works);
  expect(a.memory.view('u64', 8, 1)[0]).toBe((60n << 16n) + (60n << 8n) + 20n);
  expect(pair.transports.flatMap((one) => one.violations())).toEqual([]);
  const swaps = b.transport
    .trace()
    .split('\n')
    .filter((line) => line.includes('MASKED_CS'))
    .map((line) => decodeWqe(Buffer.from(JSON.parse(line).wqe, 'hex')));
  expect(swaps.length).toBe(123);
  for (const { wqe, violations } of swaps) expect([wqe?.op, violations]).toEqual(['masked-compare-swap', []]);
});

test('a ring too short for it is told, and the connection stays', async () => {
  pair = await openPair({ depth: 4 });
  const [, b] = await openSides(pair);
  const word = b.memory.remote(0, 8, 8);
  expect(b.transport.port.maskedSwap).toBe(false);
  await expect(b.endpoint.compareSwap(word, 0n, 1n, {})).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
  expect(await b.endpoint.compareSwap(word, 0n, 1n)).toBe(0n);
});

test('a lock by compare-and-swap keeps two ranks apart', async () => {
  pair = await openPair();
  const sides = await openSides(pair);
  let inside = 0;
  const work = async (rank: 0 | 1): Promise<void> => {
    const { transport, memory } = sides[rank];
    const home = await transport.connect(0);
    const lock = memory.remote(0, 0, 8);
    for (let turn = 0; turn < 25; turn++) {
      while ((await home.compareSwap(lock, 0n, BigInt(rank + 1))) !== 0n) await new Promise(setImmediate);
      expect(++inside).toBe(1);
      await new Promise(setImmediate);
      inside--;
      expect(await home.compareSwap(lock, BigInt(rank + 1), 0n)).toBe(BigInt(rank + 1));
    }
  };
  await Promise.all([work(0), work(1)]);
});

test('a word that is none is refused, and nothing else is', async () => {
  pair = await openPair();
  const [, b] = await openSides(pair);
  const at = (offset: number, length: number) => b.memory.remote(0, offset, length);
  for (const [offset, length] of [
    [4, 8],
    [0, 4],
    [0, 16],
  ] as const) {
    await expect(b.endpoint.fetchAdd(at(offset, length), 1n)).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringContaining('8 bytes at a multiple of 8'),
    });
  }
  await expect(b.endpoint.compareSwap(b.memory.remote(1, 0, 8), 0n, 1n)).rejects.toMatchObject({
    code: 'EP_INVALID_ARGUMENT',
  });
  expect(await b.endpoint.fetchAdd(at(0, 8), 1n)).toBe(0n);
});

test('what the peer refuses rejects, and says so', async () => {
  pair = await openPair([{}, {}]);
  const [a, b] = await openSides(pair);
  const word = b.memory.remote(0, 0, 8);
  await a.memory.close();
  await expect(b.endpoint.fetchAdd(word, 1n)).rejects.toMatchObject({ code: 'EP_REMOTE_ACCESS' });
});
