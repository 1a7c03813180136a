// Memory of another process, over the stand-in for a GPU, whose handles are CUDA's in all that is seen of them.
import { type ChildProcess, fork } from 'node:child_process';
import { once } from 'node:events';
import { fileURLToPath } from 'node:url';
import { dlpackTensor, memoryStore } from '@ep/core';
import { openGpus } from '@ep/native';
import { EP_GPU_IPC_BYTES, gpuMemoryHandleLayout } from '@ep/native/abi';
import type { DeviceMemory } from '@ep/native/ranks';
import { nvshmem } from '@ep/nvshmem';
import { afterAll, afterEach, beforeAll, expect, it } from 'vitest';
import { readTensor, writeTensor } from '../../src/cuda/buffer.js';
import { CudaDevice } from '../../src/cuda/device.js';

process.env.EP_CUDA_PATH = fileURLToPath(
  new URL('../../../../native/build/Release/libep_cuda_host.so', import.meta.url),
);

const BYTES = 5000;
const theirBytes = Uint8Array.from({ length: BYTES }, (_, i) => i * 7);

type Transport = Awaited<ReturnType<typeof nvshmem.cuda.open>>;
let transport: Transport;
let device: CudaDevice;
let owners: ChildProcess[] = [];
beforeAll(async () => {
  const member = { rank: 0, worldSize: 1, store: memoryStore() };
  transport = await nvshmem.cuda.open(member, { signal: new AbortController().signal, timeoutMs: 20_000 });
  device = new CudaDevice();
});
afterEach(() => {
  for (const owner of owners) owner.kill('SIGKILL');
  owners = [];
});
afterAll(async () => {
  await device.close();
  await transport.close();
});

interface Owner {
  readonly process: ChildProcess;
  readonly handle: Uint8Array;
  bytes(): Promise<Uint8Array>;
}

async function startOwner(): Promise<Owner> {
  const program = fileURLToPath(new URL('./ipc-owner.mjs', import.meta.url));
  const owner = fork(program, [String(BYTES)], { serialization: 'advanced' });
  owners.push(owner);
  const [{ handle }] = await once(owner, 'message');
  return {
    process: owner,
    handle,
    bytes: async () => {
      owner.send('bytes');
      const [{ bytes }] = await once(owner, 'message');
      return bytes;
    },
  };
}

const killed = async (owner: Owner): Promise<void> => {
  const ended = once(owner.process, 'exit');
  owner.process.kill('SIGKILL');
  await ended;
};

const ofTorch = (version: number, kind: string, handle: Uint8Array): Uint8Array =>
  Uint8Array.of(version, kind.charCodeAt(0), ...handle);

it('is opened by its handle, adopted, read and written', async () => {
  const owner = await startOwner();
  const held = openGpus().library.held();
  const theirs = device.openIpc(owner.handle);
  expect(theirs.byteLength).toBe(BYTES);
  expect(openGpus().library.held()).toBe(held + 1);

  const part = dlpackTensor({
    data: theirs.address,
    byte_offset: 400,
    device: { type: 2, id: 0 },
    dtype: { code: 2, bits: 32, lanes: 1 },
    shape: [10, 10],
    strides: [10, 1],
  });
  const memory = await transport.allocate({ byteLength: 64, signalSlots: 0, space: 'device' });
  const adopted = await transport.adopt(part);
  expect(adopted.byteLength).toBe(400);
  const found = new Uint8Array(400);
  await memory.read(adopted.region(0, 400), found);
  expect(found).toEqual(theirBytes.subarray(400, 800));
  await memory.write(new Uint8Array(100).fill(1), adopted.region(300, 100));
  // A tensor of ours, with all that this may do.
  const tensor = theirs.tensor('u8', [50], 1000);
  expect(await readTensor(tensor)).toEqual(theirBytes.slice(1000, 1050));
  await writeTensor(new Uint8Array(50).fill(2), tensor);
  const stream = device.stream();
  stream.copy(tensor, theirs.tensor('u8', [50], 2000));
  await stream.synchronize();
  const expected = theirBytes.slice().fill(1, 700, 800).fill(2, 1000, 1050).fill(2, 2000, 2050);
  expect(await owner.bytes()).toEqual(expected);

  await expect(theirs.unmapped({ timeoutMs: 20 })).rejects.toMatchObject({
    code: 'EP_TIMEOUT',
    message: 'unmapped: the memory is mapped still after 20 ms: it is open',
  });
  const region = adopted.region(0, 400);
  await adopted.close();
  await stream.close();
  await Promise.all([theirs.close(), theirs.close()]);
  await theirs.unmapped();
  await memory.close();
  await expect.poll(() => openGpus().library.held()).toBe(held);
  await expect(memory.read(region, found)).rejects.toMatchObject({ code: 'EP_CLOSED' });
  expect(() => theirs.tensor('u8', [1])).toThrow(expect.objectContaining({ code: 'EP_CLOSED' }));
  await expect(transport.adopt(part)).rejects.toMatchObject({ code: 'EP_UNSUPPORTED' });
  // In order: nobody maps it any more.
  owner.process.send('free');
  const [code] = await once(owner.process, 'exit');
  expect(code).toBe(0);
});

