/** Fetching atomics of JS: every old value is seen by one, and by one only. */
import assert from 'node:assert/strict';
import type { Endpoint, Need, RemoteRegion, SymmetricMemory, Work } from '@ep/core';
import type { CaseRank, TransportCase } from './case.js';
import { checkBytes, refused } from './expect.js';

/** To one peer, where the transport says that it offers atomics. */
function atomicsOf(endpoint: Endpoint<Need>): {
  readonly fetchAdd: (to: RemoteRegion, add: bigint) => Work<bigint>;
  readonly compareSwap: (to: RemoteRegion, compare: bigint, swap: bigint) => Work<bigint>;
} {
  const { fetchAdd, compareSwap } = endpoint;
  assert.ok(fetchAdd !== undefined && compareSwap !== undefined, 'atomics are offered, and the endpoint has none');
  return { fetchAdd, compareSwap };
}

async function openWords(rank: CaseRank): Promise<{
  readonly memory: SymmetricMemory;
  readonly to: readonly ReturnType<typeof atomicsOf>[];
  readonly endpoints: readonly Endpoint<Need>[];
}> {
  const transport = await rank.open();
  const memory = await transport.allocate({ byteLength: 256, signalSlots: 1 });
  const endpoints: Endpoint<Need>[] = [];
  for (let peer = 0; peer < rank.worldSize; peer++) endpoints.push(await transport.connect(peer));
  return { memory, endpoints, to: endpoints.map(atomicsOf) };
}

const sorted = (values: readonly bigint[]): readonly bigint[] => [...values].sort((a, b) => (a < b ? -1 : 1));

export const atomicCases: readonly TransportCase[] = [
  {
    id: 'atomics/fetch-add',
    sentence:
      'of additions by all ranks to one word of each, their own too, every old value is seen once, and none is lost',
    needs: ['atomics'],
    async body(rank) {
      const { memory, to } = await openWords(rank);
      const { worldSize } = rank;
      const each = 60;
      const adds = Array.from({ length: each }, () =>
        to.map(({ fetchAdd }, peer) => fetchAdd(memory.remote(peer, 64, 8), 1n)),
      ).flat();
      const seen = await Promise.all(adds);
      const texts = await rank.share(seen.map(String));
      const ofOwnWord = texts.flatMap((all) => all.filter((_, index) => index % worldSize === rank.rank).map(BigInt));
      const expected = Array.from({ length: each * worldSize }, (_, index) => BigInt(index));
      assert.deepEqual(sorted(ofOwnWord), expected);
      assert.equal(memory.view('u64', 64, 1)[0], BigInt(each * worldSize));
      checkBytes(memory, 0, 64, 0, 'before the word');
      checkBytes(memory, 72, 184, 0, 'after the word');
      await rank.meet();
    },
  },
  {
    id: 'atomics/wraps',
    sentence: 'additions are modulo 2^64, and negative ones subtract',
    needs: ['atomics'],
    async body(rank) {
      const { memory, to } = await openWords(rank);
      memory.view('u64', 8, 1)[0] = 2n ** 64n - 1n;
      await rank.meet();
      const word = memory.remote(rank.next, 8, 8);
      const { fetchAdd } = to[rank.next]!;
      assert.equal(await fetchAdd(word, 2n), 2n ** 64n - 1n);
      assert.equal(await fetchAdd(word, -3n), 1n);
      assert.equal(await fetchAdd(word, 0n), 2n ** 64n - 2n);
      await rank.meet();
      assert.equal(memory.view('u64', 8, 1)[0], 2n ** 64n - 2n);
      await rank.meet();
    },
  },
  {
    id: 'atomics/compare-swap',
    sentence:
      'a swap happens where the word is as compared, and tells what it was either way; of all ranks at once one succeeds',
    needs: ['atomics'],
    async body(rank) {
      const { memory, to } = await openWords(rank);
      const first = 0x0102_0304_0506_0708n;
      memory.view('u64', 248, 1)[0] = first;
      await rank.meet();
      const word = memory.remote(rank.next, 248, 8);
      const { compareSwap } = to[rank.next]!;
      assert.equal(await compareSwap(word, first + 1n, 7n), first);
      assert.equal(await compareSwap(word, first, -1n), first);
      assert.equal(await compareSwap(word, first, 9n), 2n ** 64n - 1n);
      await rank.meet();
      assert.equal(memory.view('u64', 248, 1)[0], 2n ** 64n - 1n);
      for (let round = 0; round < 10; round++) {
        const mine = BigInt(1000 * round + rank.rank + 1);
        const old = await to[0]!.compareSwap(memory.remote(0, 16 + 8 * round, 8), 0n, mine);
        const all = (await rank.share(String(old))).map(BigInt);
        const winners = all.flatMap((value, one) => (value === 0n ? [one] : []));
        assert.equal(winners.length, 1, `round ${round}: ranks ${winners} found 0`);
        const stored = BigInt(1000 * round + winners[0]! + 1);
        for (const [one, value] of all.entries()) assert.equal(value, one === winners[0] ? 0n : stored);
      }
      await rank.meet();
    },
  },
  {
    id: 'atomics/lock',
    sentence: 'a lock of swaps keeps ranks apart: what is read and written under it loses nothing',
    needs: ['atomics', 'get'],
    async body(rank) {
      const { memory, endpoints, to } = await openWords(rank);
      const [home, { compareSwap }] = [endpoints[0]!, to[0]!];
      const [lock, counter] = [memory.remote(0, 0, 8), memory.remote(0, 128, 8)];
      const own = BigInt(rank.rank + 1);
      const turns = 15;
      for (let turn = 0; turn < turns; turn++) {
        while ((await compareSwap(lock, 0n, own)) !== 0n) await new Promise((resolve) => setImmediate(resolve));
        await home.get(counter, memory.local(192, 8));
        await home.putValue(counter, memory.view('u64', 192, 1)[0]! + 1n);
        await home.flush();
        assert.equal(await compareSwap(lock, own, 0n), own);
      }
      await rank.meet();
      if (rank.rank === 0) assert.equal(memory.view('u64', 128, 1)[0], BigInt(turns * rank.worldSize));
      await rank.meet();
    },
  },
  {
    id: 'atomics/refuses',
    sentence: 'what is no word of 8 bytes at a multiple of 8 of that peer is refused, and nothing has changed',
    needs: ['atomics'],
    async body(rank) {
      const { memory, to } = await openWords(rank);
      const { fetchAdd, compareSwap } = to[rank.next]!;
      for (const [offset, length] of [
        [4, 8],
        [0, 4],
        [0, 16],
        [8, 0],
      ] as const) {
        const region = memory.remote(rank.next, offset, length);
        const error = await refused('EP_INVALID_ARGUMENT', () => fetchAdd(region, 1n));
        assert.match(error.message, /8 bytes at a multiple of 8/);
        await refused('EP_INVALID_ARGUMENT', () => compareSwap(region, 0n, 1n));
      }
      const other = memory.remote(rank.rank, 0, 8);
      await refused('EP_INVALID_ARGUMENT', () => fetchAdd(other, 1n));
      await refused('EP_INVALID_ARGUMENT', () => compareSwap(other, 0n, 1n));
      assert.equal(await fetchAdd(memory.remote(rank.next, 0, 8), 0n), 0n);
      await rank.meet();
      checkBytes(memory, 0, 256, 0, 'after what was refused');
      await rank.meet();
    },
  },
];
