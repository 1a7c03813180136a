/** Contexts of the GIN device API: what they promise. That the cases find contexts which break it is shown in test/ci. */
import { describeGin } from '@ep/conformance';

describeGin('efa-gda (soft), GIN contexts', {
  provider: { module: '@ep/efa-gda', name: 'efaGda.soft' },
  config: { seed: 3 },
  worlds: [2, 3, 4],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 3],
    ['processes', 2],
  ],
  expected: new URL('./gin-conformance.expected.json', import.meta.url),
});
