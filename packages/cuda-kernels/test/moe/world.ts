/** Ranks of one thread, over whatever transport: kernels run on threads of their own, so nobody blocks anybody. */

import { hostile } from '@ep/conformance/hostile';
import { byCapability, compose, type Member, memoryStore, prefixStore, type Rank } from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';
import type { DispatchTransport } from '../../src/index.js';

const limits = { signal: new AbortController().signal, timeoutMs: 60_000 };

/** Shared memory within a node of two ranks, a NIC between nodes. */
async function openMixed(nic: typeof ibgda.soft | typeof efaGda.soft, member: Member): Promise<DispatchTransport> {
  const of = (name: string): Member => ({ ...member, store: prefixStore(member.store, name) });
  const shm = await nvshmem.shm.open(of('shm'), limits);
  const far = await nic.open(of('nic'), limits);
  return compose([shm, far], byCapability(Array.from({ length: member.worldSize }, (_, rank) => Math.floor(rank / 2))));
}

const openers = {
  shm: (member: Member): Promise<DispatchTransport> => nvshmem.shm.open(member, limits),
  ibgda: (member: Member): Promise<DispatchTransport> => ibgda.soft.open(member, limits),
  efa: (member: Member): Promise<DispatchTransport> => efaGda.soft.open(member, limits),
  'shm+ibgda': (member: Member): Promise<DispatchTransport> => openMixed(ibgda.soft, member),
  'shm+efa': (member: Member): Promise<DispatchTransport> => openMixed(efaGda.soft, member),
  hostile: (member: Member): Promise<DispatchTransport> =>
    hostile.open(member, { ...limits, config: { seed: 5, maxDelayUs: 100 } }),
} as const;

export type WorldTransport = keyof typeof openers;

/** Runs `body` on every rank and closes what it opened. The first failure of a rank is thrown when all have ended. */
export async function onRanks<T>(
  worldSize: number,
  name: WorldTransport,
  body: (transport: DispatchTransport) => Promise<T>,
): Promise<T[]> {
  const store = memoryStore();
  const run = async (rank: Rank): Promise<T> => {
    const transport = await openers[name]({ rank, worldSize, store: store.handle() });
    try {
      return await body(transport);
    } finally {
      await transport.close();
    }
  };
  const ended = await Promise.allSettled(Array.from({ length: worldSize }, (_, rank) => run(rank)));
  for (const end of ended) if (end.status === 'rejected') throw end.reason;
  return ended.map((end) => (end as PromiseFulfilledResult<T>).value);
}
