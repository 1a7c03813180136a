/** Ranks that meet without a store: what they tell each other is brought from one to all by the caller. */
import { type EpError, isEpError, memoryStore } from '@ep/core';
import { afterEach, describe, expect, it } from 'vitest';
import {
  type IbgdaExchange,
  type IbgdaIntroduction,
  type IbgdaTransport,
  ibgda,
  type SoftIbgdaConfig,
} from '../src/index.js';
import { allGather } from './all-gather.js';

let opened: IbgdaTransport[] = [];
afterEach(async () => {
  await Promise.all(opened.map((one) => one.close().catch(() => {})));
  opened = [];
});

type Open = typeof ibgda.soft.open;
const { signal } = new AbortController();

/** Every rank's end of open(), two ranks unless told otherwise. */
async function openAll(
  exchange: IbgdaExchange,
  {
    config = {},
    worldSize = 2,
    open = ibgda.soft.open,
  }: { readonly config?: SoftIbgdaConfig; readonly worldSize?: number; readonly open?: Open } = {},
): Promise<readonly PromiseSettledResult<IbgdaTransport>[]> {
  const ends = await Promise.allSettled(
    Array.from({ length: worldSize }, (_, rank) =>
      open({ rank, worldSize, exchange }, { signal, config: { timeoutMs: 20_000, ...config } }),
    ),
  );
  for (const end of ends) if (end.status === 'fulfilled') opened.push(end.value);
  return ends;
}

function reasonOf(end: PromiseSettledResult<unknown> | undefined): EpError {
  if (end?.status !== 'rejected' || !isEpError(end.reason)) throw new Error(`no EpError: ${JSON.stringify(end)}`);
  return end.reason;
}

/** Each rank puts to the next one and is signalled by the one before. */
async function passOn(transports: readonly IbgdaTransport[], by: number): Promise<void> {
  const worldSize = transports.length;
  await Promise.all(
    transports.map(async (transport) => {
      const { rank } = transport;
      const memory = await transport.allocate({ byteLength: 4096, signalSlots: 1 });
      memory.view('u64', 0, 1)[0] = BigInt(by + rank);
      const next = (rank + 1) % worldSize;
      const endpoint = await transport.connect(next);
      await endpoint.put(memory.local(0, 8), memory.remote(next, 8, 8), { signal: { slot: 0, op: 'inc' } });
      await memory.signals.until(0, { cmp: 'ge', value: 1n });
      expect(memory.view('u64', 8, 1)[0]).toBe(BigInt(by + ((rank + worldSize - 1) % worldSize)));
      await transport.barrier();
      await memory.close();
    }),
  );
}

/** The backing `hardware`, behind whose libraries a software NIC stands. */
const shimmed: Open = async (member, options) => {
  const { hardware } = (await import('./shim-provider.mjs' as string)) as { readonly hardware: { open: Open } };
  return hardware.open(member, options);
};

const network = { network: { address: '127.0.0.1' } };

describe('a world that meets by its own means', () => {
  it.each([
    ['soft', {}, ['facts', 'control', 'connections']],
    ['soft, over a network', { config: network }, ['facts', 'connections', 'connected']],
    ['hardware, over the shim', { open: shimmed }, ['facts', 'control', 'connections']],
  ] as const)('of %s moves bytes, in two memories one after the other', async (_, how, steps) => {
    const worldSize = 3;
    const { exchange, told } = allGather(worldSize);
    const ends = await openAll(exchange, { ...how, worldSize });
    for (const end of ends) if (end.status === 'rejected') throw end.reason;
    expect([...told.keys()]).toEqual(steps);
    await passOn(opened, 100);
    await passOn(opened, 200);
    // Nothing more is asked of the exchange: the world's team carries the keys of memories.
    expect([...told.keys()]).toEqual(steps);
  });

  it('is told all that a queue pair is connected by, as plain data', async () => {
    const { exchange, told } = allGather(2);
    await openAll(exchange, { config: { ...network, link: 'ethernet', qpsPerPeer: 2 } });
    const [a, b] = told.get('connections')!.toSorted((one, other) => one.rank - other.rank);
    expect(a).toEqual({
      version: 1,
      rank: 0,
      worldSize: 2,
      step: 'connections',
      nonce: expect.stringMatching(/^[0-9a-f]{64}$/),
      memory: {
        address: expect.stringMatching(/^0x[0-9a-f]+$/),
        rkey: expect.any(Number),
        signals: expect.stringMatching(/^0x[0-9a-f]+$/),
        signalsRkey: expect.any(Number),
      },
      connection: {
        link: 'ethernet',
        gid: opened[0]!.port.gid,
        lid: 0,
        roceVersion: 2,
        mtu: 4096,
        maxMessageBytes: opened[0]!.port.maxMessageBytes,
        outstanding: 16,
        // Two for kernels, one for JS, to each rank.
        qpns: [0, 1].map(() => [0, 1, 2].map(() => expect.any(Number))),
        startingPsns: [0, 1].map(() => [0, 1, 2].map(() => expect.any(Number))),
      },
    });
    expect(new Set(a?.step === 'connections' ? a.connection.qpns.flat() : []).size).toBe(6);
    expect(b).toMatchObject({ rank: 1, connection: { gid: opened[1]!.port.gid } });
  });

  it('may leave out what a rank itself told, and give the rest in any order', async () => {
    const { exchange } = allGather(3, (answer, rank) => answer.filter((one) => one.rank !== rank).reverse());
    const ends = await openAll(exchange, { worldSize: 3 });
    expect(ends.map(({ status }) => status)).toEqual(Array(3).fill('fulfilled'));
  });
});

