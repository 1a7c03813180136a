/** The suite over shared memory and a NIC, composed into one transport: one memory, one pad, one handle. */
import { describeTransport } from '@ep/conformance';

const provider = new URL('./provider.mjs', import.meta.url).href;

for (const [title, name, called, worlds] of [
  ['shm + ibgda (soft)', 'shmIbgda', 'ibgda', [3, 4, 8]],
  ['shm + ibgda (hardware, over the shim)', 'shmIbgdaHardware', 'ibgda-hardware', [3, 4]],
  ['shm + efa-gda (soft)', 'shmEfa', 'efa', [3, 4, 8]],
  ['shm + fabric over TCP', 'shmFabric', 'fabric', [3, 4]],
] as const) {
  describeTransport(title, {
    provider: { module: provider, name },
    ...(called === 'ibgda-hardware' ? { name: 'compose(nvshmem:shm, ibgda:hardware (shim))' } : {}),
    otherConfig: { ranksOnHost: 99 },
    worlds,
    modes: ['threads', 'processes'],
    sample: called === 'ibgda' ? [['threads', 4]] : [['processes', 3]],
    expected: new URL(`../mixed-${called}.expected.json`, import.meta.url),
  });
}
