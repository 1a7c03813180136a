import { isEpError } from '@ep/core';
import { allocateHost, nativePlaceOf } from '@ep/native';
import { afterEach, describe, expect, it } from 'vitest';
import { decodeWqe, ibgda, type SoftIbgdaConfig } from '../src/index.js';
import { openPair, openSides, type Pair } from './pair.js';

let pairs: Pair[] = [];
afterEach(async () => {
  await Promise.all(pairs.map((pair) => pair.close()));
  pairs = [];
});

async function opened(config?: SoftIbgdaConfig | readonly [SoftIbgdaConfig, SoftIbgdaConfig]): Promise<Pair> {
  const pair = await openPair(config);
  pairs.push(pair);
  return pair;
}

const code = async (work: PromiseLike<unknown>): Promise<unknown> =>
  Promise.resolve(work).then(
    () => 'done',
    (error: unknown) => (isEpError(error) ? error.code : error),
  );

interface TracedRequest {
  readonly kind: string;
  readonly qpn: number;
  readonly index: number;
  readonly wqe?: string;
}

const traced = (trace: string): readonly TracedRequest[] =>
  trace
    .split('\n')
    .filter((line) => line !== '')
    .map((line) => JSON.parse(line) as TracedRequest)
    .filter(({ kind }) => kind === 'request');

describe('what a rank posts', () => {
  it('is what the format allows, in the order of the calls on one queue pair', async () => {
    const pair = await opened({ traceEvents: 1000 });
    const [a, b] = await openSides(pair);
    a.memory.view('u8', 0, 100).fill(7);
    await a.endpoint.put(a.memory.local(0, 100), a.memory.remote(1, 1000, 100), {
      signal: { slot: 2, op: 'add', value: 3n, order: 'prior' },
    });
    await a.endpoint.putValue(a.memory.remote(1, 8, 4), 0xdead_beefn);
    await a.endpoint.get(a.memory.remote(1, 1000, 50), a.memory.local(2000, 50));
    await b.memory.signals.until(2, { cmp: 'ge', value: 3n });
    expect([...b.memory.view('u8', 1000, 100)].every((byte) => byte === 7)).toBe(true);
    expect(b.memory.view('u32', 8, 1)[0]).toBe(0xdead_beef);
    expect(a.memory.view('u8', 2049, 2)).toEqual(Uint8Array.of(7, 0));

    const requests = traced(a.transport.trace());
    const decoded = requests.map(({ wqe }) => decodeWqe(Buffer.from(wqe!, 'hex')));
    expect(decoded.flatMap(({ violations }) => violations)).toEqual([]);
    expect(decoded.map(({ wqe }) => wqe?.op)).toEqual(['write', 'masked-fetch-add', 'write', 'read']);
    expect(decoded[1]?.wqe).toMatchObject({ width: 8, add: 3n, boundary: 0n });
    expect(decoded[2]?.wqe).toMatchObject({ payload: { inline: Uint8Array.of(0xef, 0xbe, 0xad, 0xde) } });
    expect(new Set(requests.map(({ qpn }) => qpn)).size).toBe(1);
    expect(requests.map(({ index }) => index)).toEqual([0, 1, 2, 3]);
    expect(a.transport.violations()).toEqual([]);
    expect(b.transport.counts().violations).toBe(0);

    const { traceEvents } = JSON.parse(a.transport.trace('chrome')) as {
      readonly traceEvents: readonly { ph: string }[];
    };
    expect(traceEvents.filter(({ ph }) => ph === 'X').length).toBe(requests.length);
    expect(() => a.transport.trace('csv' as 'jsonl')).toThrow(/written as jsonl or chrome, not as csv/);
  });

  it.each([
    ['a ring of completions', { completions: 'ring', depth: 4 }],
    ['the smallest queue', { depth: 2 }],
    ['Ethernet', { link: 'ethernet' }],
    ['one queue pair for kernels', { qpsPerPeer: 1 }],
    ['pieces and turns by chance', { faults: 'partial pieces=3\nreorder', seed: 5 }],
    [
      'doorbells that come twice or not at all',
      { faults: 'lose-doorbell skip=3 count=2\nrepeat-doorbell skip=7 count=9' },
    ],
    ['requests that never arrive at first', { faults: 'drop skip=2 count=3' }],
    ['answers that are lost', { faults: 'drop-ack skip=5 count=4' }],
    ['a link that goes down for a while', { faults: 'link-down skip=100 count=3 ns=2000000' }],
  ] as const)('arrives whole and is counted once, with %s', async (_, config) => {
    const pair = await opened(config);
    const sides = await openSides(pair, 8192, 4);
    const rounds = 300;
    await Promise.all(
      sides.map(async ({ memory, endpoint, peer }) => {
        const words = memory.view('u64', 0, 512);
        for (let i = 0; i < 512; i++) words[i] = BigInt(peer * 1000 + i);
        for (let i = 0; i < rounds; i++) {
          const at = (i % 64) * 64;
          endpoint.put(memory.local(at, 64), memory.remote(peer, 4096 + at, 64), { signal: { slot: 0, op: 'inc' } });
        }
        await endpoint.flush();
        await memory.signals.until(0, { cmp: 'ge', value: BigInt(rounds) });
      }),
    );
    for (const { memory, transport } of sides) {
      expect(memory.signals.peek(0)).toBe(BigInt(rounds));
      expect([...memory.view('u64', 4096, 512)]).toEqual(
        Array.from({ length: 512 }, (_, i) => BigInt(transport.rank * 1000 + i)),
      );
      expect(transport.violations()).toEqual([]);
    }
  });
});

