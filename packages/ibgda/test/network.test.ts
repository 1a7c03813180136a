/** What software NICs on a network do besides; every case over them is in worlds/network.test.ts. Ranks share this thread, and talk over the loopback interface. */
import { type EpError, isEpError, memoryStore } from '@ep/core';
import { afterEach, expect, it } from 'vitest';
import { type IbgdaTransport, ibgda, type SoftIbgdaConfig } from '../src/index.js';

let opened: IbgdaTransport[] = [];
afterEach(async () => {
  await Promise.all(opened.map((one) => one.close().catch(() => {})));
  opened = [];
});

/** Every rank's end of open(). */
async function openAll(configs: readonly SoftIbgdaConfig[]): Promise<readonly PromiseSettledResult<IbgdaTransport>[]> {
  const store = memoryStore();
  const { signal } = new AbortController();
  const ends = await Promise.allSettled(
    configs.map((config, rank) =>
      ibgda.soft.open(
        { rank, worldSize: configs.length, store: store.handle() },
        { signal, config: { timeoutMs: 20_000, ...config } },
      ),
    ),
  );
  for (const end of ends) if (end.status === 'fulfilled') opened.push(end.value);
  return ends;
}

async function openBoth(): Promise<readonly [IbgdaTransport, IbgdaTransport]> {
  const ends = await openAll([{ network: { address: '127.0.0.1' } }, { network: { address: '127.0.0.2' } }]);
  const [a, b] = ends.map((end) => {
    if (end.status === 'rejected') throw end.reason;
    return end.value;
  });
  return [a!, b!];
}

const reasonOf = (end: PromiseSettledResult<unknown> | undefined): EpError => {
  if (end?.status !== 'rejected' || !isEpError(end.reason)) throw new Error(`no EpError: ${JSON.stringify(end)}`);
  return end.reason;
};

it('moves bytes, words and atomics between addresses', async () => {
  const [a, b] = await openBoth();
  expect([a.port.gid, b.port.gid]).toEqual([
    expect.stringMatching(/^fd65:7000:7f00:0001:/),
    expect.stringMatching(/^fd65:7000:7f00:0002:/),
  ]);
  const [here, there] = await Promise.all([a, b].map((one) => one.allocate({ byteLength: 4096, signalSlots: 1 })));
  here!.view('u8', 0, 100).fill(7);
  const endpoint = await a.connect(1);
  await endpoint.put(here!.local(0, 100), here!.remote(1, 1000, 100), { signal: { slot: 0, op: 'add', value: 5n } });
  await there!.signals.until(0, { cmp: 'ge', value: 5n });
  expect([...there!.view('u8', 999, 102)]).toEqual([0, ...Array(100).fill(7), 0]);
  expect(await endpoint.fetchAdd(here!.remote(1, 8, 8), 3n)).toBe(0n);
  expect(await endpoint.fetchAdd(here!.remote(1, 8, 8), 1n)).toBe(3n);
  await endpoint.get(here!.remote(1, 1000, 100), here!.local(2000, 100));
  expect(here!.view('u8', 2000, 100)[99]).toBe(7);
  expect(a.violations().concat(b.violations())).toEqual([]);
});

it('ends requests to one that has closed, as to a lost peer', async () => {
  const [a, b] = await openBoth();
  const [here] = await Promise.all([a, b].map((one) => one.allocate({ byteLength: 64, signalSlots: 0 })));
  const endpoint = await a.connect(1);
  await endpoint.put(here!.local(0, 8), here!.remote(1, 8, 8));
  await b.close();
  await expect(endpoint.put(here!.local(0, 8), here!.remote(1, 8, 8))).rejects.toMatchObject({ code: 'EP_PEER_LOST' });
});

it('refuses what is no address of one interface, and tells the others', async () => {
  // An address for documentation: no host has it.
  const [odd, other] = await openAll([{ network: { address: '192.0.2.1' } }, { network: { address: '127.0.0.1' } }]);
  expect(reasonOf(odd)).toMatchObject({ code: 'EP_SYSTEM' });
  expect(reasonOf(odd).message).toMatch(/192\.0\.2\.1.*is it an address of this host/);
  expect(reasonOf(other)).toMatchObject({ code: 'EP_RENDEZVOUS' });
  expect(reasonOf(other).message).toMatch(/network.*none: .*192\.0\.2\.1/);
  const wrong = [
    { address: '' },
    { address: '0.0.0.0' },
    { address: 'localhost' },
    { address: '::1' },
    { address: '127.0.0.1', silenceMs: 900 },
    { address: '127.0.0.1', heartbeatMs: 0 },
  ];
  for (const network of wrong) expect(reasonOf((await openAll([{ network }]))[0]).code).toBe('EP_INVALID_ARGUMENT');
});

it('does not meet who has another secret', async () => {
  const network = (secret: string) => ({ network: { address: '127.0.0.1', secret } });
  const ends = await openAll([network('a secret of this job'), network('a secret of another job')]);
  for (const end of ends) expect(reasonOf(end).message).toMatch(/secret/);
});
