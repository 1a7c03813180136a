/** What is particular to one kind of store; what all stores promise is in @ep/conformance, which cannot be imported from here. */
import { describe, expect, it } from 'vitest';
import { memoryStore, prefixStore } from '../src/index.js';

describe('prefix store', () => {
  it('writes keys as c10d does, the prefix wrapped first in front', async () => {
    await using below = memoryStore();
    const store = prefixStore(prefixStore(below, 'in'), 'out');
    await store.set('k', Uint8Array.of(1));
    expect(await below.get('in/out/k')).toEqual(Uint8Array.of(1));
    await below.set('elsewhere', Uint8Array.of(2));
    expect(await store.numKeys()).toBe(2);
    await store.close();
    expect(await below.numKeys()).toBe(2);
  });
});