describe('a trace', () => {
  it('has one clock for commands and requests, from the first one on', async () => {
    const pair = await opened({ traceEvents: 1000 });
    const [a] = await openSides(pair);
    await a.endpoint.putValue(a.memory.remote(1, 8, 4), 1n);
    const events = a.transport
      .trace()
      .split('\n')
      .filter((line) => line !== '')
      .map((line) => JSON.parse(line) as { readonly t: number; readonly kind: string });
    expect(new Set(events.map(({ kind }) => kind))).toEqual(new Set(['command', 'doorbell', 'request']));
    // The machine's clock began long before: commands of time 0 would be that far away.
    const times = events.map(({ t }) => t);
    expect(Math.min(...times)).toBeGreaterThan(0);
    expect(Math.max(...times) - Math.min(...times)).toBeLessThan(30e9);
  });
});

describe('what is no request', () => {
  it('is refused: a value of more bits than its target, and an order that there is not', async () => {
    const pair = await opened();
    const [a, b] = await openSides(pair);
    const word = (byteLength: number) => a.memory.remote(1, 0, byteLength);
    const refused = (what: string) => ({ code: 'EP_INVALID_ARGUMENT', context: { what } });
    for (const [bytes, value] of [
      [1, 256n],
      [1, -129n],
      [4, 2n ** 32n],
      [8, 2n ** 64n],
    ] as const) {
      await expect(a.endpoint.putValue(word(bytes), value)).rejects.toMatchObject(refused('value'));
    }
    for (const [bytes, value] of [
      [1, 255n],
      [1, -128n],
      [8, 2n ** 64n - 1n],
    ] as const) {
      await a.endpoint.putValue(word(bytes), value);
    }
    expect(b.memory.view('u8', 0, 2)).toEqual(Uint8Array.of(255, 255));
    const update = { slot: 0, op: 'add', value: 1n, order: 'later' as 'prior' } as const;
    await expect(a.endpoint.signal(a.memory, update)).rejects.toMatchObject(refused('order'));
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

  it('that is not mapped cannot be adopted', async () => {
    const pair = await opened();
    await expect(pair.transports[0].adopt({ address: 4096n, byteLength: 64 })).rejects.toThrow('not all mapped');
  });

  it('at an address that is none, in a space that there is not, is refused', async () => {
    const pair = await opened();
    const [transport] = pair.transports;
    const refused = { code: 'EP_INVALID_ARGUMENT' };
    await expect(transport.adopt({ address: 0n, byteLength: 64 })).rejects.toMatchObject(refused);
    await expect(transport.adopt({ address: 2n ** 64n, byteLength: 64 })).rejects.toMatchObject(refused);
    const size = { byteLength: 64, signalSlots: 1 };
    await expect(transport.allocate({ ...size, space: 'gpu' as 'device' })).rejects.toMatchObject({
      ...refused,
      context: { what: 'space' },
    });
  });

  it('of a peer is not mapped: only the NIC reaches it', async () => {
    const pair = await opened();
    const [a] = await openSides(pair);
    expect(() => a.memory.peerView(1, 'u8', 0, 1)).toThrow('the part of rank 1 is not mapped here');
  });

  it('that the peer has closed refuses a write, which names address, key and queue pair', async () => {
    const pair = await opened();
    const [a, b] = await openSides(pair);
    await b.memory.close();
    const error = await Promise.resolve(a.endpoint.put(a.memory.local(0, 8), a.memory.remote(1, 16, 8))).catch(
      (caught: unknown) => caught,
    );
    expect(error).toMatchObject({
      code: 'EP_REMOTE_ACCESS',
      context: { peer: 1, syndrome: 0x13, index: 0 },
      message: expect.stringMatching(
        /^put: queue pair 0x[0-9a-f]+ to rank 1: RDMA_WRITE with index 0 to 0x[0-9a-f]+ \(rkey 0x[0-9a-f]+\) failed with syndrome 0x13 \(remote access/,
      ),
    });
    expect(a.transport.failed.aborted).toBe(true);
    expect(b.transport.failed.aborted).toBe(false);
    expect(await code(b.endpoint.flush())).toBe('done');
  });
});

describe('a burst that fails', () => {
  it.each(['collapsed', 'ring'] as const)('says why, with %s completions', async (completions) => {
    const pair = await opened({ completions });
    const [a, b] = await openSides(pair);
    await b.memory.close();
    // Nobody looks between them, so in a collapsed queue flushed requests follow at once.
    const works = a.endpoint.submit(
      Array.from({ length: 40 }, () => ({
        kind: 'put' as const,
        from: a.memory.local(0, 64),
        to: a.memory.remote(1, 0, 64),
      })),
    );
    const codes = await Promise.all(works.map((work) => code(work)));
    expect(new Set(codes)).toEqual(new Set(['EP_REMOTE_ACCESS']));
  });
});

describe('a peer that does not answer', () => {
  it('ends the request, what was posted after it and flush(), and the connection as a whole', async () => {
    const pair = await opened([{ faults: 'drop skip=1' }, {}]);
    const [a, b] = await openSides(pair);
    const put = () => a.endpoint.put(a.memory.local(0, 8), a.memory.remote(1, 16, 8));
    expect(await code(put())).toBe('done');
    const works = [put(), put(), put()];
    const error = await Promise.resolve(works[0]!).catch((caught: unknown) => caught);
    expect(error).toMatchObject({ context: { peer: 1, syndrome: expect.any(Number) } });
    for (const work of works.slice(1)) expect(await code(work)).not.toBe('done');
    expect(await code(a.endpoint.flush())).not.toBe('done');
    expect(await code(put())).not.toBe('done');
    expect(a.transport.counts().retries).toBeGreaterThan(0);
    expect(a.transport.failed.aborted).toBe(true);
    // A queue pair in the error state does not answer, either; the rank itself goes on.
    expect(await code(b.endpoint.put(b.memory.local(0, 8), b.memory.remote(0, 16, 8)))).toBe('EP_PEER_LOST');
    const itself = await b.transport.connect(1);
    expect(await code(itself.put(b.memory.local(0, 8), b.memory.remote(1, 16, 8)))).toBe('done');
  });

  it('is told as lost where completions are kept apart', async () => {
    const pair = await opened([{ faults: 'drop', completions: 'ring' }, { completions: 'ring' }]);
    const [a] = await openSides(pair);
    const error = await Promise.resolve(a.endpoint.signal(a.memory, { slot: 0, op: 'inc' })).catch(
      (caught: unknown) => caught,
    );
    expect(error).toMatchObject({
      code: 'EP_PEER_LOST',
      context: { lost: [1], syndrome: 0x15 },
      message: expect.stringContaining('transport retries exceeded'),
    });
  });

  it('is one whose link is down, and one that lost its own', async () => {
    const pair = await opened([{ faults: 'link-down skip=1', completions: 'ring' }, { completions: 'ring' }]);
    const [a, b] = await openSides(pair);
    const toPeer = ({ memory, endpoint, peer }: typeof a) =>
      code(endpoint.put(memory.local(0, 8), memory.remote(peer, 16, 8)));
    expect(await toPeer(a)).toBe('done');
    expect(await toPeer(a)).toBe('EP_PEER_LOST');
    expect(await toPeer(b)).toBe('EP_PEER_LOST');
  });

  it('having closed ends what waits for it', async () => {
    const pair = await opened();
    const [a, b] = await openSides(pair);
    await b.transport.close();
    expect(await code(a.endpoint.put(a.memory.local(0, 8), a.memory.remote(1, 16, 8)))).toBe('EP_PEER_LOST');
  });
});

describe('opening', () => {
  it('names ranks that chose otherwise', async () => {
    await expect(openPair([{ qpsPerPeer: 2 }, { qpsPerPeer: 3 }])).rejects.toMatchObject({
      code: 'EP_RENDEZVOUS',
      message: expect.stringContaining('qpsPerPeer'),
    });
  });

  it.each([
    [{ depth: 100 }, 'a power of two'],
    [{ depth: 1 }, 'depth'],
    [{ qpsPerPeer: 0 }, 'qpsPerPeer'],
    [{ completions: 'none' as 'ring' }, 'collapsed or ring'],
    [{ link: 'token-ring' as 'ethernet' }, 'infiniband or ethernet'],
    [{ ackTimeout: 32 }, 'ackTimeout'],
    [{ timeoutMs: 0 }, 'timeoutMs'],
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
      message: 'ibgda:soft: open: rank 1 could not open a NIC',
      context: { ranks: [1] },
    });
    // Not by waiting for it.
    expect(performance.now() - started).toBeLessThan(50_000);
  });

  it('is possible with the software NIC here, and says of hardware what is there or missing', async () => {
    const soft = await ibgda.soft.probe();
    expect(soft).toMatchObject({ available: true, devices: [{ detail: { link: 'infiniband' } }] });
    const hardware = await ibgda.hardware.probe();
    if (hardware.available) expect(hardware.devices[0]?.name).toMatch(/^mlx5_/);
    else expect(hardware).toMatchObject({ reason: expect.stringMatching(/./), remedy: expect.stringMatching(/./) });
  });
});
