/** @ep/cuda-kernels: dispatch and combine kernels; on host threads, or on GPUs where there are any. */
export {
  type AttentionDispatch,
  type AttentionShape,
  attentionLeaseBytes,
  bindAttention,
  type NamedLease,
} from './attention.js';
export { leaseBytesFor, type PartSpec, rowBytesOf } from './binding-spec.js';
export {
  type BoundCompat,
  type CompatDispatcher,
  type CompatOptions,
  type CompatResult,
  type CompatRunOptions,
  openCompatDispatcher,
} from './compat.js';
export { compatBytesFor } from './compat-base.js';
export {
  type AttentionBackwardTensors,
  type AttentionDType,
  type AttentionForwardTensors,
  type AttentionGroups,
  type AttentionOptions,
  attentionBackward,
  attentionForward,
  groupsOfServer,
} from './core-attention.js';
export { bindDeviceAttention, type DeviceAttentionDispatch, type NamedDeviceLease } from './cuda/attention.js';
export { CudaBuffer, readTensor, symmetricTensor, viewTensor, writeTensor } from './cuda/buffer.js';
export {
  type BoundDeviceCompat,
  type DeviceCompatDispatcher,
  type DeviceCompatOptions,
  type DeviceCompatResult,
  type DeviceCompatRunOptions,
  openDeviceCompatDispatcher,
} from './cuda/compat.js';
export {
  CudaAttention,
  type CudaAttentionBackwardTensors,
  type CudaAttentionForwardTensors,
  type CudaAttentionShape,
} from './cuda/core-attention.js';
export { CudaDevice, cudaDevices } from './cuda/device.js';
export type { BoundDeviceDispatch, DeviceDispatcher, DeviceLease } from './cuda/dispatcher.js';
export {
  type CudaExpertCapturedRows,
  type CudaExpertRows,
  CudaExperts,
  type CudaExpertWeights,
} from './cuda/experts.js';
export { CudaIpcBuffer } from './cuda/ipc.js';
export { DeviceMoeBuffer } from './cuda/moe-buffer.js';
export type {
  DeviceMoeCaptureCombineOptions,
  DeviceMoeCaptured,
  DeviceMoeCaptureHook,
  DeviceMoeCaptureOptions,
  DeviceMoeCombined,
  DeviceMoeCombineOptions,
  DeviceMoeDispatchOptions,
  DeviceMoeLayout,
  DeviceMoeOptions,
  DeviceMoeReceived,
} from './cuda/moe-received.js';
export { openDeviceDispatcher } from './cuda/open-dispatcher.js';
export { openDeviceMoeBuffer } from './cuda/open-moe-buffer.js';
export type { DeviceDispatcherOptions } from './cuda/options.js';
export { type CudaEvent, type CudaGraph, CudaStream, type CudaStreamOptions } from './cuda/stream.js';
export {
  type UnitedMoeBuffers,
  type UnitedMoeCaptureCombine,
  type UnitedMoeCaptureDispatch,
  type UnitedMoeCombine,
  type UnitedMoeDispatch,
  uniteMoeBuffers,
} from './cuda/united-moe-buffers.js';
export type { BoundDispatch, Dispatcher } from './dispatcher.js';
export type { DispatchTransport } from './dispatcher-base.js';
export { type HostEvent, HostStream, type HostStreamOptions } from './host-stream.js';
export type { Lease } from './lease.js';
export type { MoeBuffer } from './moe/buffer.js';
export { lossesText, type MoeLoss } from './moe/losses.js';
export { joinMoeBuffer, openMoeBuffer } from './moe/open-moe-buffer.js';
export type {
  MoeBufferOptions,
  MoeCallOptions,
  MoeCombineOptions,
  MoeDispatchOptions,
  MoeDType,
} from './moe/options.js';
export type { MoeCombined, MoeHandle, MoeHook, MoeLayout, MoeReceived } from './moe/received.js';
export { openDispatcher } from './open-dispatcher.js';
export type { DispatcherOptions, RunOptions } from './options.js';
