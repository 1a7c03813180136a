/** What is the fabric's own; what every transport does is in worlds/fabric.test.ts. Ranks share this thread, and talk over the loopback interface. */
import { execFile } from 'node:child_process';
import { setImmediate } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { type EpError, isEpError, memoryStore, type Need, offers, type Transport } from '@ep/core';
import { allocateHost, native, nativePlaceOf } from '@ep/native';
import { afterEach, describe, expect, it, vi } from 'vitest';
import { pinsMemory, whyNoAtomics } from '../src/fabric/probe.js';
import { type FabricConfig, type FabricTransport, nvshmem } from '../src/index.js';

const loopback: FabricConfig = { provider: 'tcp;ofi_rxm', address: '127.0.0.1', timeoutMs: 20_000 };
const probe = await nvshmem.fabric.probe(loopback);
const unavailable = probe.available ? '' : ` (skipped: ${probe.reason})`;

let opened: FabricTransport[] = [];
afterEach(async () => {
  await Promise.all(opened.map((one) => one.close().catch(() => {})));
  opened = [];
});

/** Every rank's end of open(). */
async function openAll(configs: readonly FabricConfig[]): Promise<readonly PromiseSettledResult<FabricTransport>[]> {
  const store = memoryStore();
  const { signal } = new AbortController();
  const ends = await Promise.allSettled(
    configs.map((config, rank) =>
      nvshmem.fabric.open(
        { rank, worldSize: configs.length, store: store.handle() },
        { signal, config: { ...loopback, ...config } },
      ),
    ),
  );
  for (const end of ends) if (end.status === 'fulfilled') opened.push(end.value);
  return ends;
}

async function openWorld(size: number, config: FabricConfig = {}): Promise<readonly FabricTransport[]> {
  const ends = await openAll(Array.from({ length: size }, () => config));
  return ends.map((end) => {
    if (end.status === 'rejected') throw end.reason;
    return end.value;
  });
}

const reasonOf = (end: PromiseSettledResult<unknown>): EpError => {
  if (end.status === 'fulfilled' || !isEpError(end.reason))
    throw new Error(`expected an EpError: ${JSON.stringify(end)}`);
  return end.reason;
};

describe('configuration', () => {
  it.each([
    [{ ringCapacity: 3 }, /ringCapacity/],
    [{ silenceMs: 999 }, /silenceMs/],
    [{ heartbeatMs: 0 }, /heartbeatMs/],
    [{ provider: '' }, /provider/],
    [{ address: '0.0.0.0' }, /address must be the address of one interface, not of all, found "0\.0\.0\.0"/],
    [{ address: '::' }, /address must be the address of one interface/],
    [{ timeoutMs: -1 }, /timeoutMs/],
    [{ ranksOnHost: 0 }, /ranksOnHost/],
  ] as const)('refuses %j before anything is opened', async (config, message) => {
    const [end] = await openAll([config]);
    expect(reasonOf(end!).code).toBe('EP_INVALID_ARGUMENT');
    expect(reasonOf(end!).message).toMatch(message);
  });
});

