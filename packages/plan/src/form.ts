import { checkInt32Array, checkInteger, checkObject, describe, maxRows } from './check.js';
import { invalidArgument } from './error.js';

const dispatchFields = ['dstRank', 'srcOffset', 'dstOffset', 'length', 'srcShard', 'dstShard', 'replica'] as const;
/** The arrays that a dispatch plan consists of; its pair tables follow from them. */
export const entryFields = ['entryOffsets', ...dispatchFields, 'sendTokens', 'recvTokens'] as const;
const partFields = ['fwdQ', 'revQ', 'fwdKv', 'revKv', 'revKvCompact'] as const;

type Fields = Readonly<Record<string, unknown>>;

/** The Int32Arrays of an object, which have so many elements; without `length`, as many as the first of them. Returns how many. */
function checkArrays(value: unknown, name: string, fields: readonly string[], length?: number): number {
  let expected = length;
  for (const field of fields) expected = checkInt32Array((value as Fields)[field], `${name}.${field}`, expected).length;
  return expected!;
}

function checkWorldSize(value: unknown, name: string): number {
  checkObject(value, name);
  return checkInteger((value as Fields).worldSize, `${name}.worldSize`, 1, maxRows);
}

/**
 * EP_INVALID_ARGUMENT unless it has the form of a dispatch plan: its arrays are there, are alive (else EP_DETACHED), and are as long as they
 * have to be. In constant time: what they say is not doubted here, that is what `validate` does.
 */
export function checkDispatchPlan(plan: unknown, name = 'plan'): void {
  const worldSize = checkWorldSize(plan, name);
  const fields = plan as Fields;
  checkArrays(fields, name, dispatchFields);
  checkInt32Array(fields.entryOffsets, `${name}.entryOffsets`, worldSize + 1);
  checkArrays(fields, name, ['sendTokens', 'recvTokens'], worldSize);
  for (const side of ['sent', 'received'] as const) {
    const pairs = fields[side];
    checkObject(pairs, `${name}.${side}`);
    checkArrays(pairs, `${name}.${side}`, ['peer', 'tokens', 'dispatches']);
    checkInt32Array((pairs as Fields).offsets, `${name}.${side}.offsets`, worldSize + 1);
  }
}

/** As `checkDispatchPlan`, for a `GradientReduction`. */
export function checkReduction(reduction: unknown, name: string): void {
  const worldSize = checkWorldSize(reduction, name);
  const fields = reduction as Fields;
  const shards = checkArrays(fields, name, ['lengths', 'homeRow']);
  checkInt32Array(fields.shardOffsets, `${name}.shardOffsets`, worldSize + 1);
  checkArrays(fields, name, ['replica', 'denseRow', 'compactRow']);
  checkInt32Array(fields.slotOffsets, `${name}.slotOffsets`, shards + 1);
}

/** EP_INVALID_ARGUMENT unless it is one of `KvSharing`. */
export function checkSharing(sharing: unknown, name: string): void {
  if (sharing === 'each-query' || sharing === 'each-server') return;
  const found = describe(sharing);
  throw invalidArgument(`${name} must be 'each-query' or 'each-server', found ${found}`, { name, found });
}

/** As `checkDispatchPlan`, for an `AttentionLayout`. */
export function checkLayout(layout: unknown, name = 'layout'): void {
  const worldSize = checkWorldSize(layout, name);
  const fields = layout as Fields;
  const groups = checkArrays(fields, name, ['shard', 'kvStart', 'kvLength']);
  checkInt32Array(fields.groupOffsets, `${name}.groupOffsets`, worldSize + 1);
  checkInt32Array(fields.cuSeqlensQ, `${name}.cuSeqlensQ`, groups + worldSize);
  if (fields.cuSeqlensKv !== null) checkInt32Array(fields.cuSeqlensKv, `${name}.cuSeqlensKv`, groups + worldSize);
  checkArrays(fields, name, ['maxSeqlenQ', 'maxSeqlenKv'], worldSize);
}

/** As `checkDispatchPlan`, for an `AttentionPlan`, whose parts are all of one world and of the same shards. */
export function checkAttentionPlan(plan: unknown): void {
  checkObject(plan, 'plan');
  const fields = plan as Fields;
  const worldSize = checkWorldSize(fields.shards, 'plan.shards');
  const shards = checkArrays(fields.shards, 'plan.shards', ['lengths', 'document', 'position']);
  checkInt32Array((fields.shards as Fields).shardOffsets, 'plan.shards.shardOffsets', worldSize + 1);
  checkInt32Array(fields.serverRank, 'plan.serverRank', shards);
  checkSharing(fields.sharing, 'plan.sharing');
  for (const part of partFields) checkDispatchPlan(fields[part], `plan.${part}`);
  checkReduction(fields.reduction, 'plan.reduction');
  checkLayout(fields.layout, 'plan.layout');
  for (const part of [...partFields, 'reduction', 'layout'] as const) {
    const found = (fields[part] as Fields).worldSize;
    if (found === worldSize) continue;
    const name = `plan.${part}.worldSize`;
    throw invalidArgument(`${name} must be ${worldSize} as in plan.shards, found ${describe(found)}`, {
      name,
      expected: worldSize,
      found,
    });
  }
}

/** Either kind of plan; the layout is what tells them apart. */
export function checkPlan(plan: unknown): void {
  checkObject(plan, 'plan');
  if ('layout' in (plan as Fields)) checkAttentionPlan(plan);
  else checkDispatchPlan(plan);
}
