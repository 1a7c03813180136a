/** What can be chosen when the backing of GPUs is opened. */
import { checkInteger, EpError } from '@ep/core';
import { type ResolvedShmConfig, resolveConfig, type ShmConfig } from '../config.js';

/** All ranks, of one host, open the world. */
export interface CudaConfig extends Omit<ShmConfig, 'activeRanks' | 'hosts'> {
  /** Ordinal of this rank's GPU. Several ranks may share one. 0 unless given; `EP_UNAVAILABLE` where there is none of it. */
  readonly device?: number;
}

export interface ResolvedCudaConfig extends ResolvedShmConfig {
  readonly device: number;
}

/** Throws `EP_INVALID_ARGUMENT`, and `EP_UNSUPPORTED` for a world with empty places. */
export function resolveCudaConfig(
  config: CudaConfig | undefined,
  worldSize: number,
  name = 'nvshmem:cuda',
): ResolvedCudaConfig {
  if ((config as ShmConfig | undefined)?.activeRanks !== undefined) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `${name}: activeRanks: all ranks open a world of GPUs; nvshmem.shm has places for later ones`,
    );
  }
  if ((config as ShmConfig | undefined)?.hosts !== undefined) {
    throw new EpError('EP_UNSUPPORTED', `${name}: hosts: its ranks are of one host; nvshmem.shm has several`);
  }
  const device = checkInteger(config?.device ?? 0, 'device', `${name} configuration`);
  return { ...resolveConfig(config, worldSize), device };
}
