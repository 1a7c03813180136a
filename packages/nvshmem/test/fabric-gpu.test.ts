/** Memory of a GPU over the fabric: over stand-ins for libfabric and CUDA, and what the real provider over TCP cannot. Ranks share this thread. */
import { fileURLToPath } from 'node:url';
import { memoryStore } from '@ep/core';
import { afterEach, describe, expect, it } from 'vitest';
import { type FabricConfig, type FabricTransport, nvshmem } from '../src/index.js';

const built = (name: string): string =>
  fileURLToPath(new URL(`../../../native/build/Release/${name}`, import.meta.url));

const libraries = { cuda: built('libep_cuda_driver.so') };
const shim: FabricConfig = { library: built('libep_rdm_shim.so'), provider: 'shim', device: 0, libraries };
const tcp: FabricConfig = { provider: 'tcp;ofi_rxm', address: '127.0.0.1', device: 0, libraries };
const real = await nvshmem.fabric.probe(tcp);
const unavailable = real.available ? '' : ` (skipped: ${real.reason})`;

let opened: FabricTransport[] = [];
afterEach(async () => {
  for (const name of ['EP_RDM_SHIM', 'EP_CUDA_HOST_FAILING']) delete process.env[name];
  await Promise.all(opened.map((one) => one.close().catch(() => {})));
  opened = [];
});

async function openWorld(size: number, config: FabricConfig): Promise<readonly FabricTransport[]> {
  const store = memoryStore();
  const { signal } = new AbortController();
  const options = { signal, config: { timeoutMs: 20_000, ...config } };
  opened = await Promise.all(
    Array.from({ length: size }, (_, rank) =>
      nvshmem.fabric.open({ rank, worldSize: size, store: store.handle() }, options),
    ),
  );
  return opened;
}

const SIZE = { byteLength: 50_000, signalSlots: 2 };
const bytesOf = (length: number, salt: number): Uint8Array =>
  Uint8Array.from({ length }, (_, index) => index * 7 + (index >> 8) * 3 + salt);

async function copyOf(
  memory: Awaited<ReturnType<FabricTransport['allocate']>>,
  byteOffset: number,
  byteLength: number,
): Promise<Uint8Array> {
  const into = new Uint8Array(byteLength);
  await memory.read(memory.local(byteOffset, byteLength), into);
  return into;
}

