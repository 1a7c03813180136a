import { checkInt32Array, checkInteger, checkObject, describe, maxRows } from './check.js';
import { invalidArgument } from './error.js';

/** The arrays that a dispatch plan consists of; its pair tables follow from them. */
export const entryFields = [
  'entryOffsets',
  'dstRank',
  'srcOffset',
  'dstOffset',
  'length',
  'srcShard',
  'dstShard',
  'replica',
  'sendTokens',
  'recvTokens',
] as const;

const pairFields = ['offsets', 'peer', 'tokens', 'dispatches'] as const;
export const reductionFields = [
  'shardOffsets',
  'lengths',
  'homeRow',
  'slotOffsets',
  'replica',
  'denseRow',
  'compactRow',
] as const;
const shardFields = ['shardOffsets', 'lengths', 'document', 'position'] as const;
const layoutFields = [
  'groupOffsets',
  'shard',
  'kvStart',
  'kvLength',
  'cuSeqlensQ',
  'maxSeqlenQ',
  'maxSeqlenKv',
] as const;
const partFields = ['fwdQ', 'revQ', 'fwdKv', 'revKv', 'revKvCompact'] as const;

type Fields = Readonly<Record<string, unknown>>;

/** EP_INVALID_ARGUMENT unless it is an object with these Int32Arrays. */
export function checkArrays(value: unknown, name: string, fields: readonly string[]): void {
  checkObject(value, name);
  for (const field of fields) checkInt32Array((value as Fields)[field], `${name}.${field}`);
}

function checkWorldSize(value: unknown, name: string): void {
  checkInteger((value as Fields).worldSize, `${name}.worldSize`, 1, maxRows);
}

/** EP_INVALID_ARGUMENT unless it has the form of a dispatch plan. What the plan says is not doubted here: that is what `validate` does. */
export function checkDispatchPlan(plan: unknown, name = 'plan'): void {
  checkArrays(plan, name, entryFields);
  checkWorldSize(plan, name);
  checkArrays((plan as Fields).sent, `${name}.sent`, pairFields);
  checkArrays((plan as Fields).received, `${name}.received`, pairFields);
}

/** EP_INVALID_ARGUMENT unless it is one of `KvSharing`. */
export function checkSharing(sharing: unknown, name: string): void {
  if (sharing === 'each-query' || sharing === 'each-server') return;
  const found = describe(sharing);
  throw invalidArgument(`${name} must be 'each-query' or 'each-server', found ${found}`, { name, found });
}

export function checkLayout(layout: unknown, name = 'layout'): void {
  checkArrays(layout, name, layoutFields);
  const { cuSeqlensKv } = layout as Fields;
  if (cuSeqlensKv !== null) checkInt32Array(cuSeqlensKv, `${name}.cuSeqlensKv`);
  checkWorldSize(layout, name);
}

export function checkAttentionPlan(plan: unknown): void {
  checkObject(plan, 'plan');
  const fields = plan as Fields;
  checkArrays(fields.shards, 'plan.shards', shardFields);
  checkWorldSize(fields.shards, 'plan.shards');
  checkInt32Array(fields.serverRank, 'plan.serverRank');
  checkSharing(fields.sharing, 'plan.sharing');
  for (const part of partFields) checkDispatchPlan(fields[part], `plan.${part}`);
  checkLayout(fields.layout, 'plan.layout');
}

/** Either kind of plan; the layout is what tells them apart. */
export function checkPlan(plan: unknown): void {
  checkObject(plan, 'plan');
  if ('layout' in (plan as Fields)) checkAttentionPlan(plan);
  else checkDispatchPlan(plan);
}
