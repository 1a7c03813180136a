/** Where the queues of a GPU's kernels lie: over stand-ins for CUDA and, of `hardware`, for libibverbs and libmlx5. */
import type { Probe } from '@ep/core';
import { native } from '@ep/native';
import { expect, test } from 'vitest';
import { type ControlMemory, type IbgdaTransport, ibgda } from '../src/index.js';
import { cuda, failing } from './gpu-places.js';
import { openPair, openSides } from './pair.js';

const { hardware } = (await import('./shim-provider.mjs' as string)) as { readonly hardware: typeof ibgda.hardware };

const EXPORTED = 'GPU memory by DMA-BUF';
const PINNED = 'GPU memory by address';
const HOST = 'host memory';
const noDmabuf = `${EXPORTED}: GPU 0000:00:00.0 exports no DMA-BUFs`;
const noGpudirect = `${PINNED}: GPU 0000:00:00.0 has no GPUDirect RDMA`;
const refused = (call: string): string => `${call} failed: CUDA_ERROR_NOT_SUPPORTED`;

interface Case {
  readonly failing: readonly string[];
  readonly controlMemory?: readonly ControlMemory[];
  readonly placement: string;
  /** How each begins. */
  readonly fallbacks: readonly string[];
}

const cases: readonly Case[] = [
  { failing: [], placement: EXPORTED, fallbacks: [] },
  { failing: ['dmabuf'], placement: PINNED, fallbacks: [noDmabuf] },
  {
    failing: ['cuMemGetHandleForAddressRange'],
    placement: PINNED,
    fallbacks: [`${EXPORTED}: memory of the queues: ${refused('cuMemGetHandleForAddressRange')}`],
  },
  { failing: ['dmabuf', 'gpudirect'], placement: HOST, fallbacks: [noDmabuf, noGpudirect] },
  {
    failing: ['cuMemAlloc_v2'],
    placement: HOST,
    fallbacks: [EXPORTED, PINNED].map((place) => `${place}: memory of the queues: ${refused('cuMemAlloc')}`),
  },
  {
    failing: ['cuStreamWriteValue64_v2', 'gpudirect'],
    placement: HOST,
    // One could not be opened, the other not be filled: told in the order that was asked for.
    fallbacks: [`${EXPORTED}: ${refused('cuStreamWriteValue64')}`, noGpudirect],
  },
  { failing: [], controlMemory: ['gpu', 'dma-buf', 'host'], placement: PINNED, fallbacks: [] },
  {
    failing: ['gpudirect'],
    controlMemory: ['gpu', 'dma-buf', 'host'],
    placement: EXPORTED,
    fallbacks: [noGpudirect],
  },
  { failing: [], controlMemory: ['host', 'gpu'], placement: HOST, fallbacks: [] },
];

const begins = (texts: readonly string[]) =>
  texts.map((text) => expect.stringMatching(`^${text.replaceAll(/[.()]/g, '\\$&')}`));

test.each(cases)('queues in $placement where $failing fails ($controlMemory)', async (one) => {
  const config = {
    device: 0,
    libraries: { cuda },
    ...(one.controlMemory === undefined ? {} : { controlMemory: one.controlMemory }),
  };
  await failing(one.failing, async () => {
    const probe = await hardware.probe(config);
    expect(probe).toMatchObject({ available: true, capabilities: { spaces: new Set(['host', 'device']) } });
    const detail = probe.available ? probe.devices[0]?.detail : undefined;
    expect(detail).toMatchObject({ kernels: 'cuda:0', placement: one.placement });
    const pair = await openPair(config, hardware);
    try {
      for (const { port } of pair.transports) {
        expect(port).toMatchObject({ kernels: 'cuda:0', placement: one.placement, fallbacks: begins(one.fallbacks) });
        // Of a world of one, whose queues are shorter.
        const sizeless = (text: unknown): string => String(text).replaceAll(/\d+ bytes/g, 'bytes');
        expect(sizeless(detail?.fallbacks)).toBe(sizeless(port.fallbacks.join('; ')));
      }
      await expectCarried(pair.transports);
    } finally {
      await pair.close();
    }
  });
});

