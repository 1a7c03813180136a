/** Whether there is a GPU that kernels can use, and what it offers. */
import { type Capabilities, EpError, isEpError, type Probe } from '@ep/core';
import { openGpus } from '@ep/native';
import { probeShm, shmCapabilities } from '../probe.js';

/** Those of shared memory, on the host and on the device: peers' parts are mapped for kernels as well. */
export function cudaCapabilities(): Capabilities {
  return { ...shmCapabilities(), spaces: new Set(['host', 'device'] as const) };
}

/** Ranks meet and agree as those of nvshmem:shm do; device memory comes on top. Never throws. */
export async function probeCuda(): Promise<Probe> {
  const host = await probeShm();
  if (!host.available) return host;
  try {
    const { devices, path } = openGpus();
    return {
      available: true,
      capabilities: cudaCapabilities(),
      devices: devices.map(({ name, peers, ...facts }) => ({
        name,
        detail: { ...facts, peers: peers.join(' '), library: path },
      })),
    };
  } catch (error) {
    const known = isEpError(error) ? error : new EpError('EP_SYSTEM', String(error), { cause: error });
    return {
      available: false,
      code: known.code,
      reason: known.message,
      remedy: 'needed only to run kernels on a GPU: a driver for CUDA 13 (nvidia-smi shows it) and libep_cuda.so',
      cause: error,
    };
  }
}
