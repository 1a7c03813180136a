/** What can be chosen when the backing of GPUs is opened. */
import { checkInteger } from '@ep/core';
import { type ResolvedShmConfig, resolveConfig, type ShmConfig } from '../config.js';

export interface CudaConfig extends ShmConfig {
  /** Ordinal of this rank's GPU. Several ranks may share one. 0 unless given. */
  readonly device?: number;
}

export interface ResolvedCudaConfig extends ResolvedShmConfig {
  readonly device: number;
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function resolveCudaConfig(config: CudaConfig | undefined, worldSize: number): ResolvedCudaConfig {
  const device = checkInteger(config?.device ?? 0, 'device', 'nvshmem:cuda configuration');
  return { ...resolveConfig(config, worldSize), device };
}
