/** What the demo can run over. */
import { EpError, type Member, type Transport } from '@ep/core';
import { type EfaNeeds, efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';

/** What the step needs: dispatch posts puts and signals, verification reads rows. */
export type DemoTransport = Transport<EfaNeeds> & { barrier(): Promise<void> };

const limits = { signal: new AbortController().signal };

const openers = {
  shm: (member: Member): Promise<DemoTransport> => nvshmem.shm.open(member, limits),
  ibgda: (member: Member): Promise<DemoTransport> => ibgda.soft.open(member, limits),
  efa: (member: Member): Promise<DemoTransport> => efaGda.soft.open(member, limits),
  // The ranks of the demo are of one machine.
  fabric: (member: Member): Promise<DemoTransport> =>
    nvshmem.fabric.open(member, { ...limits, config: { address: '127.0.0.1' } }),
} as const;

export type DemoTransportName = keyof typeof openers;

export const demoTransportNames = Object.keys(openers) as readonly DemoTransportName[];

export const openDemoTransport = (name: DemoTransportName, member: Member): Promise<DemoTransport> =>
  openers[name](member);

/** Where tensors lie and kernels run. */
export const demoDevices = ['host', 'cuda'] as const;
export type DemoDevice = (typeof demoDevices)[number];

export type CudaDemoTransport = Awaited<ReturnType<typeof openCudaDemoTransport>>;

export const openCudaDemoTransport = (member: Member) => nvshmem.cuda.open(member, limits);

/** Throws what the probe of GPUs says is missing, and what to do about it. */
export async function checkGpu(where: string): Promise<void> {
  const probe = await nvshmem.cuda.probe();
  if (probe.available) return;
  const { code, reason, remedy } = probe;
  throw new EpError(code, `${where}: ${reason}${remedy === undefined ? '' : `; ${remedy}`}`, { cause: probe.cause });
}
