/** How memories become reachable: each rank registers its part with its NIC and tells the others address and key. */
import type { Rank } from '@ep/core';
import type { NativeIbgdaNic } from '@ep/native';
import { ibgdaRemoteLayout } from '@ep/native/abi';
import type { DeviceReach, RenewableReach } from '@ep/native/ranks';

/** Of a rank that is not here, or whose part is not known yet: what JS puts there is lost. */
const NOWHERE = new Uint8Array(ibgdaRemoteLayout.byteLength);

/** Nobody maps a peer's part. */
export function reachBy(nic: NativeIbgdaNic, rank: Rank, pins: boolean): RenewableReach {
  return {
    pins,
    byteLength: () => ibgdaRemoteLayout.byteLength,
    describe: (memory) => nic.addMemory(memory),
    connect: (memory, remotes) =>
      nic.route(
        memory,
        remotes.map((remote) => (remote.byteLength === 0 ? NOWHERE : remote)),
      ),
    failure: 'tell its NIC where the parts lie',
    addresses: (memory) => ({ bytes: memory.address(rank), signals: memory.signalAddress() }),
    release: (memory) => nic.removeMemory(memory),
    described: (memory) => nic.ownPart(memory),
    replace: (memory, peer, remote) => nic.replaceRemote(memory, peer, remote),
  };
}

/** The same for kernels on a GPU: every part lies where the kernels' queues do. */
export function deviceReachBy(nic: NativeIbgdaNic): DeviceReach {
  return {
    byteLength: ibgdaRemoteLayout.byteLength,
    make: (byteLength, signalSlots) => nic.deviceMemory(byteLength, signalSlots),
    describe: (memory) => nic.addDeviceMemory(memory),
    connect: (memory, handles, remotes) => nic.routeDevice(memory, handles, remotes),
    release: (memory) => nic.removeDeviceMemory(memory),
  };
}
