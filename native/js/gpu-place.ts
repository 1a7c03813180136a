/** Which tensors of a device lie in memory of ours, for every package that hands them to kernels. */
import type { DeviceTensor } from '@ep/core';
import type { NativeGpuOperand } from './gpu.js';
import type { GpuCopier } from './gpu-copier.js';

/** Where a tensor's bytes lie natively: keeps the memory while a kernel uses it. */
export interface GpuPlace {
  readonly operand: NativeGpuOperand;
  readonly byteOffset: number;
  /** Copies between it and JS memory. */
  readonly copier: GpuCopier;
}

const places = new WeakMap<DeviceTensor, GpuPlace>();

/** Undefined for tensors of others: they are an address, which their owner keeps. */
export const gpuPlaceOf = (tensor: DeviceTensor): GpuPlace | undefined => places.get(tensor);

export function registerGpuTensor(tensor: DeviceTensor, place: GpuPlace): void {
  places.set(tensor, place);
}
