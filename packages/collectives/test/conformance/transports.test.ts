/** The portable engine, over a transport that is hostile on purpose and over one that is not. */
import { bundleProgram } from '../bundle.js';
import { describeGroups } from './suite.js';

const module = await bundleProgram('conformance');

describeGroups('process groups over the hostile transport', module, {
  provider: { module: '@ep/conformance/hostile', name: 'hostile' },
  // Its delays are there to part what belongs together, not to make large messages last.
  config: { maxDelayUs: 100 },
  worlds: [1, 2, 3, 4],
  modes: ['threads', 'processes'],
  sample: [['threads', 3]],
  expected: new URL('../group-hostile.expected.json', import.meta.url),
});

describeGroups('process groups over nvshmem (shm)', module, {
  provider: { module: '@ep/nvshmem', name: 'nvshmem.shm' },
  worlds: [1, 2, 3, 4, 5],
  modes: ['threads', 'processes'],
  sample: [['processes', 2]],
  expected: new URL('../group-nvshmem.expected.json', import.meta.url),
});
