/** Kinds, dtypes and reductions as the addon numbers them: native/core/collective/run.hpp and reduce.hpp. */
import type { DType } from '@ep/core';
import type { OpKind, PeerState } from '../engine.js';
import { REDUCE_OPS, type ReduceOp } from '../reduce-op.js';

export const KINDS = [
  'barrier',
  'broadcast',
  'all-reduce',
  'reduce',
  'all-gather',
  'gather',
  'scatter',
  'reduce-scatter',
  'all-to-all',
] as const satisfies readonly OpKind[];

export const TYPES = [
  'f64',
  'f32',
  'f16',
  'bf16',
  'i64',
  'u64',
  'i32',
  'u32',
  'i16',
  'u16',
  'i8',
  'u8',
  'f8e4m3',
  'f8e5m2',
  'ue8m0',
] as const satisfies readonly DType[];

const numbered = <K extends string>(names: readonly K[]) =>
  Object.fromEntries(names.map((name, code) => [name, code])) as Record<K, number>;

export const KIND_CODES = numbered<OpKind>(KINDS);
export const TYPE_CODES = numbered<DType>(TYPES);
const REDUCTION_CODES = numbered(REDUCE_OPS);

export function reductionCode(op: ReduceOp | undefined): number {
  if (op === undefined) return 0;
  return REDUCTION_CODES[typeof op === 'string' ? op : op.op];
}

/** What the addon counts as a kind, too. */
export const MEMBERSHIP = KINDS.length;

/** As the addon numbers them: `peer_state` of layout.hpp. */
export const PEER_STATES = ['absent', 'connected', 'joining', 'active'] as const satisfies readonly PeerState[];

export const factorOf = (op: ReduceOp | undefined): number => (typeof op === 'object' ? op.factor : 0);
