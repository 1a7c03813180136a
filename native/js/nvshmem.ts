/** Finds NVIDIA's NVSHMEM: where the caller says, `EP_NVSHMEM_PATH`, else by its name as the loader searches for it. Nothing but `nvshmem.nvshmem` needs it. */
import { EpError } from '@ep/core';
import type { NativeNvshmemLibrary } from './gpu.js';
import { native } from './native.js';

const NAMES = ['libnvshmem_host.so.3', 'libnvshmem_host.so'] as const;

export interface Nvshmem {
  readonly library: NativeNvshmemLibrary;
  /** As it was opened: a path, or a name that the loader found. */
  readonly path: string;
  /** "3.4.5". */
  readonly version: string;
}

const opened = new Map<string, Nvshmem>();

/** Throws `EP_UNAVAILABLE`, which says what was looked for and why it is of no use. Opening it begins nothing. */
export function openNvshmem(path?: string, env: NodeJS.ProcessEnv = process.env): Nvshmem {
  const named = path ?? (env.EP_NVSHMEM_PATH === '' ? undefined : env.EP_NVSHMEM_PATH);
  const { binding } = native();
  const reasons: string[] = [];
  for (const name of named === undefined ? NAMES : [named]) {
    const known = opened.get(name);
    if (known !== undefined) return known;
    try {
      const library = new binding.NvshmemLibrary(name);
      const found = { library, path: name, version: library.version() };
      opened.set(name, found);
      return found;
    } catch (error) {
      reasons.push(error instanceof Error ? error.message : String(error));
    }
  }
  throw new EpError(
    'EP_UNAVAILABLE',
    `NVSHMEM cannot be used: ${reasons.join('; ')}; libnvshmem_host.so.3 is in the Python wheel nvidia-nvshmem-cu13, EP_NVSHMEM_PATH says where`,
    { context: { tried: named === undefined ? NAMES : [named] } },
  );
}
