import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { formatVerdict, parseVerdict } from '../src/exchange.js';
import {
  barrier,
  CloseScope,
  compareFacts,
  configurationDigest,
  exchange,
  isEpError,
  listen,
  memoryStore,
  openFileStore,
  prefixStore,
  rendezvous,
  type Store,
} from '../src/index.js';

const range = (n: number): readonly number[] => Array.from({ length: n }, (_, i) => i);
const facts = (abi: string | number = '7') => ({ agree: { abi, core: '1.0.0' }, host: { host: 'node', pid: 1 } });
const settle = <T>(runs: readonly Promise<T>[]) =>
  Promise.all(
    runs.map((run) =>
      run.then(
        (value) => ({ value }),
        (error) => ({ error }),
      ),
    ),
  ) as Promise<readonly { value?: T; error?: { code: string; message: string; context: Record<string, unknown> } }[]>;

/** Counts the calls of a store; every call is one round trip on a store behind a wire. */
function counted(store: Store): { store: Store; calls: () => number } {
  let calls = 0;
  const proxy = new Proxy(store, {
    get(target, name) {
      const member = Reflect.get(target, name, target);
      if (typeof member !== 'function') return member;
      return (...args: unknown[]) => {
        calls++;
        return Reflect.apply(member, target, args);
      };
    },
  });
  return { store: proxy, calls: () => calls };
}

