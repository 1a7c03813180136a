import { existsSync, readdirSync, rmSync } from 'node:fs';
import { describeTransport } from '@ep/conformance';
import { afterAll } from 'vitest';

// Of libfabric, not of ours: ranks of one host, which this provider joins by memory and without a descriptor to sleep on.
// HAZARD: not as threads of one process: 1.17 ends that with SIGSEGV where one rank sends to another whose endpoint has just been closed.
describeTransport('nvshmem (fabric over libfabric shm)', {
  provider: { module: '@ep/nvshmem', name: 'nvshmem.fabric' },
  name: 'nvshmem:fabric (libfabric shm)',
  config: { provider: 'shm' },
  otherConfig: { provider: 'shm', heartbeatMs: 300 },
  worlds: [2, 3],
  modes: ['processes'],
  sample: [['processes', 3]],
  expected: new URL('../fabric-shm-conformance.expected.json', import.meta.url),
});

// The provider leaves the segments of a process that was killed.
afterAll(() => {
  if (!existsSync('/dev/shm')) return;
  for (const name of readdirSync('/dev/shm')) {
    const [, pid] = /^([0-9]+):[0-9]+:[0-9]+$/.exec(name) ?? [];
    if (pid !== undefined && !existsSync(`/proc/${pid}`)) rmSync(`/dev/shm/${name}`, { force: true });
  }
});
