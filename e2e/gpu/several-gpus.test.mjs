// The cases for several GPUs over a stand-in that presents two: a fixed sample, and all of them under EP_TEST_FULL=1. `pnpm test:gpu` runs them where GPUs are.
import { fileURLToPath } from 'node:url';
import { beforeAll, describe, expect, it } from 'vitest';
import { runRanks } from './ranks.mjs';
import { severalGpus, smallMeasurements } from './several-gpus.mjs';

const full = process.env.EP_TEST_FULL === '1';

// Ranks inherit the environment.
beforeAll(() => {
  process.env.EP_CUDA_PATH = fileURLToPath(new URL('../../native/build/Release/libep_cuda_host.so', import.meta.url));
  process.env.EP_CUDA_HOST_DEVICES = '2';
});

describe('on host threads in place of two GPUs', () => {
  for (const { name, run, sample } of severalGpus(2)) {
    if (full || sample) it(name, { timeout: 180_000 }, async () => void (await run()));
  }

  for (const { name, run } of smallMeasurements) {
    it(name, { timeout: 180_000 }, async () => expect(await run()).toMatch(/\d us/));
  }

  it('GPUs that do not reach each other are named, on each rank', async () => {
    process.env.EP_CUDA_HOST_NO_PEERS = '1';
    try {
      const data = { seeds: [200], dtype: 'f32', qRow: 4, kvRow: 4, spread: true };
      const reports = await runRanks('oracle', 2, { mode: 'processes', data });
      const far = (/** @type {number} */ rank) => ({
        code: 'EP_INVALID_ARGUMENT',
        message: expect.stringMatching(
          `rank ${1 - rank} has its memory on the GPU at 0000:0${1 - rank}:00.0, which GPU ${rank} at 0000:0${rank}:00.0 does not reach: no peer access`,
        ),
      });
      expect(reports.map(({ error }) => error)).toEqual([far(0), far(1)]);
    } finally {
      delete process.env.EP_CUDA_HOST_NO_PEERS;
    }
  });
});
