import { bundleProgram } from '../bundle.js';
import { describeGroups } from './suite.js';

describeGroups('process groups over shared memory', await bundleProgram('conformance'), {
  worlds: [1, 2, 3, 4, 5],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 4],
    ['processes', 3],
  ],
  expected: new URL('../group-shm.expected.json', import.meta.url),
});