describe('exchange', () => {
  it.each([1, 2, 3, 7])('gives every one of %i ranks all bytes, by rank', async (worldSize) => {
    await using store = memoryStore();
    const results = await Promise.all(
      range(worldSize).map((rank) =>
        exchange(store, { key: 'x', rank, worldSize, bytes: new Uint8Array(rank).fill(rank) }),
      ),
    );
    for (const parts of results)
      expect(parts.map((part) => [...part])).toEqual(range(worldSize).map((r) => range(r).map(() => r)));
  });

  it('takes 2 round trips on each rank, and one more for each rank on rank 0, at 128 ranks', async () => {
    await using store = memoryStore();
    const counters = range(128).map(() => counted(store));
    await Promise.all(
      counters.map(({ store }, rank) =>
        exchange(store, { key: 'x', rank, worldSize: 128, bytes: Uint8Array.of(rank) }),
      ),
    );
    // The claim, the wait, the verdict that did not come, the verdict.
    expect(counters[0]!.calls()).toBe(128 + 4);
    expect(counters.slice(1).every(({ calls }) => calls() === 2)).toBe(true);
  });

  it('works at 128 ranks on a file', async () => {
    await using scope = new CloseScope();
    const directory = mkdtempSync(join(tmpdir(), 'ep-meet-'));
    scope.defer(() => rmSync(directory, { recursive: true }));
    const stores = await Promise.all(range(128).map(() => openFileStore(join(directory, 'store'))));
    for (const store of stores) scope.add(store);
    const results = await Promise.all(
      stores.map((store, rank) => exchange(store, { key: 'x', rank, worldSize: 128, bytes: Uint8Array.of(rank) })),
    );
    for (const parts of results) expect(parts.map((part) => part[0])).toEqual(range(128));
  });

  it('names the missing ranks on every rank, at the first deadline', async () => {
    await using store = memoryStore();
    const present = [0, 2, 3];
    const begin = performance.now();
    const results = await settle(
      present.map((rank) =>
        exchange(
          store,
          { key: 'x', rank, worldSize: 6, bytes: new Uint8Array(1) },
          { timeoutMs: rank === 3 ? 30 : 20_000 },
        ),
      ),
    );
    expect(performance.now() - begin).toBeLessThan(10_000);
    for (const { error } of results) {
      expect(error).toMatchObject({
        code: 'EP_TIMEOUT',
        message: 'exchange: ranks 1, 4-5 of 6 did not come within the 30 ms of rank 3',
        context: { ranks: [1, 4, 5], worldSize: 6, gaveUp: 3 },
      });
    }
  });

  it('names rank 0 if it is rank 0 that is missing, and says so if it came but published nothing', async () => {
    await using store = memoryStore();
    const absent = exchange(store, { key: 'a', rank: 1, worldSize: 2, bytes: new Uint8Array(1) }, { timeoutMs: 10 });
    await expect(absent).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      context: { ranks: [0] },
      message: /rank 0 of 2 did not come/,
    });
    await store.set('b/0', new Uint8Array(9));
    const stuck = exchange(store, { key: 'b', rank: 1, worldSize: 2, bytes: new Uint8Array(1) }, { timeoutMs: 10 });
    await expect(stuck).rejects.toMatchObject({ context: { ranks: [0] }, message: /rank 0 did not publish/ });
  });

  it('rejects an aborted rank with its reason and tells the others who left', async () => {
    for (const leaver of [0, 1]) {
      await using store = memoryStore();
      const controller = new AbortController();
      const runs = settle(
        range(2).map((rank) =>
          exchange(
            store,
            { key: 'x', rank, worldSize: 3, bytes: new Uint8Array(1) },
            { timeoutMs: 20_000, ...(rank === leaver && { signal: controller.signal }) },
          ),
        ),
      );
      setTimeout(() => controller.abort('enough'), 5);
      const results = await runs;
      expect(results[leaver]?.error).toBe('enough');
      expect(results[1 - leaver]?.error).toMatchObject({
        code: 'EP_TIMEOUT',
        message: `exchange: rank ${leaver} was aborted while it waited for the others`,
      });
    }
    await using store = memoryStore();
    const meeting = { key: 'x', rank: 0, worldSize: 2, bytes: new Uint8Array(1) };
    await expect(exchange(store, meeting, { signal: AbortSignal.abort('before') })).rejects.toBe('before');
    expect(await store.numKeys()).toBe(0);
  });

  it('finds two that claim one rank, whether the second comes before or after the others met', async () => {
    await using store = memoryStore();
    const run = (rank: number) => exchange(store, { key: 'x', rank, worldSize: 3, bytes: new Uint8Array(1) });
    const results = await settle([run(0), run(1), run(1)]);
    for (const { error } of results) {
      expect(error).toMatchObject({
        code: 'EP_MISMATCH',
        context: { ranks: [1] },
        message: /rank 1 was claimed twice: two processes/,
      });
    }
    await using other = memoryStore();
    const late = (rank: number) => exchange(other, { key: 'x', rank, worldSize: 2, bytes: new Uint8Array(1) });
    await Promise.all([late(0), late(1)]);
    await expect(late(1)).rejects.toMatchObject({ code: 'EP_MISMATCH' });
    await expect(late(0)).rejects.toMatchObject({ code: 'EP_MISMATCH' });
  });

  it('finds ranks that believe in another world size', async () => {
    await using store = memoryStore();
    const run = (rank: number, worldSize: number) =>
      exchange(store, { key: 'x', rank, worldSize, bytes: new Uint8Array(1) }, { timeoutMs: 50 });
    const results = await settle([run(0, 2), run(1, 2), run(2, 3)]);
    expect(results[2]?.error).toMatchObject({
      code: 'EP_MISMATCH',
      message: 'exchange: rank 0 collected 2 ranks, rank 2 expects 3',
    });
    await expect(run(3, 3)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    await expect(run(-1, 3)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  });

  it('leaves nothing waiting behind', async () => {
    const timers = () => process.getActiveResourcesInfo().filter((name) => name === 'Timeout').length;
    const store = memoryStore();
    const before = timers();
    await Promise.all(
      range(3).map((rank) => exchange(store, { key: 'x', rank, worldSize: 3, bytes: new Uint8Array(1) })),
    );
    await new Promise((resolve) => setImmediate(resolve));
    expect(timers()).toBe(before);
    await store.close();
  });
});

