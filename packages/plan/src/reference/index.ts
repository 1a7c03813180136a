export type { GradientForm, RankTensors, RowStorage } from './movement.js';
export { movePlan, sumReplicas } from './movement.js';
