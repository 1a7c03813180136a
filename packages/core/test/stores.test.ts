import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { CloseScope, memoryStore, openFileStore, prefixStore, type Store } from '../src/index.js';
import { storeCases } from './store-cases.js';

/** Gives a function that opens handles on one set of keys; `scope` closes everything. */
type SetUp = (scope: CloseScope) => () => Promise<Store>;

function temporaryFile(scope: CloseScope): string {
  const directory = mkdtempSync(join(tmpdir(), 'ep-store-'));
  scope.defer(() => rmSync(directory, { recursive: true }));
  return join(directory, 'store');
}

const memory: SetUp = (scope) => {
  const store = scope.add(memoryStore());
  return async () => scope.add(store.handle());
};
const file: SetUp = (scope) => {
  const path = temporaryFile(scope);
  return async () => scope.add(await openFileStore(path));
};
const prefixed =
  (below: SetUp): SetUp =>
  (scope) => {
    const open = below(scope);
    return async () => scope.add(prefixStore(prefixStore(await open(), 'outer'), 'inner'));
  };

const SETUPS: readonly (readonly [string, SetUp])[] = [
  ['memory', memory],
  ['file', file],
  ['prefix over memory', prefixed(memory)],
  ['prefix over file', prefixed(file)],
];

describe.each(SETUPS)('%s store', (_, setUp) => {
  it.each(storeCases.map((one) => [one.id, one.sentence, one.body] as const))(
    '%s: %s',
    async (_id, _sentence, body) => {
      await using scope = new CloseScope();
      await body(setUp(scope));
    },
  );
});

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
