/** What the demo can run over. */
import { byCapability, compose, EpError, type Member, prefixStore, type Store, type Transport } from '@ep/core';
import { type EfaNeeds, efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';
import { gpuOfRank } from './devices.js';

/** What the step needs: dispatch posts puts and signals, verification reads rows. */
export type DemoTransport = Transport<EfaNeeds> & { barrier(): Promise<void> };

const limits = { signal: new AbortController().signal };

/** Ranks that the demo takes for those of one node. */
const NODE_RANKS = 2;

interface Readmission {
  readonly store: Store;
  /** Ranks that come in the place of dead ones; and dead ones that nobody comes for. */
  readonly joining: readonly number[];
  readonly without: readonly number[];
}

type ElasticTransport = DemoTransport & { readmit(options: Readmission): Promise<void> };

/** Shared memory within a node, queue pairs of a software NIC between nodes: one memory, one call. */
async function openMixed(
  member: Member,
  how: 'open' | 'rejoin' = 'open',
  timeoutMs?: number,
): Promise<ElasticTransport> {
  const within = (store: Store) => prefixStore(store, 'shm');
  const between = (store: Store) => prefixStore(store, 'nic');
  const options = { ...limits, ...(timeoutMs !== undefined && { timeoutMs }) };
  const shm = await nvshmem.shm[how]({ ...member, store: within(member.store) }, options);
  const nic = await ibgda.soft[how]({ ...member, store: between(member.store) }, options).catch(
    async (error: unknown) => {
      await shm.close();
      throw error;
    },
  );
  const nodes = Array.from({ length: member.worldSize }, (_, rank) => Math.floor(rank / NODE_RANKS));
  const transport = compose([shm, nic], byCapability(nodes));
  return Object.assign(transport, {
    barrier: () => shm.barrier(),
    readmit: async ({ store, ...ranks }: Readmission) => {
      await shm.readmit({ store: within(store), ...ranks });
      await nic.readmit({ store: between(store), ...ranks });
    },
  });
}

const openers = {
  shm: (member: Member): Promise<DemoTransport> => nvshmem.shm.open(member, limits),
  ibgda: (member: Member): Promise<DemoTransport> => ibgda.soft.open(member, limits),
  efa: (member: Member): Promise<DemoTransport> => efaGda.soft.open(member, limits),
  mixed: (member: Member): Promise<DemoTransport> => openMixed(member),
  // The ranks of the demo are of one machine.
  fabric: (member: Member): Promise<DemoTransport> =>
    nvshmem.fabric.open(member, { ...limits, config: { address: '127.0.0.1' } }),
} as const;

export type DemoTransportName = keyof typeof openers;

export const demoTransportNames = Object.keys(openers) as readonly DemoTransportName[];

export const openDemoTransport = (name: DemoTransportName, member: Member): Promise<DemoTransport> =>
  openers[name](member);

const rejoiners = {
  shm: (member: Member, timeoutMs: number): Promise<ElasticTransport> =>
    nvshmem.shm.rejoin(member, { ...limits, timeoutMs }),
  ibgda: (member: Member, timeoutMs: number): Promise<ElasticTransport> =>
    ibgda.soft.rejoin(member, { ...limits, timeoutMs }),
  efa: (member: Member, timeoutMs: number): Promise<ElasticTransport> =>
    efaGda.soft.rejoin(member, { ...limits, timeoutMs }),
  mixed: (member: Member, timeoutMs: number): Promise<ElasticTransport> => openMixed(member, 'rejoin', timeoutMs),
} as const;

/** Over these, another process can come in the place of a rank that died. */
export type ElasticTransportName = keyof typeof rejoiners;

export const isElastic = (name: DemoTransportName): name is ElasticTransportName => Object.hasOwn(rejoiners, name);

/** In the place of a rank that died. It waits for the others as long as they take to get there. */
export const rejoinDemoTransport = (name: ElasticTransportName, member: Member): Promise<ElasticTransport> =>
  rejoiners[name](member, 10 * 60_000);

export async function readmitDemoRanks(transport: DemoTransport, ranks: Readmission): Promise<void> {
  if (!('readmit' in transport)) throw new EpError('EP_UNSUPPORTED', `${transport.name} takes nobody in anew`);
  await (transport as ElasticTransport).readmit(ranks);
}

/** Where tensors lie and kernels run. */
export type DemoDevice = 'host' | 'cuda';

export type CudaDemoTransport = Awaited<ReturnType<typeof openCudaDemoTransport>>;

/** `gpus`: those that ranks take in turn. */
export const openCudaDemoTransport = (member: Member, gpus: readonly number[]) =>
  nvshmem.cuda.open(member, { ...limits, config: { device: gpuOfRank(gpus, member.rank) } });

/** Throws what the probe of GPUs says is missing, and what to do about it. */
export async function checkGpu(where: string): Promise<void> {
  const probe = await nvshmem.cuda.probe();
  if (probe.available) return;
  const { code, reason, remedy } = probe;
  throw new EpError(code, `${where}: ${reason}${remedy === undefined ? '' : `; ${remedy}`}`, { cause: probe.cause });
}
