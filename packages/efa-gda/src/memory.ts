/** How memories become reachable: each rank registers its part with its NIC, makes what signals arrive at, and tells the others. */
import { EpError, type Rank } from '@ep/core';
import type { NativeEfaNic } from '@ep/native';
import type { ReconnectedReach } from '@ep/native/ranks';

/** Throws `EP_CAPACITY`, before anything is made: every slot takes a completion counter and an endpoint of the device until its memory is closed. */
export function checkSignalSlots(nic: NativeEfaNic, signalSlots: number): void {
  const left = nic.signalSlotsLeft();
  if (signalSlots <= left) return;
  throw new EpError(
    'EP_CAPACITY',
    `allocate: ${signalSlots} signal slots take a completion counter and an endpoint each, and ${nic.device().name} has them for ${left}`,
    { context: { needed: signalSlots, available: left } },
  );
}

/** Nobody maps a peer's part. */
export function reachBy(nic: NativeEfaNic, rank: Rank, pins: boolean): ReconnectedReach {
  return {
    pins,
    byteLength: (signalSlots) => nic.partBytes(signalSlots),
    describe: (memory) => nic.addMemory(memory),
    connect: (memory, parts) => nic.route(memory, parts),
    failure: 'tell its NIC where the parts lie',
    addresses: (memory) => ({ bytes: memory.address(rank), signals: memory.signalAddress() }),
    release: (memory) => nic.removeMemory(memory),
    described: (memory) => nic.ownPart(memory),
    reconnect: (memory, parts) => nic.route(memory, parts),
    replace: (memory, peer, part) => nic.replacePart(memory, peer, part),
  };
}
