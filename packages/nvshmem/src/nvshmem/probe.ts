/** Whether NVIDIA's NVSHMEM is here and a GPU for it, and what it offers. */
import { type Capabilities, EpError, isEpError, type Need, type Probe } from '@ep/core';
import { openGpus, openNvshmem } from '@ep/native';
import { probeCuda } from '../cuda/probe.js';
import type { NvshmemConfig } from './config.js';

/** No `atomics`: of fetching ones the host starts none, they are for kernels. */
export type NvshmemNeeds = Exclude<Need, 'atomics'>;

const NEEDS: readonly NvshmemNeeds[] = ['bundled', 'prior', 'inc', 'add', 'set', 'get', 'load-store'];

export function nvshmemCapabilities(): Capabilities {
  return {
    needs: new Set<Need>(NEEDS),
    maxMessageBytes: Number.MAX_SAFE_INTEGER,
    maxSignalSlots: 2 ** 32,
    initiators: new Set(['host', 'device'] as const),
    spaces: new Set(['host', 'device'] as const),
  };
}

/**
 * Opens the library, and begins nothing. Never throws. HAZARD: without a GPU NVSHMEM ends the process that begins with it, so GPUs are looked for first.
 */
export async function probeNvshmem(config?: NvshmemConfig): Promise<Probe> {
  const gpus = await probeCuda();
  if (!gpus.available) return gpus;
  try {
    const { version, path } = openNvshmem(config?.path);
    const { path: kernels } = openGpus();
    return {
      available: true,
      capabilities: nvshmemCapabilities(),
      devices: gpus.devices.map(({ name, detail }) => ({
        name,
        detail: { ...detail, library: kernels, nvshmem: version, nvshmemPath: path },
      })),
    };
  } catch (error) {
    const known = isEpError(error) ? error : new EpError('EP_SYSTEM', String(error), { cause: error });
    return {
      available: false,
      code: known.code,
      reason: known.message,
      remedy:
        "needed only for symmetric memory by NVIDIA's own library: pip install nvidia-nvshmem-cu13, and set EP_NVSHMEM_PATH to its lib/libnvshmem_host.so.3; nvshmem.cuda does without",
      cause: error,
    };
  }
}
