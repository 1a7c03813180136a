/**
 * Finds `libep_cuda.so`, the kernels' build for GPUs: `EP_CUDA_PATH`, then this package's own build (`build:cuda`), then beside the prebuilt addon. It is opened at
 * the first use; nothing else needs it.
 */
import { existsSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { EpError } from '@ep/core';
import type { GpuFacts, NativeGpuLibrary } from './gpu.js';
import { platformPackage } from './load.js';
import { native } from './native.js';

export interface Gpus {
  readonly library: NativeGpuLibrary;
  readonly path: string;
  readonly devices: readonly GpuFacts[];
}

const NAME = 'libep_cuda.so';

/** Where it is; undefined, with the places that were looked at, where it is not. */
function findLibrary(env: NodeJS.ProcessEnv, tried: string[]): string | undefined {
  const named = env.EP_CUDA_PATH;
  if (named !== undefined && named !== '') return named;
  const own = join(dirname(fileURLToPath(import.meta.url)), '..', 'build', 'cuda', NAME);
  if (existsSync(own)) return own;
  tried.push(own);
  const prebuilt = `${platformPackage()}/${NAME}`;
  try {
    return createRequire(import.meta.url).resolve(prebuilt);
  } catch {
    tried.push(prebuilt);
    return undefined;
  }
}

let opened: Gpus | undefined;

/** The GPUs of this machine, those that fail among them unless all do; none is touched by this. Throws `EP_UNAVAILABLE`, which says what is missing, or `EP_ABI_MISMATCH`. */
export function openGpus(env: NodeJS.ProcessEnv = process.env): Gpus {
  if (opened !== undefined) return opened;
  const { binding } = native();
  const tried: string[] = [];
  const path = findLibrary(env, tried);
  if (path === undefined) {
    throw new EpError(
      'EP_UNAVAILABLE',
      `the kernels' build for GPUs is not here; looked for ${tried.join(' and ')}: build it where nvcc is with \`pnpm --filter @ep/native build:cuda\`, or set EP_CUDA_PATH`,
      { context: { tried } },
    );
  }
  try {
    const library = new binding.GpuLibrary(path);
    const devices = library.devices();
    const reasons = devices.flatMap(({ unusable }) => unusable ?? []);
    if (reasons.length === devices.length) throw new Error(reasons.join('; '));
    opened = { library, path, devices };
    return opened;
  } catch (error) {
    if (error instanceof EpError && error.code === 'EP_ABI_MISMATCH') throw error;
    const reason = error instanceof Error ? error.message : String(error);
    throw new EpError('EP_UNAVAILABLE', `no GPU can be used: ${reason}`, { context: { path }, cause: error });
  }
}
