import { isEpError, memoryStore } from '@ep/core';
import { allocateHost, nativePlaceOf } from '@ep/native';
import { afterEach, describe, expect, it } from 'vitest';
import { decodeWqe, efaGda, type SoftEfaConfig } from '../src/index.js';
import { openPair, openSides, type Pair } from './pair.js';

let pairs: Pair[] = [];
afterEach(async () => {
  await Promise.all(pairs.map((pair) => pair.close()));
  pairs = [];
});

async function opened(config?: SoftEfaConfig | readonly [SoftEfaConfig, SoftEfaConfig]): Promise<Pair> {
  const pair = await openPair(config);
  pairs.push(pair);
  return pair;
}

const code = async (work: PromiseLike<unknown>): Promise<unknown> =>
  Promise.resolve(work).then(
    () => 'done',
    (error: unknown) => (isEpError(error) ? error.code : error),
  );

const traced = (trace: string, kind: string): readonly { readonly wqe?: string; readonly qpn: number }[] =>
  trace
    .split('\n')
    .filter((line) => line !== '')
    .map((line) => JSON.parse(line) as { readonly kind: string; readonly wqe?: string; readonly qpn: number })
    .filter((event) => event.kind === kind);

describe('what a rank posts', () => {
  it('is what the format allows: a put that adds 1 is one WRITE, any other value one more', async () => {
    const pair = await opened({ traceEvents: 1000 });
    const [a, b] = await openSides(pair);
    a.memory.view('u8', 0, 100).fill(7);
    const put = (value: bigint) =>
      a.endpoint.put(a.memory.local(0, 100), a.memory.remote(1, 1000, 100), { signal: { slot: 2, op: 'add', value } });
    await put(1n);
    await put(6n);
    await a.endpoint.putValue(a.memory.remote(1, 8, 4), 0xdead_beefn);
    await a.endpoint.get(a.memory.remote(1, 1000, 50), a.memory.local(2000, 50));
    expect(await b.memory.signals.until(2, { cmp: 'ge', value: 7n })).toBe(7n);
    expect([...b.memory.view('u8', 1000, 100)].every((byte) => byte === 7)).toBe(true);
    expect(b.memory.view('u32', 8, 1)[0]).toBe(0xdead_beef);
    expect(a.memory.view('u8', 2049, 2)).toEqual(Uint8Array.of(7, 0));

    const decoded = traced(a.transport.trace(), 'request').map(({ wqe }) => decodeWqe(Buffer.from(wqe!, 'hex')));
    expect(decoded.flatMap(({ violations }) => violations)).toEqual([]);
    expect(decoded.map(({ wqe }) => wqe?.op)).toEqual(['write', 'write', 'write', 'write', 'read']);
    const targets = decoded.map(({ wqe }) => wqe?.qpn);
    // The first goes to the signal's own queue pair; the cell, which has the sum of this rank's other additions, to where the bytes go.
    expect(targets[0]).not.toBe(targets[1]);
    expect(targets[2]).toBe(targets[1]);
    expect(decoded[2]?.wqe).toMatchObject({ payload: { inline: Uint8Array.of(6, 0, 0, 0, 0, 0, 0, 0) } });
    expect(decoded[3]?.wqe).toMatchObject({ payload: { inline: Uint8Array.of(0xef, 0xbe, 0xad, 0xde) } });
    expect(a.transport.violations()).toEqual([]);
    expect(b.transport.counts().violations).toBe(0);

    const { traceEvents } = JSON.parse(a.transport.trace('chrome')) as {
      readonly traceEvents: readonly { ph: string }[];
    };
    expect(traceEvents.filter(({ ph }) => ph === 'X').length).toBe(decoded.length);
    expect(() => a.transport.trace('csv' as 'jsonl')).toThrow(/written as jsonl or chrome, not as csv/);
  });

  it.each([
    ['as it comes', {}],
    ['in pieces of 8 bytes', { fragmentBytes: 8 }],
    ['the smallest queue', { depth: 2, queuePairs: 1 }],
    ['values from slots of memory', { values: 'staged' }],
    ['doorbells that never come', { faults: 'lose-doorbell skip=3 count=2' }],
  ] as const)('arrives whole and is counted once, %s', async (_, config) => {
    for (const seed of [1, 2, 3]) {
      const pair = await opened({ ...config, seed });
      const sides = await openSides(pair, 8192, 4);
      const rounds = 200;
      await Promise.all(
        sides.map(async ({ memory, endpoint, peer }) => {
          const words = memory.view('u64', 0, 512);
          for (let i = 0; i < 512; i++) words[i] = BigInt(peer * 1000 + i);
          for (let i = 0; i < rounds; i++) {
            const at = (i % 64) * 64;
            endpoint.put(memory.local(at, 64), memory.remote(peer, 4096 + at, 64), {
              signal: i % 2 === 0 ? { slot: 0, op: 'inc' } : { slot: 0, op: 'add', value: 2n ** 32n },
            });
            // Some rings of the doorbell at the least: one that is lost is made good by the next, and there must be one.
            if (i % 10 === 9) await new Promise((resolve) => setImmediate(resolve));
          }
          await endpoint.flush();
          const total = (BigInt(rounds) / 2n) * (2n ** 32n + 1n);
          expect(await memory.signals.until(0, { cmp: 'ge', value: total })).toBe(total);
        }),
      );
      for (const { memory, transport } of sides) {
        expect([...memory.view('u64', 4096, 512)]).toEqual(
          Array.from({ length: 512 }, (_, i) => BigInt(transport.rank * 1000 + i)),
        );
        expect(transport.violations()).toEqual([]);
      }
    }
  });
});

