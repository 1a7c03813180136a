/** The benchmarks by name. They live in the packages that they measure, unless they need several of them, and are loaded when asked for. */
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { EpError } from '@ep/core';
import { fabricBench, fabricMissing } from '../bench-fabric/measure.js';
import { moeBench } from '../bench-moe/measure.js';
import { attentionBench } from './attention.js';
import type { Bench } from './bench.js';
import { collectivesBench } from './collectives.js';
import { efaBench } from './efa.js';
import { ibgdaBench } from './ibgda.js';
import { planBench } from './plan.js';
import { shmBench } from './shm.js';

export const benchNames = ['plan', 'attention', 'moe', 'shm', 'ibgda', 'efa', 'fabric', 'collectives'] as const;
export type BenchName = (typeof benchNames)[number];

interface Source {
  readonly module: string;
  /** The module must export this function. */
  readonly measure: string;
  readonly adapt: (module: never) => Bench;
}

/** What `moe` and `fabric` are compared with lies in several packages, none of which may import the others: they are measured from here. */
const sources: Readonly<Record<Exclude<BenchName, 'moe' | 'fabric'>, Source>> = {
  plan: { module: '@ep/plan/bench', measure: 'benchPlan', adapt: planBench },
  attention: { module: '@ep/cuda-kernels/bench', measure: 'benchAttention', adapt: attentionBench },
  shm: { module: '@ep/nvshmem/bench', measure: 'benchShm', adapt: shmBench },
  ibgda: { module: '@ep/ibgda/bench', measure: 'benchIbgda', adapt: ibgdaBench },
  efa: { module: '@ep/efa-gda/bench', measure: 'benchEfa', adapt: efaBench },
  collectives: { module: '@ep/collectives/bench', measure: 'benchCollectives', adapt: collectivesBench },
};

export type LoadedBench =
  | { readonly available: true; readonly bench: Bench }
  | { readonly available: false; readonly reason: string };

export async function loadBench(name: BenchName): Promise<LoadedBench> {
  if (name === 'moe') return { available: true, bench: moeBench };
  if (name !== 'fabric') return loadFrom(sources[name]);
  const reason = await fabricMissing();
  return reason === undefined ? { available: true, bench: fabricBench } : { available: false, reason };
}

/** A module that is not there is an answer; one that is there and breaks is an error. */
export async function loadFrom({ module, measure, adapt }: Source): Promise<LoadedBench> {
  let path: string;
  try {
    path = createRequire(import.meta.url).resolve(module);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code !== 'ERR_PACKAGE_PATH_NOT_EXPORTED' && code !== 'MODULE_NOT_FOUND') throw error;
    return { available: false, reason: `${module} is not in this installation` };
  }
  const loaded = (await import(pathToFileURL(path).href)) as Readonly<Record<string, unknown>>;
  if (typeof loaded[measure] === 'function') return { available: true, bench: adapt(loaded as never) };
  throw new EpError('EP_ABI_MISMATCH', `${module} must export a function ${measure}, found ${typeof loaded[measure]}`);
}
