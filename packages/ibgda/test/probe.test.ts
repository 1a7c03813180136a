/** What a probe says is missing, and what to do about it. Every reason that a device can give is scripted in native/tests/dl/verbs_shim_test.cpp. */
import { EpError, memoryStore, type Probe } from '@ep/core';
import { type NativeIbgdaNic, native } from '@ep/native';
import { expect, test, vi } from 'vitest';
import { type DeviceIbgdaConfig, ibgda } from '../src/index.js';
import { notTried } from '../src/probe.js';

const missingOf = (probe: Probe): unknown => (probe.available ? 'nothing' : (probe.cause as EpError).context.missing);

test('a library that is not there, and one that is another', async () => {
  const absent: DeviceIbgdaConfig = { libraries: { ibverbs: 'libep-no-such-library.so.1' } };
  for (const provider of [ibgda.verbs, ibgda.hardware]) {
    const probe = await provider.probe(absent);
    expect(probe).toMatchObject({
      available: false,
      code: 'EP_UNAVAILABLE',
      remedy: expect.stringMatching(/libibverbs1/),
    });
    expect(missingOf(probe)).toBe('library');
    expect(!probe.available && probe.reason).toMatch(/cannot load libep-no-such-library/);
    const other = await provider.probe({ libraries: { ibverbs: 'libm.so.6', mlx5: 'libm.so.6' } });
    expect(missingOf(other)).toBe('symbol');
    expect(!other.available && other.reason).toMatch(/libm\.so\.6 lacks ibv_get_device_list@IBVERBS_1\.1/);
  }
});

test('what a probe says is missing is no failure of the process when it is opened', async () => {
  const config: DeviceIbgdaConfig = { libraries: { ibverbs: 'libep-no-such-library.so.1' } };
  for (const provider of [ibgda.verbs, ibgda.hardware]) {
    const member = { rank: 0, worldSize: 1, store: memoryStore().handle() };
    await expect(provider.open(member, { signal: AbortSignal.timeout(20_000), config })).rejects.toMatchObject({
      code: 'EP_UNAVAILABLE',
      scope: 'transport',
      message: expect.stringMatching(/cannot load libep-no-such-library/),
    });
  }
});

test('only hardware looks for libmlx5', async () => {
  const libraries = { mlx5: 'libep-no-such-library.so.1' };
  expect(missingOf(await ibgda.hardware.probe({ libraries }))).toBe('library');
  const verbs = await ibgda.verbs.probe({ libraries });
  if (!verbs.available) expect(verbs.reason).not.toMatch(/libep-no-such-library/);
});

test('a GPU that is not there is a mistake of the caller', async () => {
  for (const provider of [ibgda.verbs, ibgda.hardware]) {
    expect(await provider.probe({ gpu: '0000:00:1f.7' })).toMatchObject({
      available: false,
      code: 'EP_INVALID_ARGUMENT',
      reason: expect.stringMatching(/^no GPU has the PCI address '0000:00:1f\.7'; there (are none|are: )/),
    });
  }
});

test('where there is a device, it is named with its port, and otherwise the remedy is', async () => {
  for (const provider of [ibgda.verbs, ibgda.hardware]) {
    const probe = await provider.probe();
    if (probe.available)
      expect(probe.devices[0]?.detail).toMatchObject({ port: expect.any(Number), gid: expect.any(String) });
    else expect(probe.remedy).toMatch(/ibgda:soft runs anywhere/);
  }
});

test('a queue pair is connected to itself, so that a GID that leads nowhere shows here', async () => {
  const { hardware } = (await import('./shim-provider.mjs' as string)) as { readonly hardware: typeof ibgda.hardware };
  const { binding } = native();
  const Real = binding.IbgdaNic;
  const connect = vi.fn<(real: NativeIbgdaNic, connections: readonly Uint8Array[]) => void>();
  connect.mockImplementation((real, connections) => real.connect(connections));
  // The addon's own methods cannot be replaced; its classes can.
  const IbgdaNic = new Proxy(Real, {
    construct: (_, args: ConstructorParameters<typeof Real>) =>
      new Proxy(new Real(...args), {
        get: (nic, name) => {
          if (name === 'connect') return (connections: readonly Uint8Array[]) => connect(nic, connections);
          const value: unknown = Reflect.get(nic, name, nic);
          return typeof value === 'function' ? value.bind(nic) : value;
        },
      }),
  });
  Object.assign(binding, { IbgdaNic });
  try {
    expect(await hardware.probe()).toMatchObject({ available: true });
    expect(connect.mock.calls).toEqual([[expect.anything(), [expect.any(Uint8Array)]]]);
    const why = 'the way to rank 0 (fe80::1): ibv_create_ah: no route to host';
    connect.mockImplementation(() => {
      throw new EpError('EP_SYSTEM', why, { context: { errno: 113 } });
    });
    const probe = await hardware.probe();
    expect(probe).toMatchObject({
      available: false,
      code: 'EP_UNAVAILABLE',
      reason: expect.stringMatching(
        /^a queue pair of mlx5_soft0 port 1 cannot be connected to itself by GID .*: the way to rank 0/,
      ),
      remedy: expect.stringMatching(/gidIndex.*ibgda:soft runs anywhere/),
    });
    expect(missingOf(probe)).toBe('gid');
  } finally {
    Object.assign(binding, { IbgdaNic: Real });
  }
  expect(await hardware.probe()).toMatchObject({ available: true });
});

test('a place that would be nearer to the kernels, and why queues do not lie there', () => {
  const host = { where: 'host memory', possible: true, why: '' };
  const exported = { where: 'GPU memory by DMA-BUF', possible: true, why: '' };
  const pinned = {
    where: 'GPU memory by address',
    possible: false,
    why: 'the kernel module nvidia-peermem is not loaded',
  };
  expect(notTried([exported, pinned, host], 'host memory')).toEqual([
    "GPU memory by DMA-BUF: not tried: kernels of the host post, as no 'device' is given",
    'GPU memory by address: the kernel module nvidia-peermem is not loaded',
  ]);
  expect(notTried([exported, pinned, host], 'GPU memory by DMA-BUF')).toEqual([]);
  expect(notTried([host], 'host memory')).toEqual([]);
});

test('the device behind the shim', async () => {
  const { hardware } = (await import('./shim-provider.mjs' as string)) as { readonly hardware: typeof ibgda.hardware };
  const probe = await hardware.probe();
  expect(probe.available && probe.devices).toMatchObject([
    { name: 'mlx5_soft0', detail: { port: 1, link: 'ethernet', placement: 'host memory', passedOver: '' } },
  ]);
  expect(await hardware.probe({ devices: 'mlx5_9' })).toMatchObject({
    code: 'EP_UNAVAILABLE',
    reason: expect.stringMatching(/not in the device filter 'mlx5_9'/),
  });
});