describe('signals', () => {
  it('take a counter each, and give it back with their memory', async () => {
    const pair = await opened({ maxCounters: 8 });
    const both = <T>(body: (transport: (typeof pair.transports)[number]) => Promise<T>) =>
      Promise.all(pair.transports.map(body));
    expect(pair.transports[0].capabilities.maxSignalSlots).toBe(8);
    const [a, b] = await both((transport) => transport.allocate({ byteLength: 8, signalSlots: 5 }));
    const refused = await both((transport) => code(transport.allocate({ byteLength: 8, signalSlots: 4 })));
    expect(refused).toEqual(['EP_CAPACITY', 'EP_CAPACITY']);
    await Promise.all([a!.close(), b!.close()]);
  });

  it('take an endpoint each, of which kernels and JS have some already', async () => {
    const pair = await opened({ queuePairs: 4 });
    // Of 1024 endpoints and as many counters.
    const most = 1024 - 4 - 2;
    const allocate = (signalSlots: number) =>
      Promise.all(pair.transports.map((transport) => transport.allocate({ byteLength: 8, signalSlots })));
    const refused = (needed: number, available: number) =>
      expect(allocate(needed)).rejects.toMatchObject({
        code: 'EP_CAPACITY',
        context: { needed, available },
        message: `allocate: ${needed} signal slots take a completion counter and an endpoint each, and efa_soft0 has them for ${available}`,
      });
    await refused(pair.transports[0].capabilities.maxSignalSlots, most);
    const [a, b] = await allocate(most);
    const endpoint = await pair.transports[0].connect(1);
    await endpoint.signal(a!, { slot: most - 1, op: 'inc' });
    expect(await b!.signals.until(most - 1, { cmp: 'ge', value: 1n })).toBe(1n);
    await refused(1, 0);
    await Promise.all([a!.close(), b!.close()]);
    for (const memory of await allocate(most)) await memory.close();
  });

  it('of an order, or a kind, that EFA does not have are refused', async () => {
    const pair = await opened();
    const [a] = await openSides(pair);
    const update = (signal: object) => a.endpoint.signal(a.memory, { slot: 0, op: 'inc', ...signal } as never);
    expect(await code(update({ order: 'prior' }))).toBe('EP_UNSUPPORTED');
    expect(await code(update({ op: 'set', value: 3n }))).toBe('EP_UNSUPPORTED');
    expect(await code(update({ order: 'bundled' }))).toBe('done');
  });
});

describe('memory', () => {
  it('of the caller is sent from once it was adopted, and not after', async () => {
    const pair = await opened();
    const [a, b] = await openSides(pair);
    const bytes = allocateHost(4096);
    new Uint8Array(bytes).fill(9);
    const place = nativePlaceOf(new Uint8Array(bytes))!;
    const address = (place.operand as { address(): bigint }).address();
    const adopted = await a.transport.adopt({ address, byteLength: 4096 });
    await a.endpoint.put({ memory: adopted, byteOffset: 10, byteLength: 30 }, a.memory.remote(1, 0, 30));
    expect([...b.memory.view('u8', 0, 31)]).toEqual([...new Uint8Array(30).fill(9), 0]);
    await adopted.close();
    const late = a.endpoint.put({ memory: adopted, byteOffset: 0, byteLength: 8 }, a.memory.remote(1, 0, 8));
    expect(await code(late)).toBe('EP_CLOSED');
  });

  it('that the peer has closed refuses a write, which names address and queue pair', async () => {
    const pair = await opened();
    const [a, b] = await openSides(pair);
    await b.memory.close();
    const error = await Promise.resolve(a.endpoint.put(a.memory.local(0, 8), a.memory.remote(1, 16, 8))).catch(
      (caught: unknown) => caught,
    );
    expect(error).toMatchObject({
      code: 'EP_REMOTE_ACCESS',
      context: { peer: 1, efaStatus: 7, wqe: 0 },
      message: expect.stringMatching(
        /^put: queue pair 0x[0-9a-f]+ to rank 1: request 0 to 0x[0-9a-f]+ ended with status 7 \(remote: bad address or key\)$/,
      ),
    });
    expect(a.transport.failed.aborted).toBe(true);
    expect(b.transport.failed.aborted).toBe(false);
    // Queue pairs of other peers, and of the peer itself, go on.
    expect(await code(b.endpoint.flush())).toBe('done');
    const itself = await a.transport.connect(0);
    expect(await code(itself.put(a.memory.local(0, 8), a.memory.remote(0, 16, 8)))).toBe('done');
  });
});

