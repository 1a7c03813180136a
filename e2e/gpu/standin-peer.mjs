// What torch-peer.py does, by a process of Node over the stand-in for a GPU.
import { createInterface } from 'node:readline';
import { memoryStore } from '@ep/core';
import { EP_GPU_IPC_BYTES, gpuMemoryHandleLayout } from '@ep/native/abi';
import { nvshmem } from '@ep/nvshmem';
import { fillRows } from '../attention/plans.mjs';

/** The storage lies behind so many bytes, as in a segment of PyTorch. */
const OFFSET = 512;

const { signal } = new AbortController();
const transport = await nvshmem.cuda.open({ rank: 0, worldSize: 1, store: memoryStore() }, { signal });
let memory;
let region;
let shape;

async function fill({ rank, salt }) {
  const [rows, columns] = shape;
  const values = fillRows(new Float32Array(rows * columns), rank, columns, salt);
  await memory.write(new Uint8Array(values.buffer), region);
  return {};
}

const commands = {
  fill,
  share: async ({ rows, columns, rank, salt }) => {
    shape = [rows, columns];
    const rowBytes = columns * Float32Array.BYTES_PER_ELEMENT;
    const bytes = (rows + 1) * rowBytes;
    memory = await transport.allocate({ byteLength: OFFSET + bytes, signalSlots: 0, space: 'device' });
    region = memory.local(OFFSET + rowBytes, rows * rowBytes);
    await fill({ rank, salt });
    const { ipc } = gpuMemoryHandleLayout.offset;
    const handle = memory
      .nativeMemory('handle')
      .handle()
      .slice(ipc, ipc + EP_GPU_IPC_BYTES);
    const tensor = {
      data: rowBytes,
      device: { type: 2, id: 0 },
      dtype: { code: 2, bits: 32, lanes: 1 },
      shape,
      strides: [columns, 1],
      byte_offset: 0,
    };
    const text = Buffer.from([3, 'c'.charCodeAt(0), ...handle]).toString('hex');
    return { handle: text, offset: OFFSET, bytes, tensor };
  },
  bytes: async () => {
    const bytes = new Uint8Array(region.byteLength);
    await memory.read(region, bytes);
    return { bytes: Buffer.from(bytes).toString('hex') };
  },
  release: async () => {
    await memory.close();
    return { left: 0 };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { do: what, ...rest } = JSON.parse(line);
  console.log(JSON.stringify(await commands[what](rest)));
}
await transport.close();
