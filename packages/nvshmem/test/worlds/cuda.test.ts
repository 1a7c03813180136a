import { fileURLToPath } from 'node:url';
import { describeTransport } from '@ep/conformance';

// Ranks inherit the environment: what a GPU would run, host threads run. The cases are of memory of the host, which JS reaches; e2e/gpu has those of the device's.
process.env.EP_CUDA_PATH = fileURLToPath(
  new URL('../../../../native/build/Release/libep_cuda_host.so', import.meta.url),
);

describeTransport('nvshmem (cuda, on a stand-in)', {
  provider: { module: '@ep/nvshmem', name: 'nvshmem.cuda' },
  otherConfig: { ranksOnHost: 99 },
  worlds: [2, 3, 4, 8],
  modes: ['threads', 'processes'],
  sample: [
    ['threads', 2],
    ['processes', 3],
  ],
  expected: new URL('../cuda-conformance.expected.json', import.meta.url),
});
