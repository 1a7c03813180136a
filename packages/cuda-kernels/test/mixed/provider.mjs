/** Shared memory within a node of two ranks, a NIC between nodes. Ranks import this. */
import { commonCapabilities, compose, prefixStore } from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { nvshmem } from '@ep/nvshmem';
import { hardware } from '../../../ibgda/test/shim-provider.mjs';

const loopback = { provider: 'tcp;ofi_rxm', address: '127.0.0.1' };

export const nodeOf = (rank) => Math.floor(rank / 2);

const mixed = (far) => {
  const members = [nvshmem.shm, far];
  return {
    name: `compose(${members.map(({ name }) => name).join(', ')})`,
    async probe() {
      const probes = await Promise.all(members.map((member) => member.probe()));
      const missing = probes.find(({ available }) => !available);
      if (missing) return missing;
      return {
        available: true,
        capabilities: commonCapabilities(probes.map(({ capabilities }) => capabilities)),
        devices: probes.flatMap(({ devices }) => devices),
      };
    },
    async open(member, options) {
      const opened = [];
      try {
        for (const one of members) {
          opened.push(await one.open({ ...member, store: prefixStore(member.store, one.name) }, options));
        }
      } catch (error) {
        for (const one of opened) await one.close();
        throw error;
      }
      const [near, nic] = opened;
      return compose([near, nic], (peer) => (nodeOf(peer) === nodeOf(member.rank) ? near : nic));
    },
  };
};

export const shmIbgda = mixed(ibgda.soft);
export const shmIbgdaHardware = mixed(hardware);
export const shmEfa = mixed(efaGda.soft);

const overLoopback = {
  name: nvshmem.fabric.name,
  probe: () => nvshmem.fabric.probe(loopback),
  open: (member, { config, ...options }) =>
    nvshmem.fabric.open(member, { ...options, config: { ...config, ...loopback } }),
};

/** Each node is a host: its ranks share memory with nobody else, and a network, the loopback interface here, joins the hosts. Chosen by what the transports say of hosts. */
export const shmFabric = {
  ...mixed(overLoopback),
  async open(member, options) {
    const { store, worldSize } = member;
    const fabric = await overLoopback.open({ ...member, store: prefixStore(store, 'fabric') }, options);
    try {
      const hosts = Array.from({ length: worldSize }, (_, rank) => rank - (rank % 2));
      const config = { ...options.config, hosts };
      const shm = await nvshmem.shm.open({ ...member, store: prefixStore(store, 'shm') }, { ...options, config });
      return compose([shm, fabric]);
    } catch (error) {
      await fabric.close();
      throw error;
    }
  },
};
