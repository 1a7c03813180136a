/** Groups that are made from others are told on which cores ranks may run that are not in them: who spins depends on all ranks of the host. */
import { memoryStore } from '@ep/core';
import { type Native, native } from '@ep/native';
import { expect, onTestFinished, test } from 'vitest';
import { initProcessGroup } from '../../src/index.js';

test('a group that is made from another hears of the group of all ranks, and that one of nobody', async () => {
  const binding: { -readonly [K in keyof Native['binding']]: Native['binding'][K] } = native().binding;
  const { CollectiveGroup } = binding;
  const made: { readonly size: number; readonly group: object; readonly beside: unknown }[] = [];
  binding.CollectiveGroup = class extends CollectiveGroup {
    constructor(...words: ConstructorParameters<typeof CollectiveGroup>) {
      super(...words);
      made.push({ size: words[1], group: this, beside: words[10] });
    }
  };
  onTestFinished(() => {
    binding.CollectiveGroup = CollectiveGroup;
  });
  const store = memoryStore();
  const groups = await Promise.all(
    [0, 1].map((rank) => initProcessGroup({ backend: 'shm', store, rank, worldSize: 2, timeoutMs: 20_000 })),
  );
  const [alone] = await Promise.all(groups.map((group) => group.newGroup([1])));
  expect(alone).toBeUndefined();
  const [first, second, third] = made;
  expect(made.map(({ size }) => size)).toEqual([2, 2, 1]);
  expect([first?.beside, second?.beside]).toEqual([undefined, undefined]);
  expect(third?.beside).toBe(second?.group);
  await Promise.all(groups.map((group) => group.close()));
  await store.close();
});
