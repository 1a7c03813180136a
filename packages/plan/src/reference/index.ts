export type { AttentionBackward, AttentionForward, AttentionShape } from './attention.js';
export { attentionBackward, attentionForward } from './attention.js';
export type { MoeCombineOptions } from './moe.js';
export { moeCombine, moeDense, moeDispatch } from './moe.js';
export type { GradientForm } from './movement.js';
export { movePlan, sumReplicas } from './movement.js';
export type { CastOptions, CastPayload } from './payload.js';
export { castRow, uncastRow } from './payload.js';
export type { RankTensors, RowStorage } from './tensors.js';
