/** Every transport that this installation knows, in the order in which they are shown. A new package is added here, with all its backings. */
import type { Probe } from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { type GpuFacts, openGpus } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';

export interface Probed {
  readonly name: string;
  readonly probe: Probe;
}

interface Provider {
  readonly name: string;
  probe(): Promise<Probe>;
}

/** All that a package exports, so that none of them can be left out. Looking at GPUs makes no context on them. */
const providers: readonly Provider[] = [nvshmem, ibgda, efaGda].flatMap((backings): Provider[] =>
  Object.values(backings),
);

export function probeProviders(): Promise<readonly Probed[]> {
  return Promise.all(providers.map(async (provider) => ({ name: provider.name, probe: await provider.probe() })));
}

/** What of a GPU's own network card `ibgda:hardware` could use. */
export interface GpuReach {
  /** PCI address. */
  readonly gpu: string;
  readonly probe: Probe;
}

/** As kernels find them; none where they cannot run on GPUs. */
export function gpuDevices(): readonly GpuFacts[] {
  try {
    return openGpus().devices;
  } catch {
    return [];
  }
}

/** By PCI address. */
const ordinals = (): ReadonlyMap<string, number> =>
  new Map(gpuDevices().flatMap(({ pci, unusable }, device) => (unusable === undefined ? [[pci, device]] : [])));

/** Where kernels can run on a GPU, its queues are made there and taken away again: the only way to know. */
export function probeGpus(gpus: readonly string[]): Promise<readonly GpuReach[]> {
  const kernels = ordinals();
  return Promise.all(
    gpus.map(async (gpu) => {
      const device = kernels.get(gpu);
      return { gpu, probe: await ibgda.hardware.probe({ gpu, ...(device === undefined ? {} : { device }) }) };
    }),
  );
}