describe('a straggler of an earlier generation', () => {
  it('finds no queue pair and no key any more on the same device, and ticks nothing', async () => {
    const pair = await opened();
    const [sender, receiver] = await openSides(pair);
    // The receiver gave its generation up; the sender has not noticed.
    await receiver.memory.close();
    const [, fresh] = await Promise.all(
      pair.transports.map((transport) => transport.allocate({ byteLength: 4096, signalSlots: 8 })),
    );
    sender.memory.view('u8', 0, 64).fill(7);
    const late = sender.endpoint.put(sender.memory.local(0, 64), sender.memory.remote(1, 0, 64), {
      signal: { slot: 0, op: 'inc' },
    });
    expect(await code(late)).toBe('EP_REMOTE_ACCESS');
    expect(await code(sender.endpoint.flush())).not.toBe('done');
    expect(fresh!.signals.peek(0)).toBe(0n);
    expect([...fresh!.view('u8', 0, 4096)].every((byte) => byte === 0)).toBe(true);
  });
});

describe('a peer that does not answer', () => {
  it('having closed ends what waits for it', async () => {
    const pair = await opened();
    const [a, b] = await openSides(pair);
    await b.transport.close();
    expect(await code(a.endpoint.put(a.memory.local(0, 8), a.memory.remote(1, 16, 8)))).toBe('EP_PEER_LOST');
  });

  it('ends the request and what was posted after it, with the status that the NIC gave', async () => {
    const pair = await opened([{ faults: 'fail status=13 skip=1' }, {}]);
    const [a] = await openSides(pair);
    const put = { kind: 'put', from: a.memory.local(0, 8), to: a.memory.remote(1, 16, 8) } as const;
    expect(await code(a.endpoint.submit([put])[0]!)).toBe('done');
    const works = a.endpoint.submit([put, put, put]);
    const error = await Promise.resolve(works[0]!).catch((caught: unknown) => caught);
    expect(error).toMatchObject({ code: 'EP_PEER_LOST', context: { peer: 1, efaStatus: 13, lost: [1] } });
    for (const work of works.slice(1)) expect(await code(work)).not.toBe('done');
    expect(await code(a.endpoint.flush())).not.toBe('done');
    expect(a.transport.failed.aborted).toBe(true);
  });
});

describe('opening', () => {
  it.each([
    [{ depth: 100 }, 'a power of two'],
    [{ depth: 1 }, 'depth'],
    [{ queuePairs: 0 }, 'queuePairs'],
    [{ values: 'none' as 'inline' }, 'inline or staged'],
    [{ fragmentBytes: 12 }, 'a multiple of 8'],
    [{ timeoutMs: 0 }, 'timeoutMs'],
    [{ depth: 4096 }, 'efa_soft0 can do: 2048 requests of 128 bytes'],
    [{ faults: 'explode' }, 'explode'],
  ])('refuses %j', async (config, message) => {
    await expect(openPair(config)).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringContaining(message),
    });
  });

  it('is over for all as soon as one rank has no NIC, and names that rank', async () => {
    const started = performance.now();
    await expect(openPair([{ timeoutMs: 60_000 }, { faults: 'explode' }])).rejects.toMatchObject({
      code: 'EP_RENDEZVOUS',
      message: 'efa-gda:soft: open: rank 1 could not open a NIC',
      context: { ranks: [1] },
    });
    // Not by waiting for it.
    expect(performance.now() - started).toBeLessThan(50_000);
  });

  it('and open() say the same of a library that is not here', async () => {
    const config = { library: 'libep-no-such-library.so.1' };
    const member = { rank: 0, worldSize: 1, store: memoryStore().handle() };
    const probe = await efaGda.hardware.probe(config);
    expect(probe).toMatchObject({ available: false, code: 'EP_UNAVAILABLE' });
    await expect(efaGda.hardware.open(member, { signal: AbortSignal.timeout(20_000), config })).rejects.toMatchObject({
      code: 'EP_UNAVAILABLE',
      scope: 'transport',
      message: !probe.available && probe.reason,
    });
  });

  it('is possible with the software NIC here, and says of hardware what is there or missing', async () => {
    const soft = await efaGda.soft.probe();
    expect(soft).toMatchObject({ available: true, devices: [{ detail: { values: 'inline', maxBatch: 8 } }] });
    const hardware = await efaGda.hardware.probe();
    if (hardware.available) expect(hardware.devices[0]?.detail).toMatchObject({ counters: expect.any(Number) });
    else expect(hardware).toMatchObject({ reason: expect.stringMatching(/./), remedy: expect.stringMatching(/soft/) });
    const library = 'libfabric-of-nobody.so.1';
    expect(await efaGda.hardware.probe({ library })).toMatchObject({
      code: 'EP_UNAVAILABLE',
      reason: expect.stringContaining(library),
    });
    expect(await efaGda.hardware.probe({ library: '' })).toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      reason: expect.stringContaining('a path or a name'),
    });
  });
});
