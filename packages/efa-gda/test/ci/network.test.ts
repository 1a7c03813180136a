import { describeGin, describeTransport } from '@ep/conformance';

const common = {
  provider: { module: '@ep/efa-gda', name: 'efaGda.soft' },
  name: 'efa-gda:soft (network)',
  config: { network: { address: '127.0.0.1' } },
  worlds: [2, 3],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 2],
    ['processes', 3],
  ],
} as const;

describeTransport('efa-gda (soft, over a network)', {
  ...common,
  otherConfig: { network: { address: '127.0.0.1', heartbeatMs: 300 } },
  expected: new URL('../network-conformance.expected.json', import.meta.url),
});

describeGin('efa-gda (soft, over a network), GIN contexts', {
  ...common,
  expected: new URL('../network-gin-conformance.expected.json', import.meta.url),
});
