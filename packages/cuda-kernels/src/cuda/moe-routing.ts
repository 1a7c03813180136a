/** The routing of a call on a GPU: its arrays as JS sees them, and the same bytes on the device, which are what kernels read and write. */
import type { DeviceTensor, DType } from '@ep/core';
import type { NativeGpuMoeBuffer } from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import { RoutingArrays } from '../moe/routing.js';
import { CudaBuffer } from './buffer.js';

export class DeviceRouting extends RoutingArrays {
  readonly #mirror: CudaBuffer;
  readonly #layout: Float64Array;

  constructor(buffer: NativeGpuMoeBuffer, memory: DeviceMemory) {
    super(buffer);
    this.#layout = this.native.layout();
    this.#mirror = new CudaBuffer({
      memory: this.native.mirror(),
      byteLength: this.native.window().byteLength,
      device: Object.freeze({ kind: 'cuda' as const, index: memory.device }),
      copier: memory.copier,
    });
  }

  /** On the device, the array of that number in `NativeMoeRouting.layout()`. */
  tensor(dtype: DType, array: number, shape: readonly number[]): DeviceTensor {
    return this.#mirror.tensor(dtype, shape, this.#layout[2 * array]!);
  }

  async close(): Promise<void> {
    await this.#mirror.close();
  }
}
