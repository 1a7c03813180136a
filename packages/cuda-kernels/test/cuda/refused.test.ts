// Over the stand-in for GPUs, of which there are two: a rank whose stream is of the wrong one.
import { fileURLToPath } from 'node:url';
import { type AllocateOptions, memoryStore, type SymmetricMemory } from '@ep/core';
import { nvshmem } from '@ep/nvshmem';
import { expect, it } from 'vitest';
import { openDeviceCompatDispatcher } from '../../src/cuda/compat.js';
import { CudaDevice } from '../../src/cuda/device.js';
import { openDeviceDispatcher } from '../../src/cuda/open-dispatcher.js';
import { openDeviceMoeBuffer } from '../../src/cuda/open-moe-buffer.js';
import type { CudaStream } from '../../src/cuda/stream.js';
import type { DispatchTransport } from '../../src/index.js';
import { replaced } from '../replaced.js';

process.env.EP_CUDA_PATH = fileURLToPath(
  new URL('../../../../native/build/Release/libep_cuda_host.so', import.meta.url),
);
process.env.EP_CUDA_HOST_DEVICES = '2';

const limits = { timeoutMs: 20_000 };
const moe = { mode: 'low-latency', experts: 4, maxTokens: 2, topK: 2, hidden: 64 } as const;

it.each<readonly [string, (transport: DispatchTransport, stream: CudaStream) => Promise<unknown>]>([
  ['openDeviceDispatcher', (to, stream) => openDeviceDispatcher(to, { ...limits, stream, leaseBytes: 4096 })],
  [
    'openDeviceCompatDispatcher',
    (to, stream) => openDeviceCompatDispatcher(to, { ...limits, stream, queryBytes: 4096 }),
  ],
  ['openDeviceMoeBuffer', (to, stream) => openDeviceMoeBuffer(to, { ...limits, ...moe, stream })],
])(
  '%s: the others hear which rank cannot, and why, and nothing stays open',
  { timeout: 60_000 },
  async (where, open) => {
    const store = memoryStore();
    const worldSize = 2;
    const run = async (rank: number): Promise<unknown> => {
      const memories: SymmetricMemory[] = [];
      const options = { signal: new AbortController().signal, ...limits };
      await using transport = await nvshmem.cuda.open({ rank, worldSize, store: store.handle() }, options);
      await using device = new CudaDevice(rank);
      const allocate = async (wanted: AllocateOptions) => {
        const memory = await transport.allocate(wanted);
        memories.push(memory);
        return memory;
      };
      const given: DispatchTransport = replaced(transport, { allocate });
      const error: unknown = await open(given, device.stream()).catch((reason: unknown) => reason);
      // Before the transport closes, which would close them, too.
      expect(memories.map(({ closed }) => closed)).toEqual([true, true]);
      return error;
    };
    const errors = await Promise.all([0, 1].map(run));
    const reason = `${where}: the stream is of GPU 1, nvshmem:cuda was opened for GPU 0`;
    expect(errors).toMatchObject([
      { code: 'EP_MISMATCH', message: `${where}: refused by rank 1 (${reason})` },
      { code: 'EP_INVALID_ARGUMENT', message: reason },
    ]);
  },
);
