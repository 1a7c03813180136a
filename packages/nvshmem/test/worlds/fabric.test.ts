import { describeTransport } from '@ep/conformance';

describeTransport('nvshmem (fabric over TCP)', {
  provider: { module: '@ep/nvshmem', name: 'nvshmem.fabric' },
  config: { provider: 'tcp;ofi_rxm', address: '127.0.0.1' },
  otherConfig: { provider: 'tcp;ofi_rxm', address: '127.0.0.1', heartbeatMs: 300 },
  worlds: [2, 3, 4, 8],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 2],
    ['processes', 3],
  ],
  expected: new URL('../fabric-conformance.expected.json', import.meta.url),
});
