/** @ep/nvshmem: symmetric memory with one-sided put, signal, atomics and teams. */
export {
  DeviceMemory,
  LinkedTeam as FabricTeam,
  RankMemory as ShmMemory,
  RankTeam as ShmTeam,
} from '@ep/native/ranks';
export type { ShmConfig } from './config.js';
export type { CudaConfig } from './cuda/config.js';
export { CudaTransport } from './cuda/transport.js';
export { ShmEndpoint } from './endpoint.js';
export type { FabricConfig } from './fabric/config.js';
export { FabricEndpoint } from './fabric/endpoint.js';
export { type FabricNeeds, fabricCapabilities } from './fabric/probe.js';
export { FabricTransport } from './fabric/transport.js';
export type { NvshmemConfig } from './nvshmem/config.js';
export { NvshmemEndpoint } from './nvshmem/endpoint.js';
export { type NvshmemNeeds, nvshmemCapabilities } from './nvshmem/probe.js';
export { NvshmemTransport } from './nvshmem/transport.js';
export { type ShmNeeds, shmCapabilities } from './probe.js';
export { nvshmem } from './provider.js';
export type { IntegerDType, ReducedDType } from './shmem/collectives.js';
export type { Context } from './shmem/context.js';
export type { AtomicDType, ExtendedAtomicDType } from './shmem/element.js';
export { type HeapOptions, type InitOptions, type Shmem, shmemInit, shmemOn } from './shmem/shmem.js';
export type { SignalOperation } from './shmem/signal.js';
export type { LocalArray } from './shmem/space.js';
export { type Element, SymmetricArray } from './shmem/symmetric.js';
export { Team } from './shmem/teams.js';
export type { Selection, WaitDType, WaitManyOptions } from './shmem/wait.js';
export { ShmTransport } from './transport.js';
