// The cases for GPUs over the host stand-in for one: everything above native/cuda/table.h is the product. `pnpm test:gpu` runs them on a GPU.
import { execFile } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { beforeAll, describe, expect, it } from 'vitest';
import { bundleSuite } from './bundle-suite.mjs';
import { cases } from './cases.mjs';
import { ncclCases } from './nccl-cases.mjs';
import { nvshmemCases } from './nvshmem-cases.mjs';
import { runRanks, valuesOf } from './ranks.mjs';
import { runSuite } from './suite.mjs';
import { standInPeer, torchCases } from './torch-cases.mjs';

const run = promisify(execFile);

// Ranks inherit the environment.
beforeAll(() => {
  const standIn = (/** @type {string} */ name) =>
    fileURLToPath(new URL(`../../native/build/Release/${name}`, import.meta.url));
  process.env.EP_CUDA_PATH = standIn('libep_cuda_host.so');
  process.env.EP_NCCL_PATH = standIn('libep_nccl_host.so');
  process.env.EP_NVSHMEM_PATH = standIn('libep_nvshmem_host.so');
});

describe('on host threads in place of a GPU', () => {
  for (const one of [...cases, ...ncclCases(3, false), ...nvshmemCases(false), ...torchCases(standInPeer, false)])
    it(one.name, { timeout: 180_000 }, () => one.run());

  for (const [place, placement] of [
    ['dma-buf', 'GPU memory by DMA-BUF'],
    ['gpu', 'GPU memory by address'],
    ['host', 'host memory'],
  ]) {
    it(`dispatch by queue pairs in ${placement}, by the path of hardware`, { timeout: 60_000 }, async () => {
      const data = { seeds: [4], controlMemory: [place] };
      const same = { kernels: 'cuda:0', placement, fallbacks: 0 };
      expect(valuesOf(await runRanks('nicDispatch', 2, { data }))).toEqual([same, same]);
    });
  }

  it('NVSHMEM that maps not all heaps gives kernels of ours no handle', { timeout: 60_000 }, async () => {
    const wanted = { EP_NVSHMEM_HOST_APART: '1', EP_NVSHMEM_HOST_TURNS: '1' };
    Object.assign(process.env, wanted);
    try {
      const reports = await runRanks('nvshmemApart', 2, { mode: 'processes', data: { nvshmem: true } });
      expect(valuesOf(reports)).toEqual([
        [2, 'EP_UNSUPPORTED', true],
        [1, 'EP_UNSUPPORTED', true],
      ]);
    } finally {
      for (const name of Object.keys(wanted)) delete process.env[name];
    }
  });

  // Within the time in which its looks come one after the other, and behind it, where they are apart.
  it.each([50, 1000])('NCCL takes %i us to launch a call', { timeout: 60_000 }, async (late) => {
    process.env.EP_NCCL_HOST_LAUNCH_US = String(late);
    try {
      const data = { nccl: true, dtypes: ['f32'], counts: [1, 333] };
      const values = valuesOf(await runRanks('ncclCollectives', 2, { mode: 'processes', data }));
      expect(values).toEqual(
        Array(2).fill([...Array(5).fill('EP_UNSUPPORTED'), ...Array(2).fill('EP_INVALID_ARGUMENT')]),
      );
    } finally {
      delete process.env.EP_NCCL_HOST_LAUNCH_US;
    }
  });

  // The whole suite runs over the stand-in in packages/collectives/test/device.
  it('a part of the suite of process groups, as it runs on a GPU', { timeout: 120_000 }, async () => {
    await bundleSuite();
    expect(await runSuite((_, index) => index % 13 === 1)).toBe(8);
  });

  it('a GPU that fails is listed beside those that work', async () => {
    const program = fileURLToPath(new URL('./devices.mjs', import.meta.url));
    const env = { ...process.env, EP_CUDA_HOST_BROKEN_DEVICE: '1' };
    const { stdout } = await run(process.execPath, [program], { env });
    expect(JSON.parse(stdout)).toEqual({
      devices: [
        { name: 'kernels on host threads (for tests)', opened: 'opened' },
        { name: '', unusable: 'looking at GPU 1: invalid device ordinal (CUDA error 101)', opened: 'EP_UNAVAILABLE' },
      ],
      available: true,
      spaces: ['host', 'device'],
    });
  });

  it('a launch that fails after the device has counted the call poisons the dispatcher', async () => {
    process.env.EP_CUDA_HOST_REFUSED_DISPATCH = '2';
    try {
      const failed = [
        '1 EP_SYSTEM true',
        'forward: launching a dispatch: invalid configuration argument (CUDA error 9)',
      ];
      expect(valuesOf(await runRanks('refusedLaunch', 2, { mode: 'processes' }))).toEqual([failed, failed]);
    } finally {
      delete process.env.EP_CUDA_HOST_REFUSED_DISPATCH;
    }
  });
});
