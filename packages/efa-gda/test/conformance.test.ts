import { describeTransport } from '@ep/conformance';

describeTransport('efa-gda (soft)', {
  provider: { module: '@ep/efa-gda', name: 'efaGda.soft' },
  otherConfig: { ranksOnHost: 99 },
  worlds: [2, 3, 4, 8],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 4],
    ['processes', 3],
  ],
  expected: new URL('./conformance.expected.json', import.meta.url),
});
