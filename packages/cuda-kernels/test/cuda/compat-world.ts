/** Plans, rows and ranks for tests of the per-token dispatch of device tensors: ranks of one thread, over the stand-in for GPUs. */
import { fileURLToPath } from 'node:url';
import {
  type DeviceTensor,
  type DType,
  elementBytes,
  elementCount,
  memoryStore,
  type OpenOptions,
  type Rank,
  viewStorage,
} from '@ep/core';
import { allocateHost } from '@ep/native';
import { nvshmem } from '@ep/nvshmem';
import { planAttention, shardsOfDocuments } from '@ep/plan';
import type { RowStorage } from '@ep/plan/reference';
import { writeTensor } from '../../src/cuda/buffer.js';
import {
  type DeviceCompatDispatcher,
  type DeviceCompatOptions,
  openDeviceCompatDispatcher,
} from '../../src/cuda/compat.js';
import { CudaDevice } from '../../src/cuda/device.js';
import { compatBytesFor, type DispatchTransport, type PartSpec } from '../../src/index.js';

export const built = (name: string) =>
  fileURLToPath(new URL(`../../../../native/build/Release/${name}`, import.meta.url));

export const limits: OpenOptions = { timeoutMs: 20_000, signal: new AbortController().signal };

/** Documents of shards with these lengths; shard i of document d is at home on rank d + i, and served by the rank of its number. */
export function planOf(worldSize: number, documents: readonly (readonly number[])[], sharing?: 'each-query') {
  const lengths = documents.flat();
  const offsets = [0];
  for (const document of documents) offsets.push(offsets.at(-1)! + document.length);
  const { shards } = shardsOfDocuments({
    worldSize,
    lengths: Int32Array.from(lengths),
    homeRank: Int32Array.from(documents.flatMap((document, d) => document.map((_, i) => (d + i) % worldSize))),
    documentOffsets: Int32Array.from(offsets),
  });
  const servers = Int32Array.from(lengths, (_, g) => g % worldSize);
  return planAttention(shards, servers, { sharing: sharing ?? 'each-server' });
}

export const documents = [
  [3, 2, 2],
  [4, 1],
  [2, 5],
  [6, 3, 1],
];

export function specsOf(plan: ReturnType<typeof planOf>, dtype: DType, rowElements: number) {
  const [query, keyValue] = [[2 * rowElements], [rowElements]];
  return {
    queries: [{ name: 'q', plan: plan.fwdQ, dtype, rowShape: query }],
    forward: [
      { name: 'q', plan: plan.fwdQ, dtype, rowShape: query },
      { name: 'kv', plan: plan.fwdKv, dtype, rowShape: keyValue },
    ],
    output: [{ name: 'o', plan: plan.revQ, dtype, rowShape: query }],
    gradient: [{ name: 'dKv', plan: plan.revKv, dtype, rowShape: keyValue }],
  } satisfies Record<string, readonly PartSpec[]>;
}

/** Of all dispatches. */
export const bytesFor = (specs: Readonly<Record<string, readonly PartSpec[]>>) => ({
  queryBytes: Math.max(...Object.values(specs).map((parts) => compatBytesFor(parts).queryBytes)),
  keyValueBytes: Math.max(...Object.values(specs).map((parts) => compatBytesFor(parts).keyValueBytes)),
});

/** What every rank sends, so that the oracle needs no communication. 0 is a row that nobody has sent. */
export function rowsOf({ plan, dtype, rowShape }: PartSpec, salt: number) {
  return Array.from(plan.sendTokens, (rows, rank) => {
    const elements = rows * rowShape[0]!;
    const data = viewStorage(dtype, allocateHost(8 * elements), 0, elements) as RowStorage;
    for (let i = 0; i < elements; i++) data[i] = 1 + ((rank * 37 + i * 7 + salt) % 101);
    return data;
  });
}

export interface Place {
  readonly transport: DispatchTransport;
  readonly device: CudaDevice;
  readonly rank: Rank;
  readonly open: (options: Omit<DeviceCompatOptions, 'stream'>) => Promise<DeviceCompatDispatcher>;
  readonly stream: ReturnType<CudaDevice['stream']>;
  readonly place: (dtype: DType, shape: readonly number[], data?: ArrayBufferView) => Promise<DeviceTensor>;
}

export async function onRanks<T>(worldSize: number, body: (at: Place) => Promise<T>): Promise<readonly T[]> {
  const store = memoryStore();
  const run = async (rank: Rank): Promise<T> => {
    await using transport = await nvshmem.cuda.open({ rank, worldSize, store: store.handle() }, limits);
    await using device = new CudaDevice(0);
    const stream = device.stream();
    return await body({
      ...{ transport, device, rank, stream },
      open: (options) => openDeviceCompatDispatcher(transport, { blocks: 3, ...limits, ...options, stream }),
      place: async (dtype, shape, data) => {
        const made = device.allocate(elementCount(shape) * elementBytes(dtype)).tensor(dtype, shape);
        if (data !== undefined) await writeTensor(data as Uint8Array, made);
        return made;
      },
    });
  };
  const ended = await Promise.allSettled(Array.from({ length: worldSize }, (_, rank) => run(rank)));
  for (const end of ended) if (end.status === 'rejected') throw end.reason;
  return ended.map((end) => (end as PromiseFulfilledResult<T>).value);
}

/** `body` begins at once. */
export const errorOf = async (body: () => Promise<unknown>): Promise<unknown> => {
  try {
    await body();
    return 'no error';
  } catch (error) {
    return error;
  }
};

export const bytesOf = (data: ArrayBufferView) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength).slice();
