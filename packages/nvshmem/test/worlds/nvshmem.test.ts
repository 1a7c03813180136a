import { fileURLToPath } from 'node:url';
import { describeTransport } from '@ep/conformance';

const standIn = (name: string): string =>
  fileURLToPath(new URL(`../../../../native/build/Release/${name}`, import.meta.url));

// Ranks inherit the environment: what a GPU would run, host threads run, and PEs of NVSHMEM are processes that share files.
process.env.EP_CUDA_PATH = standIn('libep_cuda_host.so');
process.env.EP_NVSHMEM_PATH = standIn('libep_nvshmem_host.so');

describeTransport('nvshmem (nvshmem, on stand-ins)', {
  provider: { module: new URL('../standins/nvshmem-device.mjs', import.meta.url).href, name: 'provider' },
  otherConfig: { ranksOnHost: 99 },
  worlds: [2, 3, 4],
  modes: ['processes'],
  sample: [['processes', 3]],
  expected: new URL('../nvshmem-conformance.expected.json', import.meta.url),
});
