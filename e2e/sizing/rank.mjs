// One rank over the fabric that says what it holds: before it opened anything, with a transport on which it has spoken to all others, and with a process group beside it.
import { readdirSync, readlinkSync } from 'node:fs';
import { initProcessGroup } from '@ep/collectives';
import { openTcpStore, prefixStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';

const { rank, worldSize, port, byteLength, signalSlots } = JSON.parse(process.argv[2]);
/** Descriptors by kind. */
function descriptors() {
  let [all, sockets] = [0, 0];
  for (const name of readdirSync('/proc/self/fd')) {
    try {
      const target = readlinkSync(`/proc/self/fd/${name}`);
      all++;
      if (target.startsWith('socket:')) sockets++;
    } catch {
      // That of the folder itself.
    }
  }
  return { all, sockets };
}
const before = descriptors();
const store = await openTcpStore({ host: '127.0.0.1', port, isServer: false, worldSize });
const transport = await nvshmem.fabric.open(
  { rank, worldSize, store: prefixStore(store, 'fabric') },
  {
    signal: new AbortController().signal,
    config: { provider: 'tcp;ofi_rxm', address: '127.0.0.1', ranksOnHost: worldSize, timeoutMs: 60_000 },
  },
);
const opened = transport.counts().registered;
const memory = await transport.allocate({ byteLength, signalSlots });
const allocated = transport.counts().registered;
for (let peer = 0; peer < worldSize; peer++) {
  if (peer === rank) continue;
  const endpoint = await transport.connect(peer);
  await endpoint.put(memory.local(0, 4096), memory.remote(peer, 0, 4096), { signal: { slot: 0, op: 'inc' } });
}
await memory.signals.until(0, { cmp: 'ge', value: BigInt(worldSize - 1) });
await transport.barrier();
const spoken = descriptors();
const group = await initProcessGroup({ backend: transport, store: prefixStore(store, 'group'), timeoutMs: 60_000 });
await group.barrier();
const grouped = transport.counts().registered;
await new Promise((resolve) => process.send({ before, spoken, opened, allocated, grouped }, resolve));
await group.destroy();
await transport.close();
await store.close();
process.disconnect();