describe('verdicts', () => {
  it('round-trip, and no bytes crash the parser', () => {
    fc.assert(
      fc.property(fc.array(fc.uint8Array({ maxLength: 20 }), { maxLength: 10 }), (parts) => {
        expect(parseVerdict(formatVerdict({ parts }))).toEqual({ parts });
      }),
    );
    const failure = { code: 'EP_TIMEOUT', message: 'm', context: { ranks: [1] } } as const;
    expect(parseVerdict(formatVerdict(failure))).toEqual(failure);
    const refuses = (bytes: Uint8Array) => {
      try {
        parseVerdict(bytes);
      } catch (error) {
        if (!isEpError(error)) throw error;
      }
    };
    fc.assert(fc.property(fc.uint8Array(), refuses), { numRuns: 3000 });
    fc.assert(
      fc.property(fc.constantFrom(1, 2), fc.uint8Array({ maxLength: 30 }), (kind, rest) =>
        refuses(Uint8Array.of(kind, ...rest)),
      ),
      { numRuns: 3000 },
    );
    const text = fc.oneof(fc.json(), fc.constant('{"code":"EP_NO","message":"m","context":{}}'));
    fc.assert(
      fc.property(text, (json) => refuses(Buffer.from(`\u0002${json}`))),
      { numRuns: 500 },
    );
    const whole = formatVerdict({ parts: [Uint8Array.of(1, 2), Uint8Array.of(3)] });
    for (let cut = 0; cut < whole.length; cut++) {
      expect(() => parseVerdict(whole.subarray(0, cut))).toThrow(expect.objectContaining({ code: 'EP_RENDEZVOUS' }));
    }
    expect(() => parseVerdict(Buffer.concat([whole, Uint8Array.of(0)]))).toThrow(/another version/);
  });
});

describe('barrier', () => {
  it('lets nobody through before all are there', async () => {
    await using store = memoryStore();
    let through = 0;
    const early = range(3).map((rank) => barrier(store, { key: 'b', rank, worldSize: 4 }).then(() => through++));
    await new Promise((resolve) => setTimeout(resolve, 20));
    expect(through).toBe(0);
    await barrier(store, { key: 'b', rank: 3, worldSize: 4 });
    await Promise.all(early);
    expect(through).toBe(3);
  });

  it('names who is missing', async () => {
    await using store = memoryStore();
    await expect(barrier(store, { key: 'b', rank: 0, worldSize: 3 }, { timeoutMs: 5 })).rejects.toMatchObject({
      code: 'EP_TIMEOUT',
      message: 'barrier: ranks 1-2 of 3 did not come within the 5 ms of rank 0',
    });
  });
});

