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
