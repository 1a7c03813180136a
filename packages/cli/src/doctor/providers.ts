/** Every transport that this installation knows, in the order in which they are shown. A new package adds its providers here. */
import type { Probe } from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';

export interface Probed {
  readonly name: string;
  readonly probe: Probe;
}

interface Provider {
  readonly name: string;
  probe(): Promise<Probe>;
}

const providers: readonly Provider[] = [
  nvshmem.shm,
  ibgda.soft,
  ibgda.hardware,
  ibgda.verbs,
  efaGda.soft,
  efaGda.hardware,
];

export function probeProviders(): Promise<readonly Probed[]> {
  return Promise.all(providers.map(async (provider) => ({ name: provider.name, probe: await provider.probe() })));
}

/** What of a GPU's own network card `ibgda:hardware` could use. */
export interface GpuReach {
  /** PCI address. */
  readonly gpu: string;
  readonly probe: Probe;
}

export function probeGpus(gpus: readonly string[]): Promise<readonly GpuReach[]> {
  return Promise.all(gpus.map(async (gpu) => ({ gpu, probe: await ibgda.hardware.probe({ gpu }) })));
}
