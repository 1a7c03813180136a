/** Finds NVIDIA's NCCL: where the caller says, `EP_NCCL_PATH`, else by its name as the loader searches for it. Nothing but groups over NCCL needs it. */
import { EpError } from '@ep/core';
import type { NativeNcclLibrary } from './gpu.js';
import { native } from './native.js';

const NAMES = ['libnccl.so.2', 'libnccl.so'] as const;

export interface Nccl {
  readonly library: NativeNcclLibrary;
  /** As it was opened: a path, or a name that the loader found. */
  readonly path: string;
  /** "2.28.9". */
  readonly version: string;
}

const opened = new Map<string, Nccl>();

/** Throws `EP_UNAVAILABLE`, which says what was looked for and why it is of no use. */
export function openNccl(path?: string, env: NodeJS.ProcessEnv = process.env): Nccl {
  const named = path ?? (env.EP_NCCL_PATH === '' ? undefined : env.EP_NCCL_PATH);
  const { binding } = native();
  const reasons: string[] = [];
  for (const name of named === undefined ? NAMES : [named]) {
    const known = opened.get(name);
    if (known !== undefined) return known;
    try {
      const library = new binding.NcclLibrary(name);
      const found = { library, path: name, version: library.version() };
      opened.set(name, found);
      return found;
    } catch (error) {
      reasons.push(error instanceof Error ? error.message : String(error));
    }
  }
  throw new EpError(
    'EP_UNAVAILABLE',
    `NCCL cannot be used: ${reasons.join('; ')}; libnccl.so.2 is in NVIDIA's package libnccl2 and in the Python wheel nvidia-nccl-cu13, EP_NCCL_PATH says where`,
    { context: { tried: named === undefined ? NAMES : [named] } },
  );
}
