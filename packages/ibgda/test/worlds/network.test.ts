import { describeTransport } from '@ep/conformance';

describeTransport('ibgda (soft, over a network)', {
  provider: { module: '@ep/ibgda', name: 'ibgda.soft' },
  name: 'ibgda:soft (network)',
  config: { network: { address: '127.0.0.1' } },
  otherConfig: { network: { address: '127.0.0.1' }, qpsPerPeer: 3 },
  worlds: [2, 3],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 2],
    ['processes', 3],
  ],
  expected: new URL('../network-conformance.expected.json', import.meta.url),
});
