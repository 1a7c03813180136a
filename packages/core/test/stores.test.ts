/** What is particular to one kind of store; what all stores promise is in @ep/conformance, which cannot be imported from here. */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { CloseScope, memoryStore, openFileStore, openTcpStore, prefixStore, type Store } from '../src/index.js';
import { deadBytes } from './dead-bytes.js';

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

  it('names keys that did not come as its caller does, through all prefixes', async () => {
    const below = memoryStore();
    const outer = prefixStore(prefixStore(below, 'a'), 'b/c');
    await outer.set('there', Uint8Array.of(1));
    const limits = { timeoutMs: 10 };
    for (const [operation, wait] of [
      ['wait', () => outer.wait(['there', 'x/y', 'z'], limits)],
      ['multiGet', () => outer.multiGet(['there', 'x/y', 'z'], limits)],
    ] as const) {
      await expect(wait()).rejects.toMatchObject({
        code: 'EP_TIMEOUT',
        message: `prefix store "b/c": ${operation}: 2 of 3 keys did not appear within 10 ms: "x/y", "z"`,
        context: { operation, missing: ['x/y', 'z'], keys: 3, timeoutMs: 10 },
      });
    }
    await expect(outer.get('z', limits)).rejects.toMatchObject({
      context: { missing: ['z'] },
      cause: { context: { missing: ['b/c/z'] }, cause: { context: { missing: ['a/b/c/z'] } } },
    });
    await outer.close();
    await below.close();
  });

  it('closes although the store below does not answer, after a moment', async () => {
    await using below = memoryStore();
    Object.assign(below, { add: () => new Promise(() => {}) });
    const store = prefixStore(below, 'p');
    const added = store.add('k', 1);
    await Promise.all([
      expect(added).rejects.toMatchObject({
        code: 'EP_ABORTED',
        message: 'prefix store "p" was closed while requests were under way',
      }),
      store.close(),
    ]);
    // What comes in time is still waited for.
    const patient = prefixStore(below, 'q');
    const slow = new Promise<number>((resolve) => setTimeout(() => resolve(7), 50));
    Object.assign(below, { add: () => slow });
    const late = patient.add('k', 1);
    await patient.close();
    expect(await late).toBe(7);
  });
});

/** Not in @ep/conformance: neither a dead buffer nor options that are none get through to a store in another process. */
describe.each<readonly [string, (scope: CloseScope) => Promise<Store>]>([
  ['memory', async () => memoryStore()],
  ['prefix', async (scope) => prefixStore(scope.add(memoryStore()), 'p')],
  ['file', openFile],
  ['tcp', async () => openTcpStore({ host: '127.0.0.1', port: 0, isServer: true, secret: 'none' })],
])('%s store', (_, open) => {
  let scope: CloseScope;
  let store: Store;
  beforeEach(async () => {
    scope = new CloseScope();
    store = scope.add(await open(scope));
  });
  afterEach(() => scope.close());

  it('refuses bytes whose buffer is gone, and changes nothing', async () => {
    const fine = Uint8Array.of(1);
    for (const dead of Object.values(deadBytes())) {
      for (const call of [
        () => store.set('k', dead),
        () => store.append('k', dead),
        () => store.compareSet('k', dead, fine),
        () => store.compareSet('k', new Uint8Array(0), dead),
        () =>
          store.multiSet([
            ['other', fine],
            ['k', dead],
          ]),
      ])
        await expect(call()).rejects.toMatchObject({ code: 'EP_DETACHED' });
    }
    expect(await store.check(['k'])).toBe(false);
    expect(await store.check(['other'])).toBe(false);
    await store.set('k', new Uint8Array(0));
    expect(await store.get('k')).toEqual(new Uint8Array(0));
  });

  it('refuses options of a wait that are none, also where nothing has to be waited for', async () => {
    await store.set('k', Uint8Array.of(1));
    for (const options of [null, 5, 'x', [], { signal: {} }, { signal: null }, { timeoutMs: 'x' }] as never[])
      for (const call of [
        () => store.get('k', options),
        () => store.wait(['k'], options),
        () => store.multiGet(['k'], options),
      ])
        await expect(call()).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  });
});

async function openFile(scope: CloseScope): Promise<Store> {
  const folder = await mkdtemp(join(tmpdir(), 'ep-stores-'));
  scope.defer(() => rm(folder, { recursive: true }));
  return openFileStore(join(folder, 'store'));
}
