/** The suite over shared memory and a NIC, composed into one transport: one memory, one pad, one handle. */
import { describeTransport } from '@ep/conformance';

const provider = new URL('./provider.mjs', import.meta.url).href;

for (const [title, name, expected] of [
  ['shm + ibgda (soft)', 'shmIbgda', '../mixed-ibgda.expected.json'],
  ['shm + efa-gda (soft)', 'shmEfa', '../mixed-efa.expected.json'],
] as const) {
  describeTransport(title, {
    provider: { module: provider, name },
    otherConfig: { ranksOnHost: 99 },
    worlds: [3, 4, 8],
    modes: ['threads', 'processes'],
    sample: [
      ['threads', 4],
      ['processes', 3],
    ],
    expected: new URL(expected, import.meta.url),
  });
}