describe('rendezvous', () => {
  it('shows every rank what the others are', async () => {
    await using store = memoryStore();
    const seen: unknown[] = [];
    const stop = listen('ep:rendezvous', (message) => seen.push(message));
    const results = await Promise.all(
      range(3).map((rank) => rendezvous(store, { rank, worldSize: 3, facts: { agree: { abi: 7 } } })),
    );
    stop();
    expect(new Set(results.map((peers) => JSON.stringify(peers))).size).toBe(1);
    expect(results[1]?.[2]).toMatchObject({
      rank: 2,
      agree: { abi: 7, 'world size': 3 },
      host: { pid: process.pid, node: process.version },
    });
    expect(seen).toHaveLength(3);
    expect(seen[0]).toMatchObject({ worldSize: 3, durationMs: expect.any(Number) });
  });

  it('names the odd rank and the field on all ranks', async () => {
    await using store = memoryStore();
    const results = await settle(
      range(5).map((rank) => rendezvous(store, { rank, worldSize: 5, facts: facts(rank === 3 ? '8' : '7') })),
    );
    for (const { error } of results) {
      expect(error).toMatchObject({
        code: 'EP_RENDEZVOUS',
        message: 'rendezvous: rank 3 of 5 differ: abi is "8" on rank 3, "7" on the other 4',
        context: {
          ranks: [3],
          fields: {
            abi: [
              { value: '7', ranks: [0, 1, 2, 4] },
              { value: '8', ranks: [3] },
            ],
          },
        },
      });
    }
  });

  it('names all camps where there is no majority, every field, and fields that a rank lacks', () => {
    const peer = (rank: number, agree: Record<string, string | number | boolean>) => ({ rank, agree, host: {} });
    expect(() => compareFacts([peer(0, { abi: 7 }), peer(1, { abi: '7' })])).toThrow(
      'rendezvous: ranks 0-1 of 2 differ: abi is 7 on rank 0, "7" on rank 1',
    );
    expect(() => compareFacts([peer(0, { a: 1, b: true }), peer(1, { a: 1, b: true }), peer(2, { a: 2 })])).toThrow(
      'rendezvous: rank 2 of 3 differ: a is 2 on rank 2, 1 on the other 2; b is nothing on rank 2, true on the other 2',
    );
    compareFacts([peer(0, { a: 1 }), peer(1, { a: 1 })]);
    compareFacts([]);
  });

  it.each([
    [[2, 4, 4, 4], [0]],
    [[4, 2, 4, 4], [1]],
    [[4, 4, 4, 3], [3]],
  ])('finds who believes in another world size: %j', async (sizes, odd) => {
    await using store = memoryStore();
    const results = await settle(
      sizes.map((worldSize, rank) =>
        rendezvous(store, { rank: Math.min(rank, worldSize - 1), worldSize, facts: facts() }, { timeoutMs: 100 }),
      ),
    );
    for (const { error } of results) expect(error?.code).toBe('EP_RENDEZVOUS');
    if (odd[0] === 1)
      for (const { error } of results) expect(error?.message).toMatch(/world size is 2 on rank 1, 4 on the other 3/);
  });

  it('tells a rank beyond those that the others believe in', async () => {
    await using store = memoryStore();
    const run = (rank: number, worldSize: number) => rendezvous(store, { rank, worldSize, facts: facts() });
    const results = await settle([run(0, 2), run(1, 2), run(2, 3)]);
    expect(results.map(({ error }) => error?.message)).toEqual([
      undefined,
      undefined,
      'rendezvous: rank 2 of 3 differ: world size is 3 on rank 2, 2 on the other 2',
    ]);
  });

  it('says which two processes claim one rank', async () => {
    await using store = memoryStore();
    const run = (rank: number, pid: number) =>
      rendezvous(
        store,
        { rank, worldSize: 3, facts: { agree: {}, host: { host: 'here', pid } } },
        { timeoutMs: 20_000 },
      );
    const results = await settle([run(0, 10), run(2, 11), run(2, 12)]);
    for (const { error } of results) {
      expect(error).toMatchObject({
        code: 'EP_RENDEZVOUS',
        message: expect.stringMatching(
          /^rendezvous: rank 2 was claimed twice by process 11 on here and by process 12 on here/,
        ),
      });
    }
  });

  it('names missing ranks, and can be repeated under another key', async () => {
    await using store = memoryStore();
    const run = (key: string, ranks: readonly number[]) =>
      settle(ranks.map((rank) => rendezvous(store, { rank, worldSize: 3, facts: facts(), key }, { timeoutMs: 20 })));
    for (const { error } of await run('first', [0, 2])) {
      expect(error).toMatchObject({ code: 'EP_RENDEZVOUS', context: { ranks: [1] } });
    }
    expect((await run('second', [0, 1, 2])).every(({ value }) => value?.length === 3)).toBe(true);
    await using part = prefixStore(store, 'third');
    await expect(rendezvous(part, { rank: 0, worldSize: 1, facts: facts() })).resolves.toHaveLength(1);
  });

  it('names a rank that speaks another version, and refuses facts that are none', async () => {
    await using store = memoryStore();
    const stranger = exchange(store, { key: 'rendezvous', rank: 1, worldSize: 2, bytes: Buffer.from('[]') });
    const results = await settle<unknown>([rendezvous(store, { rank: 0, worldSize: 2, facts: facts() }), stranger]);
    expect(results[0]?.error).toMatchObject({
      code: 'EP_RENDEZVOUS',
      message: /rank 1 published facts in the form of another version/,
    });
    await expect(
      rendezvous(store, { rank: 0, worldSize: 1, facts: { agree: { abi: {} as never } }, key: 'k' }),
    ).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  });

  it('works at 128 ranks', async () => {
    await using store = memoryStore();
    const results = await settle(
      range(128).map((rank) => rendezvous(store, { rank, worldSize: 128, facts: facts(rank === 77 ? 'odd' : 'even') })),
    );
    expect(new Set(results.map(({ error }) => error?.message))).toEqual(
      new Set(['rendezvous: rank 77 of 128 differ: abi is "odd" on rank 77, "even" on the other 127']),
    );
  });
});

describe('configurationDigest', () => {
  it('depends on content only', () => {
    const digest = configurationDigest({ a: 1, b: [true, null, 'x'], c: { d: 5n } });
    expect(digest).toMatch(/^[0-9a-f]{16}$/);
    expect(configurationDigest({ c: { d: 5n }, b: [true, null, 'x'], a: 1, e: undefined })).toBe(digest);
    expect(configurationDigest({ a: 1, b: [true, null, 'x'], c: { d: 5 } })).not.toBe(digest);
    expect(configurationDigest({ a: '1' })).not.toBe(configurationDigest({ a: 1 }));
    expect(() => configurationDigest({ f: () => 1 })).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
  });
});
