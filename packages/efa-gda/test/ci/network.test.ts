import { describeTransport } from '@ep/conformance';

describeTransport('efa-gda (soft, over a network)', {
  provider: { module: '@ep/efa-gda', name: 'efaGda.soft' },
  name: 'efa-gda:soft (network)',
  config: { network: { address: '127.0.0.1' } },
  otherConfig: { network: { address: '127.0.0.1', heartbeatMs: 300 } },
  worlds: [2, 3],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 2],
    ['processes', 3],
  ],
  expected: new URL('../network-conformance.expected.json', import.meta.url),
});
