export type { ElasticInit, EngineFactory, EngineInit } from './backends.js';
export type { DeviceElements } from './device/elements.js';
export type {
  Data,
  DeviceCall,
  Elastic,
  Elements,
  EngineCall,
  EngineEnd,
  GroupEngine,
  GroupView,
  MembershipCall,
  MembershipEnd,
  OpKind,
  OpTrace,
  PeerState,
  RecvCall,
  RecvEnd,
  SendCall,
} from './engine.js';
export { initProcessGroup } from './init.js';
export type * from './options.js';
export type { ProcessGroup } from './process-group.js';
export type { FlightRecorder } from './recorder/recorder.js';
export { dumpOnSignal } from './recorder/registry.js';
export type { CallEntry, CallOutcome, CallRecorder } from './recorder/types.js';
export { REDUCE_OPS, type ReduceOp, type ReduceOpName } from './reduce-op.js';
export type { CollectiveWork } from './work.js';
