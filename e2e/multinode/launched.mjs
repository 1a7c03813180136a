// A rank that `ep run` has started on one of several hosts: meets the others by what the environment says, and gathers over the fabric.
import { openRendezvous, prefixStore } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';

const { store, rank, worldSize, localWorldSize } = await openRendezvous('env://', { timeoutMs: 60_000 });
const attempt = process.env.TORCHELASTIC_RESTART_COUNT;
const transport = await nvshmem.fabric.open(
  { rank, worldSize, store: prefixStore(store, `fabric ${attempt}`) },
  { signal: new AbortController().signal, config: { ranksOnHost: localWorldSize, timeoutMs: 60_000 } },
);
const gathered = await transport.world.allGather(Uint8Array.of(rank));
console.log('gathered', attempt, gathered.map(([other]) => other).join());
if (process.argv[2] === 'stay' && attempt === '0') await new Promise((resolve) => setTimeout(resolve, 600_000));
await transport.close();
await store.close();
