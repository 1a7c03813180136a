/** A process that shares device memory by a handle for CUDA IPC, over the stand-in: says the handle, then the bytes whenever it is asked for them. Its parent ends it. */
import { memoryStore } from '@ep/core';
import { EP_GPU_IPC_BYTES, gpuMemoryHandleLayout } from '@ep/native/abi';
import { nvshmem } from '@ep/nvshmem';

const [byteLength] = process.argv.slice(2).map(Number);
const transport = await nvshmem.cuda.open(
  { rank: 0, worldSize: 1, store: memoryStore() },
  { signal: new AbortController().signal, timeoutMs: 20_000 },
);
const memory = await transport.allocate({ byteLength, signalSlots: 0, space: 'device' });
const all = memory.local(0, byteLength);
await memory.write(
  Uint8Array.from({ length: byteLength }, (_, i) => i * 7),
  all,
);
const { ipc } = gpuMemoryHandleLayout.offset;
const handle = memory
  .nativeMemory('handle')
  .handle()
  .slice(ipc, ipc + EP_GPU_IPC_BYTES);
process.on('message', async (message) => {
  if (message === 'free') {
    await memory.close();
    await transport.close();
    process.disconnect();
    return;
  }
  const bytes = new Uint8Array(byteLength);
  await memory.read(all, bytes);
  process.send({ bytes });
});
process.send({ handle });