it('may be opened twice, each time until it is closed', async () => {
  const owner = await startOwner();
  const [first, second] = [device.openIpc(Buffer.from(owner.handle)), device.openIpc(ofTorch(3, 'c', owner.handle))];
  await first.close();
  await first.unmapped();
  expect(await readTensor(second.tensor('u8', [BYTES]))).toEqual(theirBytes);
  await second.close();
  await second.unmapped();
});

it('outlives the process that shared it, and is given up as ever', async () => {
  const owner = await startOwner();
  const theirs = device.openIpc(owner.handle);
  await killed(owner);
  await readTensor(theirs.tensor('u8', [BYTES]));
  await theirs.close();
  await theirs.unmapped();
  expect(() => device.openIpc(owner.handle)).toThrow(
    expect.objectContaining({
      code: 'EP_INVALID_ARGUMENT',
      message: expect.stringMatching(/^opening memory that another process shares .* there is no such memory/),
    }),
  );
});

it('is unmapped while its adoption is open: what still goes there is refused', async () => {
  const owner = await startOwner();
  const theirs = device.openIpc(owner.handle);
  const memory = await transport.allocate({ byteLength: 64, signalSlots: 0, space: 'device' });
  const adopted = await transport.adopt({ address: theirs.address, byteLength: 64 });
  await theirs.close();
  await theirs.unmapped();
  const late = memory.read(adopted.region(0, 64), new Uint8Array(64));
  await expect(late).rejects.toMatchObject({ code: 'EP_INVALID_ARGUMENT' });
  await adopted.close();
  await memory.close();
});

it('is closed with its device', async () => {
  const owner = await startOwner();
  const other = new CudaDevice();
  const theirs = other.openIpc(owner.handle);
  await other.close();
  expect(theirs.closed).toBe(true);
  await theirs.unmapped();
  expect(() => other.openIpc(owner.handle)).toThrow(expect.objectContaining({ code: 'EP_CLOSED' }));
});

it('refuses handles of this process, of other kinds, and what is none', async () => {
  const memory = await transport.allocate({ byteLength: 64, signalSlots: 0, space: 'device' });
  const { ipc } = gpuMemoryHandleLayout.offset;
  const own = (memory as DeviceMemory)
    .nativeMemory('handle')
    .handle()
    .slice(ipc, ipc + EP_GPU_IPC_BYTES);
  const held = openGpus().library.held();
  const cases: readonly (readonly [unknown, string, RegExp])[] = [
    [own, 'EP_INVALID_ARGUMENT', /the handle is of this process, which has the address$/],
    [ofTorch(2, 'c', own), 'EP_INVALID_ARGUMENT', /of this process/],
    [new Uint8Array(64), 'EP_INVALID_ARGUMENT', /there is no such memory on this host, or not any more/],
    [ofTorch(3, 'e', new Uint8Array(24)), 'EP_UNSUPPORTED', /PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False/],
    [ofTorch(4, 'c', own), 'EP_UNSUPPORTED', /PyTorch's handles of version 4 are not known here, those up to 3 are/],
    [ofTorch(2, 'x', own), 'EP_INVALID_ARGUMENT', /handle must be the 64 bytes/],
    [ofTorch(0, 'c', own), 'EP_INVALID_ARGUMENT', /handle must be the 64 bytes/],
    [ofTorch(2, 'c', own.subarray(1)), 'EP_INVALID_ARGUMENT', /handle must be the 64 bytes/],
    [new Uint8Array(), 'EP_INVALID_ARGUMENT', /handle must be the 64 bytes/],
    [own.subarray(1), 'EP_INVALID_ARGUMENT', /handle must be the 64 bytes/],
    [Array.from(own), 'EP_INVALID_ARGUMENT', /handle must be the 64 bytes/],
    ['handle', 'EP_INVALID_ARGUMENT', /handle must be the 64 bytes/],
    [undefined, 'EP_INVALID_ARGUMENT', /handle must be the 64 bytes/],
  ];
  for (const [handle, code, message] of cases) {
    expect(() => device.openIpc(handle as Uint8Array)).toThrow(
      expect.objectContaining({ code, message: expect.stringMatching(message) }),
    );
  }
  const gone = new Uint8Array(64);
  structuredClone(gone, { transfer: [gone.buffer] });
  expect(() => device.openIpc(gone)).toThrow(expect.objectContaining({ code: 'EP_DETACHED' }));
  expect(openGpus().library.held()).toBe(held);
  await memory.close();
});
