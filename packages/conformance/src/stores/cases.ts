/** One body per promise of `Store`, for every store. `open` gives another handle on the same keys, as another rank would have it. */

import type { Store } from '@ep/core';
import { expect } from 'vitest';

export interface StoreCase {
  readonly id: string;
  readonly sentence: string;
  readonly body: (open: () => Promise<Store>) => Promise<void>;
}

const bytes = (text: string): Uint8Array => new TextEncoder().encode(text);
const text = (value: Uint8Array): string => new TextDecoder().decode(value);
const range = (n: number): readonly number[] => Array.from({ length: n }, (_, i) => i);

export const storeCases: readonly StoreCase[] = [
  {
    id: 'store/set-get',
    sentence: 'get on one handle returns the bytes that another handle set',
    async body(open) {
      const [a, b] = [await open(), await open()];
      await a.set('k', Uint8Array.of(0, 255, 10, 13));
      expect([...(await b.get('k'))]).toEqual([0, 255, 10, 13]);
      await b.set('k', bytes('again'));
      expect(text(await a.get('k'))).toBe('again');
    },
  },
  {
    id: 'store/empty-and-odd',
    sentence: 'values may be empty or large, keys may be any string',
    async body(open) {
      const [a, b] = [await open(), await open()];
      const large = Uint8Array.from({ length: 300_000 }, (_, i) => (i * 7) % 256);
      for (const key of ['', ' ', 'a/b', 'ä\n"\\\u0000', '😀', '__proto__', 'constructor']) {
        await a.set(key, new Uint8Array(0));
        expect((await b.get(key)).byteLength).toBe(0);
        await b.set(key, large);
        expect(Buffer.compare(await a.get(key), large)).toBe(0);
      }
      expect(await a.numKeys()).toBe(7);
    },
  },
  {
    id: 'store/copies',
    sentence: 'changing a buffer after set, or one that get returned, changes nothing in the store',
    async body(open) {
      const a = await open();
      const value = bytes('abc');
      await a.set('k', value);
      value[0] = 0;
      const first = await a.get('k');
      first[1] = 0;
      expect(text(await a.get('k'))).toBe('abc');
      const held = await a.compareSet('k', bytes('abc'), bytes('def'));
      held[0] = 0;
      expect(text(await a.get('k'))).toBe('def');
    },
  },
  {
    id: 'store/get-waits',
    sentence: 'get waits until another handle sets, adds or compare-sets the key',
    async body(open) {
      const [a, b] = [await open(), await open()];
      const waits = Promise.all([a.get('set'), a.get('add'), a.get('cas')]);
      await new Promise((resolve) => setTimeout(resolve, 20));
      await b.set('set', bytes('1'));
      await b.add('add', 2);
      await b.compareSet('cas', bytes(''), bytes('3'));
      expect((await waits).map(text)).toEqual(['1', '2', '3']);
    },
  },
  {
    id: 'store/wait-all',
    sentence: 'wait resolves when all keys have come, also if one was deleted again meanwhile; no keys are all there',
    async body(open) {
      const [a, b] = [await open(), await open()];
      await a.wait([]);
      await b.set('there', bytes('x'));
      let done = false;
      const wait = a.wait(['there', 'first', 'second', 'first']).then(() => {
        done = true;
      });
      // HAZARD: over a wire `first` could come and go before the wait begins, which then has nothing to end it.
      await a.check(['there']);
      await new Promise((resolve) => setTimeout(resolve, 20));
      await b.set('first', bytes('x'));
      await b.delete('first');
      await new Promise((resolve) => setTimeout(resolve, 20));
      expect(done).toBe(false);
      await b.set('second', bytes('x'));
      await wait;
    },
  },
  {
    id: 'store/get-of-a-passing-key',
    sentence: 'a get that was waiting returns the value with which the key came, even if it was deleted at once',
    async body(open) {
      const [a, b] = [await open(), await open()];
      // Of so many, a waiter over a wire that has to ask for the value misses one.
      const keys = Array.from({ length: 8 }, (_, i) => `k${i}`);
      const waits = Promise.all(keys.map((key) => a.get(key, { timeoutMs: 2000 })));
      waits.catch(() => {});
      await new Promise((resolve) => setTimeout(resolve, 20));
      // Not one after the other: over a wire the waiter could come between them.
      const changes = keys.flatMap((key) => [b.set(key, bytes(key)), b.delete(key)]);
      expect((await Promise.all(changes)).filter((deleted) => deleted === true).length).toBe(keys.length);
      expect((await waits).map(text)).toEqual(keys);
    },
  },
  {
    id: 'store/timeout',
    sentence: 'a wait that times out names the keys that never came, and the store stays usable',
    async body(open) {
      const a = await open();
      await a.set('there', bytes('x'));
      const error = await a.wait(['there', 'lost', 'gone'], { timeoutMs: 10 }).catch((e) => e);
      expect(error).toMatchObject({ code: 'EP_TIMEOUT', context: { timeoutMs: 10 } });
      expect(error.context.missing.length).toBe(2);
      expect(error.message).toMatch(/2 of 3 keys.*10 ms.*lost".*gone"/);
      await expect(a.get('lost', { timeoutMs: 0 })).rejects.toMatchObject({ code: 'EP_TIMEOUT' });
      expect(text(await a.get('there', { timeoutMs: 0 }))).toBe('x');
      await expect(a.get('lost', { timeoutMs: -1 })).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
    },
  },
  {
    id: 'store/abort',
    sentence: "a caller's abort rejects a wait with its reason, before and during",
    async body(open) {
      const a = await open();
      const reason = { mine: true };
      await expect(a.get('never', { signal: AbortSignal.abort(reason) })).rejects.toBe(reason);
      const controller = new AbortController();
      const wait = a.wait(['never'], { signal: controller.signal });
      setTimeout(() => controller.abort(reason), 5);
      await expect(wait).rejects.toBe(reason);
    },
  },
  {
    id: 'store/close',
    sentence:
      'close ends the waits of its handle with EP_ABORTED, later calls with EP_CLOSED, and leaves other handles alone',
    async body(open) {
      const [a, b] = [await open(), await open()];
      await a.set('k', bytes('v'));
      const wait = a.get('never').catch((e) => e);
      await a.close();
      await a.close();
      expect(await wait).toMatchObject({ code: 'EP_ABORTED' });
      const calls = [
        () => a.set('k', bytes('x')),
        () => a.get('k'),
        () => a.add('n', 1),
        () => a.compareSet('k', bytes(''), bytes('')),
        () => a.wait(['k']),
        () => a.check(['k']),
        () => a.append('k', bytes('x')),
        () => a.multiGet(['k']),
        () => a.multiSet([['k', bytes('x')]]),
        () => a.delete('k'),
        () => a.numKeys(),
      ];
      for (const call of calls) await expect(call()).rejects.toMatchObject({ code: 'EP_CLOSED' });
      expect(text(await b.get('k'))).toBe('v');
    },
  },
  {
    id: 'store/add',
    sentence: 'add is atomic over handles, counts an absent key as 0 and stores decimal text',
    async body(open) {
      const handles = await Promise.all(range(4).map(() => open()));
      const sums = await Promise.all(range(40).map((i) => handles[i % 4]!.add('n', 1)));
      expect([...sums].sort((x, y) => x - y)).toEqual(range(40).map((i) => i + 1));
      const a = handles[0]!;
      expect(await a.add('n', -45)).toBe(-5);
      expect(await a.add('n', 0)).toBe(-5);
      expect(text(await a.get('n'))).toBe('-5');
      await a.set('n', bytes('41'));
      expect(await a.add('n', 1)).toBe(42);
    },
  },
  {
    id: 'store/add-refuses',
    sentence: 'add refuses deltas, held values and sums that are not safe integers, and changes nothing',
    async body(open) {
      const a = await open();
      for (const delta of [0.5, Number.NaN, 2 ** 53, '1' as unknown as number]) {
        await expect(a.add('n', delta)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
      }
      expect(await a.numKeys()).toBe(0);
      for (const held of ['abc', '', '7x', ' 7', '9'.repeat(17)]) {
        await a.set('n', bytes(held));
        await expect(a.add('n', 1)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT', message: /"n"/ });
        expect(text(await a.get('n'))).toBe(held);
      }
      await a.set('n', bytes(String(Number.MAX_SAFE_INTEGER)));
      await expect(a.add('n', 1)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT', message: /safe integer/ });
    },
  },
  {
    id: 'store/compare-set',
    sentence:
      'compareSet stores if the key holds what was expected, or is absent and nothing was; it returns what is held',
    async body(open) {
      const [a, b] = [await open(), await open()];
      const cas = async (expected: string, desired: string) =>
        text(await a.compareSet('k', bytes(expected), bytes(desired)));
      expect(await cas('x', 'y')).toBe('x');
      await expect(b.get('k', { timeoutMs: 0 })).rejects.toMatchObject({ code: 'EP_TIMEOUT' });
      expect(await cas('', 'one')).toBe('one');
      expect(await cas('', 'two')).toBe('one');
      expect(await cas('one', 'two')).toBe('two');
      expect(await cas('one', 'three')).toBe('two');
      expect(text(await b.get('k'))).toBe('two');
      expect(await cas('two', '')).toBe('');
      expect(await cas('', 'four')).toBe('four');
    },
  },
  {
    id: 'store/compare-set-race',
    sentence: 'of many handles that compareSet an absent key, exactly one wins and all see the winner',
    async body(open) {
      const handles = await Promise.all(range(8).map(() => open()));
      const held = await Promise.all(handles.map((h, i) => h.compareSet('k', bytes(''), bytes(`winner ${i}`))));
      expect(new Set(held.map(text)).size).toBe(1);
    },
  },
  {
    id: 'store/check',
    sentence: 'check says at once whether all keys exist; no keys are all there',
    async body(open) {
      const [a, b] = [await open(), await open()];
      expect([await a.check([]), await a.check(['one'])]).toEqual([true, false]);
      await a.set('one', bytes(''));
      await a.add('two', 1);
      expect(await b.check(['one', 'two', 'one'])).toBe(true);
      expect(await b.check(['one', 'three'])).toBe(false);
      await a.delete('one');
      expect(await b.check(['one'])).toBe(false);
    },
  },
  {
    id: 'store/append',
    sentence: 'append adds bytes at the end, makes an absent key, wakes who waits for it, and is atomic over handles',
    async body(open) {
      const handles = await Promise.all(range(4).map(() => open()));
      const [a, b] = [handles[0]!, handles[1]!];
      const wait = b.get('k');
      await a.append('k', bytes('ab'));
      expect(text(await wait)).toBe('ab');
      await b.append('k', bytes('cd'));
      await a.append('k', bytes(''));
      expect(text(await a.get('k'))).toBe('abcd');
      await a.append('empty', bytes(''));
      expect([await b.check(['empty']), (await b.get('empty')).byteLength]).toEqual([true, 0]);
      await Promise.all(range(40).map((i) => handles[i % 4]!.append('many', bytes(`<${i}>`))));
      const found = text(await a.get('many')).match(/<\d+>/g);
      expect([...found!].sort()).toEqual(
        range(40)
          .map((i) => `<${i}>`)
          .sort(),
      );
    },
  },
  {
    id: 'store/multi-set-get',
    sentence: 'multiSet sets all its keys in order, multiGet returns the values in the order that it was asked for',
    async body(open) {
      const [a, b] = [await open(), await open()];
      await a.multiSet([]);
      expect(await a.multiGet([])).toEqual([]);
      const large = Uint8Array.from({ length: 100_000 }, (_, i) => (i * 11) % 256);
      await a.multiSet(
        new Map([
          ['one', bytes('1')],
          ['two', bytes('')],
          ['three', large],
        ]),
      );
      await a.multiSet([
        ['one', bytes('first')],
        ['one', bytes('last')],
      ]);
      const values = await b.multiGet(['three', 'one', 'two', 'one']);
      expect(values.slice(1).map(text)).toEqual(['last', '', 'last']);
      expect(Buffer.compare(values[0]!, large)).toBe(0);
      expect(await b.numKeys()).toBe(3);
    },
  },
  {
    id: 'store/multi-get-waits',
    sentence: 'multiGet waits for all its keys, and names the ones that never came',
    async body(open) {
      const [a, b] = [await open(), await open()];
      const wait = a.multiGet(['one', 'two']);
      await b.set('two', bytes('2'));
      await b.multiSet([
        ['other', bytes('')],
        ['one', bytes('1')],
      ]);
      expect((await wait).map(text)).toEqual(['1', '2']);
      const error = await a.multiGet(['one', 'lost'], { timeoutMs: 10 }).catch((e) => e);
      expect(error).toMatchObject({ code: 'EP_TIMEOUT', context: { timeoutMs: 10 } });
      expect(error.message).toMatch(/1 of 2 keys.*10 ms.*lost"/);
      const reason = { mine: true };
      const controller = new AbortController();
      const aborted = a.multiGet(['one', 'never'], { signal: controller.signal });
      setTimeout(() => controller.abort(reason), 5);
      await expect(aborted).rejects.toBe(reason);
    },
  },
  {
    id: 'store/delete-and-count',
    sentence: 'delete says whether the key existed; numKeys counts keys',
    async body(open) {
      const [a, b] = [await open(), await open()];
      expect([await a.delete('k'), await a.numKeys()]).toEqual([false, 0]);
      await a.set('k', bytes('v'));
      await a.add('n', 0);
      expect(await b.numKeys()).toBe(2);
      expect([await b.delete('k'), await b.delete('k'), await a.numKeys()]).toEqual([true, false, 1]);
      await expect(a.get('k', { timeoutMs: 0 })).rejects.toMatchObject({ code: 'EP_TIMEOUT' });
    },
  },
  {
    id: 'store/arguments',
    sentence: 'keys that are no strings and values that are no bytes are refused',
    async body(open) {
      const a = await open();
      const bad = [
        a.set(1 as never, bytes('')),
        a.set('k', 'text' as never),
        a.set('k', [1] as never),
        a.get(undefined as never),
        a.wait([null as never]),
        a.add({} as never, 1),
        a.delete(7 as never),
        a.wait('k' as never),
        a.check([1 as never]),
        a.check('k' as never),
        a.append('k', 'text' as never),
        a.append(1 as never, bytes('')),
        a.multiGet([undefined as never]),
        a.multiSet([['k', 'text' as never]]),
        a.multiSet([[1 as never, bytes('')]]),
        a.multiSet([['fine', bytes('')], 'k' as never]),
        a.multiSet(7 as never),
        a.compareSet('k', 'a' as never, bytes('')),
        a.compareSet('k', bytes(''), new Uint16Array(1) as never),
      ];
      for (const end of await Promise.allSettled(bad)) {
        expect(end).toMatchObject({ status: 'rejected', reason: { code: 'EP_INVALID_ARGUMENT' } });
      }
      expect(await a.numKeys()).toBe(0);
    },
  },
  {
    id: 'store/many-waiters',
    sentence: '128 handles that wait for one key all get it',
    async body(open) {
      const handles = await Promise.all(range(128).map(() => open()));
      const waits = Promise.all(handles.map((handle) => handle.get('go')));
      await handles[77]!.set('go', bytes('now'));
      expect(new Set((await waits).map(text))).toEqual(new Set(['now']));
    },
  },
];
