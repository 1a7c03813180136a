export { type BufferPin, checkAttached, checkFixed, pinBuffer } from './buffers.js';
export { byCapability } from './by-capability.js';
export * from './compose.js';
export { ComposedAdoption, ComposedMemory } from './composed-memory.js';
export * from './diagnostics.js';
export * from './dlpack.js';
export * from './dtype.js';
export * from './env.js';
export * from './errors.js';
export { barrier, exchange, type Meeting, type MeetingOptions } from './exchange.js';
export * from './loop.js';
export * from './ranks.js';
export * from './rendezvous.js';
export * from './rendezvous-url.js';
export * from './rounds.js';
export * from './scope.js';
export { type JobSecret, jobKey, type ResolvedSecret, resolveJobSecret, secretMissing } from './secret.js';
export * from './store.js';
export { FileStore, openFileStore } from './stores/file.js';
export { MemoryStore, memoryStore } from './stores/memory.js';
export { prefixStore } from './stores/prefix.js';
export { openTcpStore, type TcpStoreOptions } from './stores/tcp/open.js';
export {
  openTcpStoreServer,
  type TcpStoreServer,
  type TcpStoreServerOptions,
} from './stores/tcp/server.js';
export type { TcpStoreLimits } from './stores/tcp/session.js';
export { TcpStore } from './stores/tcp/store.js';
export * from './stream.js';
export * from './tensor.js';
export * from './transport.js';
export * from './waiting.js';
export * from './work.js';
