/** Finds NVIDIA's NVSHMEM: where the caller says, `EP_NVSHMEM_PATH`, else by its name as the loader searches for it. Nothing but `nvshmem.nvshmem` needs it. */
import type { NativeNvshmemLibrary } from './gpu.js';
import { type VendorLibrary, vendorLibrary } from './vendor-library.js';

export type Nvshmem = VendorLibrary<NativeNvshmemLibrary>;

const open = vendorLibrary<NativeNvshmemLibrary>({
  name: 'NVSHMEM',
  names: ['libnvshmem_host.so.3', 'libnvshmem_host.so'],
  remedy: 'libnvshmem_host.so.3 is in the Python wheel nvidia-nvshmem-cu13, EP_NVSHMEM_PATH says where',
  open: (binding, path) => new binding.NvshmemLibrary(path),
});

/** Throws `EP_UNAVAILABLE`, which says what was looked for and why it is of no use. Opening it begins nothing. */
export function openNvshmem(path?: string, env: NodeJS.ProcessEnv = process.env): Nvshmem {
  return open(path ?? (env.EP_NVSHMEM_PATH === '' ? undefined : env.EP_NVSHMEM_PATH));
}
