import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describeStore, type StorePlace, StoreProcesses, type StoreSetUp } from '@ep/conformance';
import { type CloseScope, memoryStore, openFileStore, openTcpStore, openTcpStoreServer, prefixStore } from '@ep/core';
import { afterAll } from 'vitest';

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
const processes = new StoreProcesses(3);
afterAll(() => processes.close());
/** Handles in processes of their own, on a store that each case makes anew. */
const elsewhere =
  (makePlace: (scope: CloseScope) => Promise<StorePlace>): StoreSetUp =>
  (scope) => {
    const place = makePlace(scope);
    return async () => scope.add(await processes.open(await place));
  };
const filePlace = async (scope: CloseScope): Promise<StorePlace> => {
  const directory = mkdtempSync(join(tmpdir(), 'ep-store-'));
  scope.defer(() => rmSync(directory, { recursive: true }));
  return { kind: 'file', path: join(directory, 'store') };
};
const tcpPlace = async (scope: CloseScope): Promise<StorePlace> => {
  const { port } = scope.add(await openTcpStoreServer({ port: 0 }));
  return { kind: 'tcp', host: '127.0.0.1', port };
};
const prefixPlace =
  (below: (scope: CloseScope) => Promise<StorePlace>) =>
  async (scope: CloseScope): Promise<StorePlace> => ({ kind: 'prefix', prefix: 'outer', below: await below(scope) });
const expected = (name: string): URL => new URL(`./${name}.expected.json`, import.meta.url);

describeStore('memory', { setUp: memory, expected: expected('store-memory') });
describeStore('file', { setUp: file, expected: expected('store-file') });
describeStore('prefix over memory', { setUp: prefixed(memory), expected: expected('store-prefix-memory') });
describeStore('prefix over file', { setUp: prefixed(file), expected: expected('store-prefix-file') });
describeStore('tcp', { setUp: tcp, expected: expected('store-tcp') });
describeStore('prefix over tcp', { setUp: prefixed(tcp), expected: expected('store-prefix-tcp') });
describeStore('file, handles in processes', {
  setUp: elsewhere(filePlace),
  expected: expected('store-file-processes'),
});
describeStore('tcp, handles in processes', { setUp: elsewhere(tcpPlace), expected: expected('store-tcp-processes') });
describeStore('prefix over file, handles in processes', {
  setUp: elsewhere(prefixPlace(filePlace)),
  expected: expected('store-prefix-file-processes'),
});
describeStore('prefix over tcp, handles in processes', {
  setUp: elsewhere(prefixPlace(tcpPlace)),
  expected: expected('store-prefix-tcp-processes'),
});
