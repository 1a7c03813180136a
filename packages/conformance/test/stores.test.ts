import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describeStore, type StorePlace, StorePrograms, type StoreSetUp } from '@ep/conformance';
import type { Mode } from '@ep/conformance/cases';
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
const programs = { threads: new StorePrograms('threads', 3), processes: new StorePrograms('processes', 3) } as const;
afterAll(() => Promise.all(Object.values(programs).map((some) => some.close())));
/** Handles in threads or processes of their own, on a store that each case makes anew. */
const elsewhere =
  (mode: Mode, makePlace: (scope: CloseScope) => Promise<StorePlace>): StoreSetUp =>
  (scope) => {
    const place = makePlace(scope);
    return async () => scope.add(await programs[mode].open(await place));
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

const places = [
  ['file', filePlace],
  ['tcp', tcpPlace],
  ['prefix over file', prefixPlace(filePlace)],
  ['prefix over tcp', prefixPlace(tcpPlace)],
] as const;
for (const mode of ['threads', 'processes'] as const) {
  for (const [name, place] of places) {
    describeStore(`${name}, handles in ${mode}`, {
      setUp: elsewhere(mode, place),
      expected: expected(`store-${name.replace(' over ', '-')}-${mode}`),
    });
  }
}