describe('the probe', () => {
  it('knows whose devices pin memory', () => {
    expect(['efa', 'verbs;ofi_rxm', 'verbs'].map(pinsMemory)).toEqual([true, true, true]);
    expect(['tcp;ofi_rxm', 'net', 'shm', 'verbsy'].map(pinsMemory)).toEqual([false, false, false, false]);
  });

  it('says whose provider has no atomics, and why: then no rank has any', () => {
    const facts = (rank: number, noAtomics: string) => ({ rank, host: { noAtomics } });
    expect(whyNoAtomics([facts(0, ''), facts(1, '')])).toBe('');
    const why = 'rank 1 has no atomics: net offers no FI_ATOMIC';
    expect(whyNoAtomics([facts(0, ''), facts(1, 'net offers no FI_ATOMIC'), facts(2, '')])).toBe(why);
  });

  it('says that libfabric is missing, and how to get it', async () => {
    const found = await nvshmem.fabric.probe({ library: 'libfabric.so.none' });
    expect(found).toMatchObject({ available: false, code: 'EP_UNAVAILABLE' });
    if (found.available) return;
    expect(found.reason).toMatch(/cannot load libfabric\.so\.none/);
    expect(found.remedy).toMatch(/libfabric1/);
  });

  it.skipIf(unavailable)(`names the provider that is not there${unavailable}`, async () => {
    const found = await nvshmem.fabric.probe({ provider: 'nobody' });
    expect(found).toMatchObject({ available: false, code: 'EP_UNAVAILABLE' });
    if (found.available) return;
    expect(found.reason).toMatch(/nobody: not offered/);
    expect(found.remedy).toMatch(/fi_info/);
  });

  it.skipIf(unavailable)(`believes no atomics that a provider only claims${unavailable}`, async () => {
    const found = await nvshmem.fabric.probe({ provider: 'net', address: '127.0.0.1' });
    if (!found.available) return; // later versions have it under another name
    const { noAtomics } = found.devices[0]!.detail;
    expect(found.capabilities.needs.has('atomics')).toBe(noAtomics === '');
    if (probe.available && String(probe.devices[0]!.detail.version) === '1.17')
      expect(noAtomics).toMatch(/^fi_fetch_atomicvalid of a sum of 8 bytes: net on lo/);
  });

  it.skipIf(unavailable)(`shows what was chosen${unavailable}`, () => {
    expect(probe.available && probe.capabilities.needs.has('atomics')).toBe(true);
    expect(probe).toMatchObject({
      devices: [{ name: 'tcp;ofi_rxm on lo', detail: { provider: 'tcp;ofi_rxm', pins: false } }],
    });
  });
});