describe('memory of a GPU', () => {
  it('is put to and got from, and signals of it lie on the host', async () => {
    const world = await openWorld(2, shim);
    expect([...world[0]!.capabilities.spaces!]).toEqual(['host', 'device']);
    const [a, b] = await Promise.all(world.map((one) => one.allocate({ ...SIZE, space: 'device' })));
    const [h] = await Promise.all(world.map((one) => one.allocate(SIZE)));
    expect([a!.space, h!.space]).toEqual(['device', 'host']);
    expect(await copyOf(b!, 0, 100)).toEqual(new Uint8Array(100));
    const sent = bytesOf(9000, 1);
    await a!.write(sent, a!.local(11, 9000));
    const endpoint = await world[0]!.connect(1);
    await endpoint.put(a!.local(11, 9000), a!.remote(1, 333, 9000), { signal: { slot: 1, op: 'add', value: 5n } });
    expect(await b!.signals.until(1, { cmp: 'ge', value: 5n })).toBe(5n);
    expect(await copyOf(b!, 333, 9000)).toEqual(sent);
    expect(await copyOf(b!, 9333, 50)).toEqual(new Uint8Array(50));
    // Between the GPU and the host, and few bytes, which travel within no message here.
    h!.view('u8', 0, 40).set(bytesOf(40, 9));
    await endpoint.put(h!.local(0, 40), a!.remote(1, 20_000, 40));
    await endpoint.putValue(a!.remote(1, 20_040, 8), 0x0102_0304_0506_0708n);
    expect(await copyOf(b!, 20_000, 48)).toEqual(Uint8Array.from([...bytesOf(40, 9), ...[8, 7, 6, 5, 4, 3, 2, 1]]));
    await endpoint.get(a!.remote(1, 333, 9000), h!.local(100, 9000));
    expect(h!.view('u8', 100, 9000)).toEqual(sent);
    await endpoint.get(a!.remote(1, 333, 500), a!.local(30_000, 500));
    expect(await copyOf(a!, 30_000, 500)).toEqual(sent.slice(0, 500));
    expect(world.map((one) => one.violation())).toEqual(['', '']);
  });

  it('of somebody else is adopted, and used until it is closed', async () => {
    const world = await openWorld(2, shim);
    const [a, b] = await Promise.all(world.map((one) => one.allocate({ ...SIZE, space: 'device' })));
    const { address } = a as unknown as { readonly address: bigint };
    const sent = bytesOf(5000, 2);
    await a!.write(sent, a!.local(123, 5000));
    const adopted = await world[0]!.adopt({ address: address + 123n, byteLength: 5000 });
    const endpoint = await world[0]!.connect(1);
    await endpoint.put({ memory: adopted, byteOffset: 1000, byteLength: 4000 }, a!.remote(1, 0, 4000));
    expect(await copyOf(b!, 0, 4000)).toEqual(sent.slice(1000));
    await adopted.close();
    const late = endpoint.put({ memory: adopted, byteOffset: 0, byteLength: 8 }, a!.remote(1, 0, 8));
    await expect(late).rejects.toMatchObject({ code: 'EP_CLOSED' });
  });

  it('refuses what no processor can do, and what is another memory', async () => {
    const world = await openWorld(2, shim);
    const [a] = await Promise.all(world.map((one) => one.allocate({ ...SIZE, space: 'device' })));
    expect(() => a!.view('u8', 0, 8)).toThrow(expect.objectContaining({ code: 'EP_UNSUPPORTED' }));
    expect(() => world[0]!.device(a!)).toThrow(/JS puts and gets/);
    const own = await world[0]!.connect(0);
    const put = own.put(a!.local(0, 8), a!.remote(0, 8, 8));
    await expect(put).rejects.toThrow(/copy it on a stream/);
    expect(() => a!.remote(1, 49_999, 2)).toThrow(expect.objectContaining({ code: 'EP_INVALID_ARGUMENT' }));
    const sizes = await Promise.allSettled(
      world.map((one, rank) => one.allocate({ byteLength: 100 + rank, signalSlots: 1, space: 'device' })),
    );
    for (const end of sizes) expect(end).toMatchObject({ status: 'rejected', reason: { code: 'EP_MISMATCH' } });
  });

  it('of one rank and of the host on another are two calls', async () => {
    const world = await openWorld(2, shim);
    const ends = await Promise.allSettled([world[0]!.allocate({ ...SIZE, space: 'device' }), world[1]!.allocate(SIZE)]);
    for (const end of ends) expect(end).toMatchObject({ status: 'rejected', reason: { code: 'EP_MISMATCH' } });
  });

  it('gives back what it held', async () => {
    const world = await openWorld(2, shim);
    const before = world.map((one) => one.counts().registered);
    const memories = await Promise.all(world.map((one) => one.allocate({ ...SIZE, space: 'device' })));
    expect(world.map((one, rank) => one.counts().registered - before[rank]!)).toEqual([50_000, 50_000]);
    await Promise.all(memories.map((one) => one.close()));
    await expect.poll(() => world.map((one) => one.counts().registered)).toEqual(before);
  });

  it.each([
    ['EP_RDM_SHIM', 'no-hmem', /shim of libfabric 2\.1 registers no memory of GPUs \(FI_HMEM\).*copy through it/],
    ['EP_CUDA_HOST_FAILING', 'dmabuf,gpudirect', /exports no DMA-BUFs.*no GPUDirect RDMA.*copy through it/],
  ] as const)('says on all ranks what %s=%s lacks', async (name, value, text) => {
    process.env[name] = value;
    const world = await openWorld(2, shim);
    const ends = await Promise.allSettled(world.map((one) => one.allocate({ ...SIZE, space: 'device' })));
    for (const end of ends) {
      expect(end).toMatchObject({ status: 'rejected', reason: { code: 'EP_UNSUPPORTED' } });
      if (end.status === 'rejected') expect(end.reason.message).toMatch(text);
    }
    // The calls before and after are those of all ranks.
    await Promise.all(world.map((one) => one.allocate(SIZE)));
  });

  it('is refused where no GPU was named', async () => {
    const { device: _, ...without } = shim;
    const [alone] = await openWorld(1, without);
    const asked = alone!.allocate({ ...SIZE, space: 'device' });
    await expect(asked).rejects.toMatchObject({ code: 'EP_UNSUPPORTED', message: expect.stringMatching(/`device`/) });
    const adopted = alone!.adopt({ address: 4096n, byteLength: 64 });
    await expect(adopted).rejects.toThrow(/not all mapped; for memory of a GPU, name that as `device`/);
  });

  it.skipIf(unavailable)(`is refused over TCP, which registers none, and the host's is not${unavailable}`, async () => {
    const world = await openWorld(2, tcp);
    expect(world[0]!.capabilities.spaces).toBeUndefined();
    expect(world[0]!.offer.noGpu).toMatch(/^tcp;ofi_rxm of libfabric .* registers no memory of GPUs \(FI_HMEM\)$/);
    for (const end of await Promise.allSettled(world.map((one) => one.allocate({ ...SIZE, space: 'device' })))) {
      expect(end).toMatchObject({ status: 'rejected', reason: { code: 'EP_UNSUPPORTED' } });
      if (end.status === 'rejected') expect(end.reason.message).toMatch(/FI_HMEM.*or choose another `provider`/);
    }
    const [a, b] = await Promise.all(world.map((one) => one.allocate(SIZE)));
    a!.view('u8', 0, 1000).set(bytesOf(1000, 3));
    await (await world[0]!.connect(1)).put(a!.local(0, 1000), a!.remote(1, 0, 1000), {
      signal: { slot: 0, op: 'inc' },
    });
    await b!.signals.until(0, { cmp: 'ge', value: 1n });
    expect(b!.view('u8', 0, 1000)).toEqual(bytesOf(1000, 3));
  });
});