/** What JS posts goes by queues in host memory, whatever the kernels' are; memory for kernels is registered, and has words that can be looked at. */
async function expectCarried(transports: readonly [IbgdaTransport, IbgdaTransport]): Promise<void> {
  const [a, b] = await openSides({ transports, close: async () => {} });
  a.memory.view('u64', 0, 1)[0] = 77n;
  await a.endpoint.put(a.memory.local(0, 8), a.memory.remote(1, 8, 8), { signal: { slot: 0, op: 'inc' } });
  await b.memory.signals.until(0, { cmp: 'ge', value: 1n });
  expect(b.memory.view('u64', 8, 1)[0]).toBe(77n);
  const parts = await Promise.all(
    transports.map((transport) => transport.allocate({ byteLength: 100, signalSlots: 2, space: 'device' })),
  );
  for (const [rank, part] of parts.entries()) {
    expect(part.space).toBe('device');
    expect(part.signals.peek(1)).toBe(0n);
    const handle = transports[rank]!.device(part);
    expect(handle).toMatchObject({ kind: 'memory:ibgda' });
    const [bytes, back] = [Uint8Array.of(1, 2, 3, 4), new Uint8Array(4)];
    await part.write(bytes, part.local(96, 4));
    await part.read(part.local(96, 4), back);
    expect(back).toEqual(bytes);
  }
  expect(() => transports[0].device(a.memory)).toThrow(
    expect.objectContaining({ code: 'EP_UNSUPPORTED', message: expect.stringMatching(/kernels on cuda:0 post/) }),
  );
  // The addon looks for itself: handles are bytes that anybody can keep.
  const kept = a.memory.nativeMemory('test').deviceHandle();
  expect(() => new (native().binding.MoeBuffer)({ handle: kept } as never)).toThrow(
    /kernels of this transport run on a GPU/,
  );
  await Promise.all(parts.map((part) => part.close()));
}

const reason = (probe: Probe): string => (probe.available ? 'available' : `${probe.code} ${probe.reason}`);

test('no place is left: all of them are named', async () => {
  const controlMemory = ['dma-buf', 'gpu'] as const;
  const probe = await failing(['dmabuf', 'gpudirect'], () =>
    hardware.probe({ device: 0, controlMemory, libraries: { cuda } }),
  );
  expect(reason(probe)).toMatch(
    /there is no place for the queues of kernels on GPU 0: GPU memory by DMA-BUF: .*exports no DMA-BUFs; GPU memory by address: .*has no GPUDirect RDMA/,
  );
});

test('a software NIC has its rings in host memory, and says why not elsewhere', async () => {
  const pair = await openPair({ device: 0, libraries: { cuda } });
  const why = 'a software NIC reads the rings on a processor, which reaches host memory only';
  try {
    for (const { port } of pair.transports) {
      expect(port).toMatchObject({
        kernels: 'cuda:0',
        placement: HOST,
        fallbacks: [`${EXPORTED}: ${why}`, `${PINNED}: ${why}`],
      });
    }
    await expectCarried(pair.transports);
  } finally {
    await pair.close();
  }
  const probe = await ibgda.soft.probe({ device: 0, controlMemory: ['gpu'], libraries: { cuda } });
  expect(reason(probe)).toMatch(
    /no place for the queues of kernels on GPU 0: GPU memory by address: a software NIC reads/,
  );
});

test('a GPU or a driver that is not there', async () => {
  expect(await ibgda.soft.probe({ device: 3, libraries: { cuda } })).toMatchObject({
    code: 'EP_INVALID_ARGUMENT',
    reason: expect.stringMatching(/GPU 3 is not one of the 1 that are here/),
  });
  expect(reason(await ibgda.soft.probe({ device: 0, libraries: { cuda: 'libep-no-such-driver.so.1' } }))).toMatch(
    /cannot load libep-no-such-driver/,
  );
  expect(reason(await failing(['cuInit'], () => ibgda.soft.probe({ device: 0, libraries: { cuda } })))).toMatch(
    /cuInit failed: CUDA_ERROR_NOT_SUPPORTED/,
  );
});

test('an order that is none, or without a device', async () => {
  for (const config of [
    { controlMemory: ['gpu'] },
    { device: 0, controlMemory: [] },
    { device: 0, controlMemory: ['gpu', 'gpu'] },
    { device: 0, controlMemory: ['disk'] },
    { device: -1 },
  ]) {
    expect(await ibgda.soft.probe(config as never)).toMatchObject({
      available: false,
      code: 'EP_INVALID_ARGUMENT',
      reason: expect.stringMatching(/controlMemory|device/),
    });
  }
});

test('ranks whose kernels run elsewhere do not fit together', async () => {
  await expect(openPair([{ device: 0, libraries: { cuda } }, {}])).rejects.toMatchObject({ code: 'EP_RENDEZVOUS' });
});
