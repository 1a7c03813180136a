import { describeTransport } from '@ep/conformance';

describeTransport('hostile (engine)', {
  provider: { module: '@ep/conformance/hostile', name: 'hostile' },
  config: { seed: 7 },
  otherConfig: { seed: 8 },
  worlds: [2, 3, 4, 8],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 3],
    ['processes', 2],
  ],
  expected: new URL('./hostile.expected.json', import.meta.url),
});
