/** What can be chosen when the backing of NVIDIA's NVSHMEM is opened. */
import { checkInteger, invalid } from '@ep/core';
import { type CudaConfig, type ResolvedCudaConfig, resolveCudaConfig } from '../cuda/config.js';

const HEAP_BYTES = 256 * 2 ** 20;
const GRANULE = 512;

/** All ranks open the world, each in a process of its own. */
export interface NvshmemConfig extends CudaConfig {
  /** Bytes of every rank's symmetric heap, which device memory is cut from: 256 MiB unless given. The same on all ranks, and in all worlds that a process opens. */
  readonly heapBytes?: number;
  /** Of `libnvshmem_host.so.3`: EP_NVSHMEM_PATH, or where the loader searches, unless given. */
  readonly path?: string;
}

export interface ResolvedNvshmemConfig extends ResolvedCudaConfig {
  readonly heapBytes: number;
  readonly path: string | undefined;
}

/** Throws `EP_INVALID_ARGUMENT`, and `EP_UNSUPPORTED` for a world with empty places. */
export function resolveNvshmemConfig(config: NvshmemConfig | undefined, worldSize: number): ResolvedNvshmemConfig {
  const where = 'nvshmem:nvshmem configuration';
  const asked = checkInteger(config?.heapBytes ?? HEAP_BYTES, 'heapBytes', where, 1, 2 ** 46);
  const path = config?.path;
  if (path !== undefined && (typeof path !== 'string' || path === '')) {
    throw invalid('path', { where, expected: 'the path of libnvshmem_host.so.3', found: path });
  }
  return {
    ...resolveCudaConfig(config, worldSize, 'nvshmem:nvshmem'),
    heapBytes: Math.ceil(asked / GRANULE) * GRANULE,
    path,
  };
}
