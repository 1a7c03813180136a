import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describeStore, type StoreSetUp } from '@ep/conformance';
import { memoryStore, openFileStore, openTcpStore, openTcpStoreServer, prefixStore } from '@ep/core';

const memory: StoreSetUp = (scope) => {
  const store = scope.add(memoryStore());
  return async () => scope.add(store.handle());
};
const file: StoreSetUp = (scope) => {
  const directory = mkdtempSync(join(tmpdir(), 'ep-store-'));
  scope.defer(() => rmSync(directory, { recursive: true }));
  return async () => scope.add(await openFileStore(join(directory, 'store')));
};
const tcp: StoreSetUp = (scope) => {
  const server = openTcpStoreServer({ port: 0 });
  scope.defer(async () => (await server).close());
  return async () => scope.add(await openTcpStore({ host: '127.0.0.1', port: (await server).port }));
};
const prefixed =
  (below: StoreSetUp): StoreSetUp =>
  (scope) => {
    const open = below(scope);
    return async () => scope.add(prefixStore(prefixStore(await open(), 'outer'), 'inner'));
  };
const expected = (name: string): URL => new URL(`./${name}.expected.json`, import.meta.url);

describeStore('memory', { setUp: memory, expected: expected('store-memory') });
describeStore('file', { setUp: file, expected: expected('store-file') });
describeStore('prefix over memory', { setUp: prefixed(memory), expected: expected('store-prefix-memory') });
describeStore('prefix over file', { setUp: prefixed(file), expected: expected('store-prefix-file') });
describeStore('tcp', { setUp: tcp, expected: expected('store-tcp') });
describeStore('prefix over tcp', { setUp: prefixed(tcp), expected: expected('store-prefix-tcp') });
