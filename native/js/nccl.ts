/** Finds NVIDIA's NCCL: where the caller says, `EP_NCCL_PATH`, else by its name as the loader searches for it. Nothing but groups over NCCL needs it. */
import type { NativeNcclLibrary } from './gpu.js';
import { type VendorLibrary, vendorLibrary } from './vendor-library.js';

export type Nccl = VendorLibrary<NativeNcclLibrary>;

const open = vendorLibrary<NativeNcclLibrary>({
  name: 'NCCL',
  names: ['libnccl.so.2', 'libnccl.so'],
  remedy:
    "libnccl.so.2 is in NVIDIA's package libnccl2 and in the Python wheel nvidia-nccl-cu13, EP_NCCL_PATH says where",
  open: (binding, path) => new binding.NcclLibrary(path),
});

/** Throws `EP_UNAVAILABLE`, which says what was looked for and why it is of no use. */
export function openNccl(path?: string, env: NodeJS.ProcessEnv = process.env): Nccl {
  return open(path ?? (env.EP_NCCL_PATH === '' ? undefined : env.EP_NCCL_PATH));
}