type Fields = Record<string, unknown>;
/** Changes what rank 1 told in a step, on its way to all. */
const spoil = (step: string, edit: (value: Fields, connection: Fields) => void) =>
  allGather(2, (answer) => {
    for (const one of answer as unknown as Fields[]) {
      if (one.step === step && one.rank === 1) edit(one, (one.connection ?? {}) as Fields);
    }
    return answer;
  }).exchange;

describe('what is brought and is no such data', () => {
  it.each<readonly [string, string, (value: Fields, connection: Fields) => void, RegExp]>([
    ['facts', 'version', (value) => Object.assign(value, { version: 2 }), /version must be 1, as on rank 0, found 2/],
    ['facts', 'worldSize', (value) => Object.assign(value, { worldSize: 3 }), /worldSize must be 2, .* found 3/],
    ['facts', 'step', (value) => Object.assign(value, { step: 'control' }), /step must be facts, .* found "control"/],
    ['facts', 'agree', (value) => Object.assign(value, { agree: { abi: {} } }), /agree must be an object of texts/],
    ['facts', 'host', (value) => delete value.host, /host must be an object of texts.* found undefined/],
    ['control', 'handle', (value) => Object.assign(value, { handle: 'ab' }), /handle must be 112 hexadecimal digits/],
    ['connections', 'connection', (value) => delete value.connection, /connection must be an object, found undefined/],
    ['connections', 'connection.link', (_, at) => Object.assign(at, { link: 'token-ring' }), /infiniband or ethernet/],
    ['connections', 'connection.gid', (_, at) => Object.assign(at, { gid: '::1' }), /eight groups of four hex/],
    ['connections', 'connection.mtu', (_, at) => Object.assign(at, { mtu: 1500 }), /power of two from 256 to 4096/],
    [
      'connections',
      'connection.startingPsns[1][4]',
      (_, { startingPsns }) => Object.assign((startingPsns as unknown[][])[1]!, { 4: 2 ** 24 }),
      /0 to 16777215, found 16777216/,
    ],
    ['connections', 'connection.lid', (_, at) => Object.assign(at, { lid: '7' }), /0 to 65535, found "7"/],
    ['connections', 'connection.qpns', (_, at) => Object.assign(at, { qpns: [] }), /one for each of 2 ranks/],
    ['connections', 'connection.qpns[1]', (_, { qpns }) => (qpns as unknown[][])[1]!.pop(), /must be 5 numbers/],
    [
      'connections',
      'connection.qpns[0][2]',
      (_, { qpns }) => Object.assign((qpns as unknown[][])[0]!, { 2: -1 }),
      /0 to 16777215, found -1/,
    ],
  ])('in step %s is refused by its rank and field: %s', async (step, field, edit, message) => {
    const [here] = await openAll(spoil(step, edit));
    const reason = reasonOf(here);
    expect(reason).toMatchObject({ code: 'EP_RENDEZVOUS', context: { ranks: [1], field, step } });
    expect(reason.message).toMatch(
      new RegExp(`^ibgda:soft: exchange, step ${step}: rank 1: ${field.replace(/[[\]]/g, '\\$&')} must be `),
    );
    expect(reason.message).toMatch(message);
  });

  it('in the keys of a network world is refused in the same way', async () => {
    const edit = (value: Fields) => Object.assign(value.memory as Fields, { address: 4096 });
    const [here] = await openAll(spoil('connections', edit), { config: network });
    expect(reasonOf(here)).toMatchObject({ code: 'EP_RENDEZVOUS', context: { ranks: [1], field: 'memory.address' } });
  });

  it('is known to all: ranks whose own data were right hear who could not connect', async () => {
    // Rank 0 alone is brought something else.
    const { exchange } = allGather(2, (answer, rank) => {
      const other = answer.find((one) => one.rank === 1 && one.step === 'connections') as Fields | undefined;
      if (rank === 0 && other !== undefined) Object.assign(other.connection as Fields, { mtu: 1 });
      return answer;
    });
    const [here, there] = await openAll(exchange);
    expect(reasonOf(here)).toMatchObject({ context: { field: 'connection.mtu' } });
    expect(reasonOf(there)).toMatchObject({ code: 'EP_RENDEZVOUS', context: { ranks: [0] } });
    expect(reasonOf(there).message).toBe('ibgda:soft: open: rank 0 could not connect to the others');
  });

  it('of ports that do not fit together is told by what differs', async () => {
    const edit = (_: Fields, connection: Fields) => Object.assign(connection, { link: 'ethernet' });
    const [here] = await openAll(spoil('connections', edit));
    expect(reasonOf(here)).toMatchObject({ code: 'EP_MISMATCH' });
    expect(reasonOf(here).message).toMatch(/rank 1 says that its port is Ethernet/);
  });

  it.each<readonly [string, (answer: IbgdaIntroduction[]) => unknown, Fields, RegExp]>([
    ['no list', () => ({}), { ranks: [0] }, /rank 0: the answer must be a list of what all ranks told/],
    ['nothing in a place', () => [null], { ranks: [] }, /value 0: it must be an object, found null/],
    [
      'a rank that is none',
      ([one]) => [{ ...one, rank: 2 }],
      { ranks: [] },
      /value 0: rank must be an integer from 0 to 1/,
    ],
    ['nobody', () => [], { ranks: [1] }, /rank 0 was brought nothing of rank 1 of 2/],
    ['a rank twice', (all) => [all, all].flat(), {}, /must be one value of each rank, found "two of this one"/],
    [
      'another one as itself',
      (all) => all.map((one) => ({ ...one, host: { pid: 1 } })),
      { ranks: [0] },
      /do two processes run as one rank/,
    ],
  ])('is refused: a rank is brought %s', async (_, change, context, message) => {
    const [here] = await openAll(allGather(2, change).exchange);
    expect(reasonOf(here)).toMatchObject({ code: 'EP_RENDEZVOUS', context: { step: 'facts', ...context } });
    expect(reasonOf(here).message).toMatch(message);
  });

  it('says who is configured otherwise', async () => {
    const { exchange } = allGather(2);
    const ends = await Promise.allSettled(
      [1, 2].map((qpsPerPeer, rank) =>
        ibgda.soft.open({ rank, worldSize: 2, exchange }, { signal, config: { qpsPerPeer } }),
      ),
    );
    for (const end of ends) expect(reasonOf(end).message).toMatch(/^rendezvous: ranks 0-1 of 2 differ: qpsPerPeer is/);
  });
});

