/** How ranks that share memory find each other in the store. */
import { memoryStore } from '@ep/core';
import { expect, it } from 'vitest';
import { initProcessGroup } from '../../src/index.js';

it('asks for few of those who are not there at a time, and finds whoever comes nevertheless', async () => {
  const worldSize = 128;
  const store = memoryStore();
  let asked = 0;
  const counting = new Proxy(store, {
    get: (target, key) => {
      if (key === 'check') asked++;
      const value: unknown = Reflect.get(target, key, target);
      return typeof value === 'function' ? (value.bind(target) as unknown) : value;
    },
  });
  const open = (rank: number) => initProcessGroup({ store: counting, rank, worldSize, timeoutMs: 10_000 });
  const first = await open(0);
  await new Promise((resolve) => setTimeout(resolve, 300));
  // It has looked some 9 times by then: 127 peers each time would be 1100.
  expect(asked).toBeLessThan(200);
  const last = await open(127);
  const sent = first.send(Int32Array.of(5), 127);
  const data = new Int32Array(1);
  await last.recv(data, 0);
  await sent;
  expect(data[0]).toBe(5);
  await Promise.all([first.destroy(), last.destroy()]);
  await store.close();
});

it('agrees who is there, and takes nobody in, also where its store does not answer', async () => {
  const worldSize = 3;
  const store = memoryStore();
  let stalled = false;
  let unanswered = 0;
  const stalling = new Proxy(store, {
    get: (target, key) => {
      const value: unknown = Reflect.get(target, key, target);
      if (typeof value !== 'function') return value;
      return (...args: readonly unknown[]): unknown => {
        if (!stalled || (key !== 'check' && key !== 'get')) return Reflect.apply(value, target, args);
        unanswered++;
        return new Promise(() => {});
      };
    },
  });
  const open = (rank: number, of: typeof store) =>
    initProcessGroup({ store: of, rank, worldSize, activeRanks: [0, 1], timeoutMs: 2000 });
  const groups = await Promise.all([open(0, stalling), open(1, store)]);
  const [first, second] = groups;
  await Promise.all(groups.map((group) => group.barrier()));
  stalled = true;
  const states = await Promise.all(groups.map((group) => group.peerState([0, 1, 2])));
  expect(states).toEqual([
    ['active', 'active', 'absent'],
    ['active', 'active', 'absent'],
  ]);
  const taken = await Promise.allSettled(groups.map((group) => group.recoverRanks([2])));
  expect(taken).toMatchObject(groups.map(() => ({ status: 'rejected', reason: { code: 'EP_NOT_READY' } })));
  const abort = new AbortController();
  const aborted = first!.peerState([2], { signal: abort.signal });
  abort.abort(new Error('enough'));
  await expect(aborted).rejects.toThrow('enough');
  await Promise.allSettled([second!.peerState([2], { timeoutMs: 300 })]);
  expect(unanswered).toBeGreaterThan(1);
  stalled = false;
  await Promise.all(groups.map((group) => group.destroy()));
  await store.close();
});
