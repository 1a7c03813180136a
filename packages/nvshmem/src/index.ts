/** @ep/nvshmem: symmetric memory with one-sided put, signal, atomics and teams. */
export type { ShmConfig } from './config.js';
export { ShmEndpoint } from './endpoint.js';
export { ShmMemory } from './memory.js';
export { type ShmNeeds, shmCapabilities } from './probe.js';
export { nvshmem } from './provider.js';
export { ShmTeam } from './team.js';
export { ShmTransport } from './transport.js';