describe.skipIf(unavailable)(`ranks over TCP${unavailable}`, () => {
  it('have room for no more messages than they need, and leave nothing behind in the environment', async () => {
    const program = fileURLToPath(new URL('./programs/fabric-room.mjs', import.meta.url));
    const room = async (env: NodeJS.ProcessEnv) => {
      const { stdout } = await promisify(execFile)(process.execPath, [program], { env: { ...process.env, ...env } });
      return JSON.parse(stdout) as { megabytes: number; before: string[]; behind: string[] };
    };
    const ours = await room({});
    const given = await room({ FI_OFI_RXM_MSG_RX_SIZE: '4096' });
    expect(given).toMatchObject({ before: ['FI_OFI_RXM_MSG_RX_SIZE'], behind: ['FI_OFI_RXM_MSG_RX_SIZE'] });
    expect(ours.behind).toEqual(ours.before);
    // What is given goes first; later libfabrics make room by other rules.
    expect(given.megabytes).toBeGreaterThanOrEqual(ours.megabytes - 8);
    if (probe.available && String(probe.devices[0]!.detail.version) === '1.17')
      expect(ours.megabytes).toBeLessThan(given.megabytes - 30);
  });

  it('are named where their providers differ', async () => {
    for (const end of await openAll([{}, { provider: 'net' }, {}])) {
      expect(reasonOf(end).code).toBe('EP_RENDEZVOUS');
      expect(reasonOf(end).message).toMatch(/rank 1\b.*provider|provider.*rank 1\b/);
    }
  });

  it('are named where their job secrets differ, which nobody is shown', async () => {
    const [mine, other] = ['a secret of the first job', 'a secret of another job'];
    for (const secrets of [
      [mine, other, mine],
      [mine, undefined, mine],
      [mine, 'none', mine],
    ]) {
      for (const end of await openAll(secrets.map((secret) => (secret === undefined ? {} : { secret })))) {
        expect(reasonOf(end).code).toBe('EP_RENDEZVOUS');
        expect(reasonOf(end).message).toMatch(/rank 1\b.*differ.*secret is/);
        expect(JSON.stringify([reasonOf(end).message, reasonOf(end).context])).not.toMatch(/of the first|of another/);
      }
    }
    const world = await openWorld(2, { secret: mine });
    await Promise.all(world.map((one) => one.barrier()));
    for (const one of world) expect(one.counts().refused).toBe(0);
  });

  it('are at most 4096', async () => {
    const member = { rank: 0, worldSize: 4097, store: memoryStore().handle() };
    await expect(nvshmem.fabric.open(member, { signal: AbortSignal.timeout(20_000) })).rejects.toMatchObject({
      code: 'EP_INVALID_ARGUMENT',
      context: { what: 'worldSize' },
    });
  });

  it('hear why one of them has no fabric, and do not wait for it', async () => {
    const [first, second] = await openAll([{}, { library: 'libfabric.so.none' }]);
    expect(reasonOf(first!).code).toBe('EP_RENDEZVOUS');
    expect(reasonOf(first!).message).toMatch(/none: cannot load libfabric\.so\.none/);
    expect(reasonOf(second!)).toMatchObject({ code: 'EP_UNAVAILABLE', scope: 'transport' });
  });

  it('hear the same of a provider that is not here as a probe does', async () => {
    const config = { provider: 'ep-no-such-provider', address: '127.0.0.1' };
    const [only] = await openAll([config]);
    expect(reasonOf(only!)).toMatchObject({ code: 'EP_UNAVAILABLE' });
    expect(await nvshmem.fabric.probe(config)).toMatchObject({
      code: 'EP_UNAVAILABLE',
      reason: reasonOf(only!).message,
    });
  });

  it('gather bytes and meet, many times', async () => {
    const world = await openWorld(3);
    for (let round = 0; round < 20; round++) {
      const all = await Promise.all(
        world.map(({ rank, world: team }) => team.allGather(Uint8Array.of(rank, round), { timeoutMs: 20_000 })),
      );
      for (const blobs of all) expect(blobs).toEqual([0, 1, 2].map((rank) => Uint8Array.of(rank, round)));
      await Promise.all(world.map((one) => one.barrier()));
    }
  });

  it('name who does not come, and poison the team', async () => {
    const world = await openWorld(3);
    const barrier = world.slice(0, 2).map((one) => one.barrier({ timeoutMs: 300 }));
    for (const end of await Promise.allSettled(barrier)) {
      expect(reasonOf(end)).toMatchObject({ code: 'EP_TIMEOUT', context: { awaited: [2] } });
      expect(reasonOf(end).message).toBe('barrier: timed out after 300 ms; 2 of 3 ranks arrived; awaited rank 2');
    }
    const [again] = await Promise.allSettled([world[0]!.barrier()]);
    expect(reasonOf(again!).code).toBe('EP_POISONED');
  });

  it('find out that they are at different calls', async () => {
    const [a, b] = await openWorld(2);
    const ends = await Promise.allSettled([a!.world.allGather(new Uint8Array(3)), b!.world.barrier()]);
    for (const end of ends) expect(reasonOf(end).code).toBe('EP_MISMATCH');
  });

  it('put from adopted memory and get into it', async () => {
    const world = await openWorld(2);
    const [a, b] = await Promise.all(world.map((one) => one.allocate({ byteLength: 100_000, signalSlots: 1 })));
    const bytes = new Uint8Array(allocateHost(50_000));
    const address = (nativePlaceOf(bytes)!.operand as { address(): bigint }).address();
    const adopted = await world[0]!.adopt({ address, byteLength: bytes.length });
    const region = { memory: adopted, byteOffset: 0, byteLength: bytes.length };
    for (let i = 0; i < bytes.length; i++) bytes[i] = i * 7;
    const endpoint = await world[0]!.connect(1);
    await endpoint.put(region, a!.remote(1, 0, bytes.length));
    expect(b!.view('u8', 0, bytes.length)).toEqual(bytes);
    b!.view('u8', 0, bytes.length).fill(9);
    await endpoint.get(a!.remote(1, 0, bytes.length), region);
    expect(bytes.every((byte) => byte === 9)).toBe(true);
    await adopted.close();
    await expect(world[0]!.adopt({ address: 4096n, byteLength: 64 })).rejects.toThrow('not all mapped');
    expect(world.map((one) => one.violation())).toEqual(['', '']);
    expect(world[0]!.counts().writes).toBeGreaterThan(0);
  });

  it('change words of each other and of themselves by the provider, and count it', async () => {
    const world = await openWorld(2);
    const [first] = world;
    expect(world.map(({ offer }) => offer.noAtomics)).toEqual(['', '']);
    expect(offers(first! as Transport<Need>, 'atomics')).toBe(true);
    const [a, b] = await Promise.all(world.map((one) => one.allocate({ byteLength: 64, signalSlots: 1 })));
    for (const [peer, memory] of [a!, b!].entries()) {
      const endpoint = await first!.connect(peer);
      expect(await endpoint.fetchAdd(a!.remote(peer, 8, 8), 5n)).toBe(0n);
      expect(await endpoint.compareSwap(a!.remote(peer, 8, 8), 5n, 2n ** 64n - 1n)).toBe(5n);
      expect(await endpoint.fetchAdd(a!.remote(peer, 8, 8), -1n)).toBe(2n ** 64n - 1n);
      expect(memory.view('u64', 8, 1)[0]).toBe(2n ** 64n - 2n);
    }
    expect(first!.counts()).toMatchObject({ atomics: 6, writes: 0 });
    await b!.close();
    const endpoint = await first!.connect(1);
    const add = () => Promise.allSettled([endpoint.fetchAdd(a!.remote(1, 8, 8), 1n)]);
    let [end] = await add();
    while (end!.status === 'fulfilled') [end] = await add();
    expect(reasonOf(end!)).toMatchObject({ code: 'EP_CLOSED' });
    expect(reasonOf(end!).message).toMatch(/an atomic on a memory that rank 1 has closed/);
  });

  it('put into nothing what is for a memory that the other has closed, refuse to read it, and go on', async () => {
    const world = await openWorld(2);
    const allocate = () => Promise.all(world.map((one) => one.allocate({ byteLength: 4096, signalSlots: 1 })));
    const [[a, b], [c, d]] = [await allocate(), await allocate()];
    const endpoint = await world[0]!.connect(1);
    await endpoint.put(a!.local(0, 1000), a!.remote(1, 0, 1000));
    await b!.close();
    const get = () => Promise.allSettled([endpoint.get(a!.remote(1, 0, 1000), a!.local(0, 1000))]);
    let [end] = await get();
    while (end!.status === 'fulfilled') [end] = await get();
    expect(reasonOf(end!).code).toBe('EP_CLOSED');
    expect(reasonOf(end!).message).toMatch(/memory that rank 1 has closed/);
    await endpoint.put(a!.local(0, 1000), a!.remote(1, 0, 1000), { signal: { slot: 0, op: 'inc' } });
    await endpoint.put(c!.local(0, 1000), c!.remote(1, 0, 1000), { signal: { slot: 0, op: 'set', value: 7n } });
    expect(await d!.signals.until(0, { cmp: 'eq', value: 7n })).toBe(7n);
  });

  it('look themselves for the end of what they await: no other thread watches for it', async () => {
    // As if ranks outnumbered cores: a wait then lasts a millisecond, which an answer takes only where the machine is very busy.
    const world = await openWorld(2, { ranksOnHost: 1000 });
    const [a, b] = await Promise.all(world.map((one) => one.allocate({ byteLength: 8192, signalSlots: 1 })));
    const endpoint = await world[0]!.connect(1);
    const [from, to] = [a!.local(0, 512), a!.remote(1, 4096, 512)];
    a!.view('u8', 0, 512).fill(3);
    const watched = vi.spyOn(native().operations, 'track');
    const calls = {
      put: () => endpoint.put(from, to, { signal: { slot: 0, op: 'inc' } }),
      get: () => endpoint.get(to, from),
      'a wait for all of several': () => Promise.all([1, 2, 3].map(() => endpoint.put(from, to))),
      flush: () => {
        endpoint.post({ kind: 'put', from, to });
        return endpoint.flush();
      },
    };
    const rounds = 100;
    for (const [name, call] of Object.entries(calls)) {
      let fewest = rounds;
      for (let tries = 0; tries < 5 && fewest > rounds / 4; tries++) {
        watched.mockClear();
        for (let i = 0; i < rounds; i++) {
          await call();
          // Each has a turn of the loop of its own, in which this thread may wait.
          await setImmediate();
        }
        fewest = Math.min(fewest, watched.mock.calls.length);
      }
      expect(fewest, `${name}: watched for by another thread, of ${rounds}`).toBeLessThanOrEqual(rounds / 4);
    }
    watched.mockRestore();
    expect(b!.view('u8', 4096, 512)).toEqual(new Uint8Array(512).fill(3));
    expect(b!.signals.peek(0)).toBeGreaterThanOrEqual(BigInt(rounds));
    // Timers are not starved by a chain of awaits that end at once.
    let ticks = 0;
    const timer = setInterval(() => ticks++, 1);
    const began = performance.now();
    while (performance.now() - began < 300) await endpoint.put(from, to);
    clearInterval(timer);
    expect(ticks).toBeGreaterThan(0);
  });

  it('hear of the end of what nobody awaits once their loop has turned', async () => {
    const world = await openWorld(2);
    const [a] = await Promise.all(world.map((one) => one.allocate({ byteLength: 8192, signalSlots: 1 })));
    const endpoint = await world[0]!.connect(1);
    const works = [1, 2, 3].map(() => endpoint.put(a!.local(0, 4096), a!.remote(1, 4096, 4096)));
    await expect.poll(() => works.map(({ status }) => status)).toEqual(['done', 'done', 'done']);
    await world[1]!.close();
    const late = endpoint.get(a!.remote(1, 4096, 4096), a!.local(0, 4096));
    await expect.poll(() => late.status).toBe('failed');
    // Nobody looked at it: the next call says so.
    expect(() => endpoint.put(a!.local(0, 8), a!.remote(1, 0, 8))).toThrow(/get \d+ failed earlier and nobody waited/);
    const awaited = endpoint.get(a!.remote(1, 4096, 4096), a!.local(0, 4096));
    await expect(awaited).rejects.toMatchObject({ code: expect.stringMatching(/EP_PEER_LOST|EP_CLOSED/) });
    await endpoint.close();
  });

  it('post what nobody hears the end of, and no thread watches it', async () => {
    const world = await openWorld(2);
    const [a, b] = await Promise.all(world.map((one) => one.allocate({ byteLength: 8192, signalSlots: 1 })));
    const endpoint = await world[0]!.connect(1);
    const { operations } = native();
    const add = { slot: 0, op: 'add', value: 1n } as const;
    a!.view('u8', 0, 4096).fill(5);
    const before = operations.pending;
    for (let i = 0; i < 20; i++) {
      endpoint.post({ kind: 'put', from: a!.local(0, 4096), to: a!.remote(1, 4096, 4096), signal: add });
      endpoint.post({ kind: 'put-value', to: a!.remote(1, 8 * i, 8), value: BigInt(i + 1) });
      endpoint.post({ kind: 'signal', memory: a!, signal: add });
    }
    expect(operations.pending).toBe(before);
    await endpoint.flush();
    expect(await b!.signals.until(0, { cmp: 'eq', value: 40n })).toBe(40n);
    expect(b!.view('u8', 4096, 4096)).toEqual(new Uint8Array(4096).fill(5));
    expect([...b!.view('u64', 0, 20)]).toEqual(Array.from({ length: 20 }, (_, i) => BigInt(i + 1)));
    const wrong = { kind: 'put', from: a!.local(0, 8), to: a!.remote(1, 0, 16) } as const;
    expect(() => endpoint.post(wrong)).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
    await endpoint.close();
    expect(() => endpoint.post(wrong)).toThrow(expect.objectContaining({ code: 'EP_CLOSED' }));
  });

  it('hold a thread for words of several peers, until one of them has come or a moment is over', async () => {
    const world = await openWorld(2);
    const [a, b] = await Promise.all(world.map((one) => one.allocate({ byteLength: 8, signalSlots: 3 })));
    const { signals } = b!;
    const seen = [
      { slot: 1, value: 0n },
      { slot: 2, value: 0n },
    ];
    expect(signals.hold!(seen)).toBe(false);
    expect(signals.hold!([])).toBe(false);
    const endpoint = await world[0]!.connect(1);
    await endpoint.signal(a!, { slot: 0, op: 'inc' });
    expect(signals.hold!(seen), 'a word that is not looked at').toBe(false);
    await endpoint.signal(a!, { slot: 2, op: 'add', value: 5n });
    expect(signals.hold!(seen)).toBe(true);
    expect(signals.hold!([{ slot: 2, value: 5n }])).toBe(false);
    expect(() => signals.hold!([{ slot: 3, value: 0n }])).toThrow(
      expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }),
    );
  });

  it('learn that one of them left in order, without a failure', async () => {
    const [a, b] = await openWorld(2);
    const [memory] = await Promise.all([a!, b!].map((one) => one.allocate({ byteLength: 8, signalSlots: 1 })));
    const waiting = memory!.signals.until(0, { cmp: 'ge', value: 1n }, { peers: [1] });
    await b!.close();
    const [end] = await Promise.allSettled([waiting]);
    expect(reasonOf(end!)).toMatchObject({ code: 'EP_PEER_LOST', context: { lost: [1] } });
    expect(a!.lostRanks()).toEqual([]);
    expect(a!.failed.aborted).toBe(false);
  });
});
