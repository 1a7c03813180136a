/** @ep/ibgda: mlx5 queue pairs posted by kernels. */
export type { ControlMemory } from '@ep/native';
export { AdoptedRange } from '@ep/native/ranks';
export type { DeviceIbgdaConfig, IbgdaConfig, SoftIbgdaConfig } from './config.js';
export type { IbgdaConnection, IbgdaPart } from './connection.js';
export { IbgdaEndpoint, type SwapMasks } from './endpoint.js';
export type { ExchangingMember, IbgdaExchange, IbgdaIntroduction } from './introduction.js';
export { type IbgdaBacking, type IbgdaNeeds, ibgdaCapabilities } from './probe.js';
export { type IbgdaMember, ibgda } from './provider.js';
export { IbgdaTransport } from './transport.js';
export * from './wire/index.js';
