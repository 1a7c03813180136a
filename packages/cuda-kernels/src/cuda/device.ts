/** A GPU, and what is made on it. */
import { checkInteger, type Device, EpError, Resource } from '@ep/core';
import { GpuCopier, type GpuFacts, type Gpus, native, openGpus } from '@ep/native';
import type { AttentionGroups } from '../core-attention.js';
import { CudaBuffer, pinnedBytes } from './buffer.js';
import { CudaAttention, type CudaAttentionShape } from './core-attention.js';
import { CudaExperts, type CudaExpertWeights } from './experts.js';
import { CudaIpcBuffer, checkIpcHandle } from './ipc.js';
import { CudaStream, type CudaStreamOptions } from './stream.js';

/** The GPUs that kernels can run on here. Throws `EP_UNAVAILABLE`, which says what is missing. */
export function cudaDevices(): readonly GpuFacts[] {
  return openGpus().devices;
}

export class CudaDevice extends Resource implements Device {
  readonly kind = 'cuda' as const;
  readonly index: number;
  readonly facts: GpuFacts;
  readonly #gpus: Gpus;
  readonly #copier: GpuCopier;
  /** Throws `EP_UNAVAILABLE` or `EP_INVALID_ARGUMENT`. */
  constructor(index = 0) {
    super(`GPU ${index}`);
    this.#gpus = openGpus();
    this.index = checkInteger(index, 'index', 'CudaDevice', 0, this.#gpus.devices.length - 1);
    this.facts = this.#gpus.devices[this.index]!;
    const { unusable } = this.facts;
    if (unusable !== undefined) throw new EpError('EP_UNAVAILABLE', `CudaDevice: ${unusable}`, { context: { index } });
    this.#copier = GpuCopier.open(this.#gpus.library, this.index);
  }

  stream(options: CudaStreamOptions = {}): CudaStream {
    this.checkOpen('stream');
    return this.children.add(new CudaStream(this.#gpus.library, this.index, options));
  }

  /** Zeroed device memory. `EP_MEMORY_LIMIT` where there is not as much. */
  allocate(byteLength: number): CudaBuffer {
    this.checkOpen('allocate');
    const { library } = this.#gpus;
    checkInteger(byteLength, 'byteLength', 'allocate');
    const memory = new (native().binding.GpuMemory)(library, this.index, byteLength);
    return this.children.add(new CudaBuffer({ memory, byteLength, device: this, copier: this.#copier }));
  }

  /**
   * Memory of this GPU that another process of this host shares by a handle for CUDA IPC: the 64 bytes of `cudaIpcGetMemHandle`, or what PyTorch's `_share_cuda_()` returns as handle. The buffer begins where the other's
   * allocation does and ends with it. Throws `EP_INVALID_ARGUMENT` for what is no handle, for one of this process, of memory that is gone or lies on another GPU, and `EP_UNSUPPORTED` for handles of another kind.
   * HAZARD: as for `attention`; and the other process keeps the memory until `unmapped()` has resolved.
   */
  openIpc(handle: Uint8Array): CudaIpcBuffer {
    this.checkOpen('openIpc');
    const memory = new (native().binding.GpuMemory)(this.#gpus.library, this.index, checkIpcHandle(handle));
    const byteLength = memory.byteLength();
    return this.children.add(new CudaIpcBuffer({ memory, byteLength, device: this, copier: this.#copier }));
  }

  /**
   * Core attention of these groups, its lists copied to the device now. HAZARD: make it before kernels that wait for peers run: allocating may wait for them, and a peer's
   * kernel may wait for what this rank does next.
   */
  attention(groups: AttentionGroups, shape: CudaAttentionShape): CudaAttention {
    this.checkOpen('attention');
    return this.children.add(new CudaAttention(this.#gpus.library, this.index, groups, shape));
  }

  /** Experts with these weights, whose memory stays the caller's: it outlives the experts. Throws `EP_INVALID_ARGUMENT`. */
  experts(weights: CudaExpertWeights): CudaExperts {
    this.checkOpen('experts');
    return this.children.add(new CudaExperts(this.index, weights));
  }

  /** Zeroed, page-locked host memory, for copies that run beside kernels. Freed when nothing uses it any more. */
  pinned(byteLength: number): Uint8Array<ArrayBuffer> {
    this.checkOpen('pinned');
    checkInteger(byteLength, 'byteLength', 'pinned', 0, 2 ** 32);
    const memory = new (native().binding.GpuPinned)(this.#gpus.library, this.index, byteLength);
    return pinnedBytes(memory);
  }

  protected override async release(): Promise<void> {
    await this.#copier.close();
  }
}
