/** Device memory that another process shares. */
import { checkAttached, checkTimeout, defaultTimeoutMs, EpError, invalid, type WaitOptions } from '@ep/core';
import type { NativeGpuMemory } from '@ep/native';
import { EP_GPU_IPC_BYTES } from '@ep/native/abi';
import { CudaBuffer, type CudaBufferInit } from './buffer.js';

/** PyTorch writes a version and a kind before what the driver made. Version 3 (2.13) differs from 2 in the second kind only. */
const TORCH_HEAD_BYTES = 2;
const TORCH_VERSIONS = 3;
const TORCH_ALLOCATION = 'c'.charCodeAt(0);
const TORCH_EXPANDABLE = 'e'.charCodeAt(0);

/** The handle as the driver takes it. Throws `EP_INVALID_ARGUMENT`, `EP_UNSUPPORTED`, `EP_DETACHED`. */
export function checkIpcHandle(handle: Uint8Array): Uint8Array {
  const where = 'openIpc';
  const expected = `the ${EP_GPU_IPC_BYTES} bytes of cudaIpcGetMemHandle, or PyTorch's handle of ${EP_GPU_IPC_BYTES + TORCH_HEAD_BYTES}`;
  if (!(handle instanceof Uint8Array)) throw invalid('handle', { where, expected, found: handle });
  checkAttached(handle, where);
  if (handle.length === EP_GPU_IPC_BYTES) return handle;
  const [version = 0, kind = 0] = handle;
  const isTorch =
    handle.length > TORCH_HEAD_BYTES && version > 0 && (kind === TORCH_ALLOCATION || kind === TORCH_EXPANDABLE);
  if (!isTorch) throw invalid('handle', { where, expected, found: handle });
  if (kind === TORCH_EXPANDABLE) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `${where}: the memory lies in an expandable segment of PyTorch, which has no handle for CUDA IPC: start that process with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False`,
    );
  }
  if (version > TORCH_VERSIONS) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `${where}: PyTorch's handles of version ${version} are not known here, those up to ${TORCH_VERSIONS} are`,
      {
        context: { version },
      },
    );
  }
  const bytes = handle.subarray(TORCH_HEAD_BYTES);
  if (bytes.length !== EP_GPU_IPC_BYTES) throw invalid('handle', { where, expected, found: handle });
  return bytes;
}

/** Between looks at whether memory was unmapped, in milliseconds: a thread of the addon does it, and says so to nobody. */
const LOOK_MS = 1;

/** Memory of another process, mapped here. `close()` gives it up; it is unmapped once no stream uses it and no kernel of this process waits for peers. */
export class CudaIpcBuffer extends CudaBuffer {
  readonly #memory: NativeGpuMemory;

  constructor(init: CudaBufferInit) {
    super(init);
    this.#memory = init.memory;
  }

  /**
   * Resolves when this process does not map the memory any more, some time after `close()`: its owner may free it. Rejects with `EP_TIMEOUT`, or the caller's `signal.reason`. HAZARD: not before what kernels of this
   * process wait for, as it waits for their end.
   */
  async unmapped(options: WaitOptions = {}): Promise<void> {
    const where = 'unmapped';
    const timeoutMs = checkTimeout(options.timeoutMs ?? defaultTimeoutMs(), where);
    const deadline = performance.now() + timeoutMs;
    for (;;) {
      options.signal?.throwIfAborted();
      if (!this.#memory.mapped()) return;
      if (performance.now() >= deadline) {
        const why = this.closed ? 'a stream uses it, or a kernel of this process waits for peers' : 'it is open';
        throw new EpError('EP_TIMEOUT', `${where}: the memory is mapped still after ${timeoutMs} ms: ${why}`, {
          context: { timeoutMs },
        });
      }
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
  }
}
