/** @ep/native: the one addon under all @ep packages, its loader and its typed surface. */
export {
  EP_DTYPE_BF16,
  EP_DTYPE_F16,
  EP_DTYPE_F32,
  EP_GROUP_EXCHANGE,
  EP_GROUP_FOLD,
  EP_GROUP_FOLD_ALL,
  EP_GROUP_MOST_BLOCKS,
  EP_GROUP_MOST_RANKS,
  EP_LIFE_ALIVE,
  EP_LIFE_DEAD,
  EP_MOE_BF16,
  EP_MOE_CACHED,
  EP_MOE_F8_F32,
  EP_MOE_F8_F32_POW2,
  EP_MOE_F8_UE8M0,
  EP_MOE_F16,
  EP_MOE_F32,
  EP_MOE_HIGH_THROUGHPUT,
  EP_MOE_LOGFMT10,
  EP_MOE_LOW_LATENCY,
  EP_MOE_NON_TEMPORAL,
  EP_MOE_NON_TEMPORAL_OUT,
  EP_MOE_RANK_LEAVES,
  EP_MOE_RANK_MASKED,
  EP_MOE_RENORMALISE,
  EP_MOE_SIGNAL_KINDS,
  EP_NIC_FOUND_INDEX,
  EP_NIC_FOUND_QPN,
  EP_NIC_FOUND_SYNDROME,
  EP_NIC_FOUND_VENDOR,
  EP_STAGE_ARRIVAL,
  EP_STAGE_NIC,
  EP_STAGE_PLACE,
  EP_STAGE_RANGE,
  EP_STAGE_SHARING,
  EP_STAGE_SOURCE,
  EP_TEAM_EXCHANGE_BYTES,
  gpuMemoryHandleLayout,
  groupHeadLayout,
  segmentHandleLayout,
} from './abi.gen.js';
export type * from './binding.js';
export type * from './collective.js';
export type * from './efa.js';
export type * from './fabric.js';
export { type CallFrame, RepeatFrame } from './frame.js';
export type { GinCall } from './gin.js';
export type * from './gpu.js';
export { GpuCopier } from './gpu-copier.js';
export { type Gpus, openGpus } from './gpu-library.js';
export { type GpuPlace, gpuPlaceOf, registerGpuTensor } from './gpu-place.js';
export { allocateHost, type NativePlace, nativePlaceOf, registerWindow } from './host-memory.js';
export type * from './ibgda.js';
export { type LoadAttempt, loadBinding, platformPackage } from './load.js';
export type * from './moe.js';
export { type Native, native } from './native.js';
export { type Nccl, openNccl } from './nccl.js';
export { type Nvshmem, openNvshmem } from './nvshmem.js';
export { codeOfStatus, nativeError, Operations } from './operations.js';
export { unavailable, unavailableHere } from './unavailable.js';