describe('an exchange that does not end well', () => {
  it('is waited for as long as open() may take, and told when nobody waits any more', async () => {
    let told: AbortSignal | undefined;
    const exchange: IbgdaExchange = (_, limits) => {
      told = limits.signal;
      return new Promise(() => {});
    };
    const [end] = await openAll(exchange, { config: { timeoutMs: 30 } });
    expect(reasonOf(end)).toMatchObject({ code: 'EP_TIMEOUT', context: { step: 'facts', timeoutMs: 30 } });
    expect(reasonOf(end).message).toMatch(/^ibgda:soft: exchange, step facts: rank 0 got no answer within 30 ms/);
    expect(told?.aborted).toBe(true);
  });

  it('ends with an abort of open(), by its reason', async () => {
    const controller = new AbortController();
    const opening = ibgda.soft.open(
      { rank: 0, worldSize: 2, exchange: () => new Promise(() => {}) },
      { signal: controller.signal },
    );
    const reason = new Error('changed my mind');
    controller.abort(reason);
    await expect(opening).rejects.toBe(reason);
  });

  it('says why it failed', async () => {
    const cause = new Error('the line is dead');
    const [end] = await openAll(() => Promise.reject(cause));
    expect(reasonOf(end)).toMatchObject({ code: 'EP_RENDEZVOUS', cause, context: { ranks: [0], step: 'facts' } });
    expect(reasonOf(end).message).toMatch(/it failed: the line is dead$/);
  });

  it.each([
    [{ exchange: 'by telephone' }, /exchange must be a function, found "by telephone"/],
    [{ exchange: allGather(1).exchange, store: memoryStore() }, /store must be absent beside exchange/],
    [{}, /store must be a Store/],
  ])('is refused where it is none: %#', async (means, message) => {
    const member = { rank: 0, worldSize: 1, ...means } as Parameters<Open>[0];
    await expect(ibgda.soft.open(member, { signal })).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(message),
    });
  });
});

it('where one rank has no NIC, the others hear of it', async () => {
  const { exchange } = allGather(2);
  const started = performance.now();
  const configs: readonly SoftIbgdaConfig[] = [{}, { faults: 'explode' }];
  const ends = await Promise.allSettled(
    configs.map((config, rank) =>
      ibgda.soft.open({ rank, worldSize: 2, exchange }, { signal, config: { ...config, timeoutMs: 60_000 } }),
    ),
  );
  expect(reasonOf(ends[1])).toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  expect(reasonOf(ends[0])).toMatchObject({ code: 'EP_RENDEZVOUS', context: { ranks: [1] } });
  expect(reasonOf(ends[0]).message).toBe('ibgda:soft: open: rank 1 could not open a NIC');
  // Not by waiting for it.
  expect(performance.now() - started).toBeLessThan(50_000);
});
