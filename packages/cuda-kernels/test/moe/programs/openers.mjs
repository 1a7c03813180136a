/** How ranks of these tests open each way to reach each other: the tests' own ranks, and those of the programs. */
import { byCapability, compose, prefixStore } from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';

/** Shared memory within a node of two ranks, a NIC between nodes. */
const mixed = (nic) => async (member, limits) => {
  const of = (name) => ({ ...member, store: prefixStore(member.store, name) });
  const shm = await nvshmem.shm.open(of('shm'), limits);
  const far = await nic.open(of('nic'), limits);
  return compose([shm, far], byCapability(Array.from({ length: member.worldSize }, (_, rank) => Math.floor(rank / 2))));
};

export const openers = {
  shm: nvshmem.shm.open,
  ibgda: ibgda.soft.open,
  efa: efaGda.soft.open,
  'shm+ibgda': mixed(ibgda.soft),
  'shm+efa': mixed(efaGda.soft),
};

/** In the place of a rank that died. */
export const rejoiners = { shm: nvshmem.shm.rejoin, ibgda: ibgda.soft.rejoin };
