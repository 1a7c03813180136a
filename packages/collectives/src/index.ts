export type {
  Elements,
  EngineCall,
  EngineEnd,
  GroupEngine,
  GroupView,
  OpKind,
  OpTrace,
  RecvCall,
  RecvEnd,
  SendCall,
} from './engine.js';
export type { CallEntry, CallOutcome, CallRecorder } from './recorder/types.js';
export { REDUCE_OPS, type ReduceOp, type ReduceOpName } from './reduce-op.js';
