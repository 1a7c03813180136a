/** The benchmarks by name. They live in the packages that they measure and are loaded when asked for. */
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { EpError } from '@ep/core';
import type { Bench } from './bench.js';
import { planBench } from './plan.js';

export const benchNames = ['plan', 'attention', 'shm'] as const;
export type BenchName = (typeof benchNames)[number];

/** Modules that export `bench`, a `Bench`. */
const modules: Readonly<Record<Exclude<BenchName, 'plan'>, string>> = {
  attention: '@ep/cuda-kernels/bench',
  shm: '@ep/nvshmem/bench',
};

export type LoadedBench =
  | { readonly available: true; readonly bench: Bench }
  | { readonly available: false; readonly reason: string };

export async function loadBench(name: BenchName): Promise<LoadedBench> {
  return name === 'plan' ? { available: true, bench: planBench } : loadModule(modules[name]);
}

/** A module that is not there is an answer; one that is there and breaks is an error. */
export async function loadModule(specifier: string): Promise<LoadedBench> {
  let path: string;
  try {
    path = createRequire(import.meta.url).resolve(specifier);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code !== 'ERR_PACKAGE_PATH_NOT_EXPORTED' && code !== 'MODULE_NOT_FOUND') throw error;
    return { available: false, reason: `${specifier} is not in this installation` };
  }
  const loaded = (await import(pathToFileURL(path).href)) as { readonly bench?: unknown };
  if (isBench(loaded.bench)) return { available: true, bench: loaded.bench };
  throw new EpError('EP_ABI_MISMATCH', `${specifier} must export bench {name, run}, found ${typeof loaded.bench}`);
}

function isBench(value: unknown): value is Bench {
  return typeof value === 'object' && value !== null && typeof (value as Partial<Bench>).run === 'function';
}
