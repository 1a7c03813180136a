/** How ranks of these tests open each way to reach each other: the tests' own ranks, and those of the programs. */
import { byCapability, compose, prefixStore } from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';

/** Shared memory within a node of two ranks, a NIC between nodes. */
const mixed = (openShm, openNic) => async (member, limits) => {
  const of = (name) => ({ ...member, store: prefixStore(member.store, name) });
  const shm = await openShm(of('shm'), limits);
  const far = await openNic(of('nic'), limits);
  const nodes = Array.from({ length: member.worldSize }, (_, rank) => Math.floor(rank / 2));
  const readmit = async ({ store, ...options }) => {
    await shm.readmit({ ...options, store: prefixStore(store, 'shm') });
    await far.readmit({ ...options, store: prefixStore(store, 'nic') });
  };
  return Object.assign(compose([shm, far], byCapability(nodes)), { readmit });
};

/** By the path of EFA itself; its libfabric is the shim, behind which is a software EFA. */
const byShim = (operation) => async (member, limits) => {
  const { hardware } = await import('../../../../efa-gda/test/shim-provider.mjs');
  return hardware[operation](member, limits);
};

export const openers = {
  shm: nvshmem.shm.open,
  ibgda: ibgda.soft.open,
  efa: efaGda.soft.open,
  'efa (hardware)': byShim('open'),
  'shm+ibgda': mixed(nvshmem.shm.open, ibgda.soft.open),
  'shm+efa': mixed(nvshmem.shm.open, efaGda.soft.open),
};

/** In the place of a rank that died. */
export const rejoiners = {
  shm: nvshmem.shm.rejoin,
  ibgda: ibgda.soft.rejoin,
  efa: efaGda.soft.rejoin,
  'efa (hardware)': byShim('rejoin'),
  'shm+ibgda': mixed(nvshmem.shm.rejoin, ibgda.soft.rejoin),
  'shm+efa': mixed(nvshmem.shm.rejoin, efaGda.soft.rejoin),
};
