// A rank that `ep run` has started on one of several hosts: meets the others by what the environment says, gathers over the fabric, and reduces in a group of it.
import { initProcessGroup } from '@ep/collectives';
import { openRendezvous, prefixStore, tensor } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import { endure } from './endure.mjs';

/** For the workload of that name. */
const trainingSizes = { hidden: 256, batch: 4 };
const { store, rank, worldSize, localWorldSize } = await openRendezvous('env://', { timeoutMs: 60_000 });
const attempt = process.env.TORCHELASTIC_RESTART_COUNT ?? '0';
const transport = await nvshmem.fabric.open(
  { rank, worldSize, store: prefixStore(store, `fabric ${attempt}`) },
  { signal: new AbortController().signal, config: { ranksOnHost: localWorldSize, timeoutMs: 60_000 } },
);
const gathered = await transport.world.allGather(Uint8Array.of(rank));
console.log('gathered', attempt, gathered.map(([other]) => other).join());
const group = await initProcessGroup({
  backend: transport,
  store: prefixStore(store, `group ${attempt}`),
  rank,
  worldSize,
});
const length = 100_003;
const values = tensor(
  'f32',
  [length],
  Float32Array.from({ length }, (_, i) => (i % 1009) * (rank + 1)),
);
await group.allReduce(values, { op: 'sum' });
const factor = (worldSize * (worldSize + 1)) / 2;
const wrong = values.data.findIndex((value, i) => value !== (i % 1009) * factor);
console.log('reduced', attempt, wrong < 0 ? 'right' : `wrong at ${wrong}`);
await group.destroy();
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const [what] = process.argv.slice(2);
if (what === 'stay' && attempt === '0') await pause(600_000);
else if (what !== undefined && what !== 'stay') {
  // At first until ep run ends it, then for a moment.
  const { left } = await endure({
    ...{ transport, store: prefixStore(store, `endure ${attempt}`), rank, worldSize },
    data: { workload: what, ...trainingSizes },
    ready: async () => console.log('ready', attempt),
    told: pause(attempt === '0' ? 600_000 : 500),
  });
  console.log('endured', attempt, left.join());
}
await transport.close();
await store.close();
