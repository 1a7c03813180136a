/** What is particular to the hostile transport. One rank is enough: its engine delays and reorders what goes to itself as well. */
import { type HostileConfig, hostile } from '@ep/conformance/hostile';
import { CloseScope, memoryStore, type Transport } from '@ep/core';
import { expect, it } from 'vitest';

const A_MINUTE_US = 60_000_000;

async function alone(scope: CloseScope, config: HostileConfig) {
  const store = scope.add(memoryStore());
  const { signal } = new AbortController();
  const transport = scope.add(await hostile.open({ rank: 0, worldSize: 1, store }, { signal, config }));
  const memory = await transport.allocate({ byteLength: 8192, signalSlots: 2 });
  const endpoint = await transport.connect(0);
  const post = () =>
    endpoint.put(memory.local(0, 1000), memory.remote(0, 4096, 1000), { signal: { slot: 0, op: 'inc' } });
  return { transport, memory, endpoint, post };
}

it('really delivers in pieces and out of order', async () => {
  await using scope = new CloseScope();
  const { transport, endpoint, post } = await alone(scope, { seed: 5 });
  for (let i = 0; i < 200; i++) post();
  await endpoint.flush();
  const { landed, overtakes, pieces } = transport.counts();
  expect(landed).toBe(200);
  expect(overtakes).toBeGreaterThan(50);
  expect(pieces).toBeGreaterThan(300);
});

it('holds requests back until a flush', async () => {
  await using scope = new CloseScope();
  const { memory, endpoint, post } = await alone(scope, { seed: 6, maxDelayUs: A_MINUTE_US });
  const works = Array.from({ length: 20 }, post);
  await new Promise((resolve) => setTimeout(resolve, 20));
  expect(works.filter((work) => work.status === 'pending').length).toBeGreaterThan(15);
  await endpoint.flush();
  expect(memory.signals.peek(0)).toBe(20n);
  await Promise.all(works);
});

it('drains at once when it is closed, however long it may delay', async () => {
  await using scope = new CloseScope();
  const { transport, post } = await alone(scope, { seed: 7, maxDelayUs: A_MINUTE_US });
  const works = Array.from({ length: 20 }, post);
  await transport.close();
  await Promise.all(works);
});

it('refuses a configuration that it cannot follow', async () => {
  await using scope = new CloseScope();
  for (const config of [{ ringCapacity: 3 }, { maxDelayUs: -1 }, { seed: 0.5 }, { timeoutMs: 0 }]) {
    await expect(alone(scope, config)).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  }
});

it('names the rank whose seed differs', async () => {
  await using scope = new CloseScope();
  const store = scope.add(memoryStore());
  const { signal } = new AbortController();
  const open = (rank: number) =>
    hostile.open(
      { rank, worldSize: 3, store: scope.add(store.handle()) },
      { signal, config: { seed: rank === 2 ? 9 : 1 }, timeoutMs: 5_000 },
    );
  for (const end of await Promise.allSettled([open(0), open(1), open(2)])) {
    expect(end).toMatchObject({ status: 'rejected', reason: { code: 'EP_RENDEZVOUS' } });
    expect(String((end as PromiseRejectedResult).reason)).toMatch(/rank 2\b.*seed|seed.*rank 2\b/);
  }
});

it('does not compile where order or a set is needed', async () => {
  const needsOrder = (transport: Transport<'prior'>) => transport.name;
  const needsSet = (transport: Transport<'bundled' | 'set'>) => transport.name;
  const portable = (transport: Transport<'bundled' | 'inc'>) => transport.name;
  await using scope = new CloseScope();
  const { transport } = await alone(scope, {});
  // @ts-expect-error the hostile transport does not offer prior
  expect(needsOrder(transport)).toBe('hostile:engine');
  // @ts-expect-error nor set
  expect(needsSet(transport)).toBe('hostile:engine');
  expect(portable(transport)).toBe('hostile:engine');
});
