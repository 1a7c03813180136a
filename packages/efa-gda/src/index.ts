/** @ep/efa-gda: endpoints of EFA that kernels post to themselves; its requests and completions, as bytes and as values. */
export type { GinCall } from '@ep/native';
export { AdoptedRange } from '@ep/native/ranks';
export type { EfaConfig, HardwareEfaConfig, SoftEfaConfig } from './config.js';
export { EfaEndpoint } from './endpoint.js';
export { EfaGin, type GinOptions, type GinSharing, type ValuesOutcome } from './gin.js';
export { type EfaBacking, type EfaNeeds, efaCapabilities } from './probe.js';
export { efaGda } from './provider.js';
export { EfaTransport } from './transport.js';
export * from './wire/index.js';
