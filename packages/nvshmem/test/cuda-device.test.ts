/** Which GPU a rank names, over the stand-ins for CUDA and NVSHMEM, of which there is one. */
import { fileURLToPath } from 'node:url';
import { memoryStore } from '@ep/core';
import { expect, it } from 'vitest';
import { nvshmem } from '../src/index.js';

const standIn = (name: string): string =>
  fileURLToPath(new URL(`../../../native/build/Release/${name}`, import.meta.url));

process.env.EP_CUDA_PATH = standIn('libep_cuda_host.so');
process.env.EP_NVSHMEM_PATH = standIn('libep_nvshmem_host.so');
delete process.env.EP_CUDA_HOST_DEVICES;

it.each([nvshmem.cuda, nvshmem.nvshmem])(
  '$name: one that is not here is refused before ranks meet',
  async (provider) => {
    // Nobody else comes: who met first would wait for the other rank until its time is up.
    const member = { rank: 0, worldSize: 2, store: memoryStore() };
    const options = { signal: new AbortController().signal, timeoutMs: 2000, config: { device: 7 } };
    await expect(provider.open(member, options)).rejects.toMatchObject({
      code: 'EP_UNAVAILABLE',
      message: `${provider.name}: GPU 7 is not one of 1`,
    });
  },
);
