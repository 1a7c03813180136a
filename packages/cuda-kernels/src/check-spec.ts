/** Are the values given to `bind` what it documents? */
import { DTYPES, EpError, invalid, isDType, isEpError } from '@ep/core';
import { type DispatchPlan, validate, validateReduction } from '@ep/plan';
import type { PartSpec } from './binding-spec.js';

const PLAN_ARRAYS = [
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
const PAIR_ARRAYS = ['offsets', 'peer', 'tokens', 'dispatches'] as const;
const REDUCTION_ARRAYS = ['shardOffsets', 'lengths', 'homeRow', 'slotOffsets', 'compactRow'] as const;

type Fields = Readonly<Record<string, unknown>>;

const isObject = (value: unknown): value is Fields =>
  typeof value === 'object' && value !== null && !Array.isArray(value);

/** True for an object with these Int32Arrays. */
export const hasArrays = (value: unknown, names: readonly string[]): boolean =>
  isObject(value) && names.every((name) => value[name] instanceof Int32Array);

/**
 * `EP_INVALID_ARGUMENT` unless it has the form of a `DispatchPlan` of that many ranks; `EP_PLAN_VERSION` or `EP_INVALID_PLAN` unless it keeps its own rules: a plan whose
 * rows overlap, or whose sums are wrong, would leave rows of another call in the received tensors.
 */
function checkPlan(plan: unknown, worldSize: number, what: string, where: string): void {
  const form =
    hasArrays(plan, PLAN_ARRAYS) &&
    hasArrays((plan as Fields).sent, PAIR_ARRAYS) &&
    hasArrays((plan as Fields).received, PAIR_ARRAYS);
  if (!form) throw invalid(what, { where, expected: `a dispatch plan of ${worldSize} ranks`, found: plan });
  const found = (plan as Fields).worldSize;
  if (found !== worldSize) throw invalid(what, { where, expected: `a plan of ${worldSize} ranks`, found });
  rules(where, () => validate(plan as DispatchPlan));
}

/** What `@ep/plan` finds wrong, told with the place. */
function rules(where: string, check: () => void): void {
  try {
    check();
  } catch (error) {
    if (!isEpError(error)) throw error;
    throw new EpError(error.code, `${where}: ${error.message}`, { context: error.context, cause: error });
  }
}

/** `EP_INVALID_ARGUMENT` unless it has the form of a `GradientReduction`. */
export function checkReduction(reduce: unknown, what: string, where: string): void {
  if (!hasArrays(reduce, REDUCTION_ARRAYS))
    throw invalid(what, { where, expected: 'the reduction of a plan', found: reduce });
}

function checkPart(part: unknown, worldSize: number, where: string): void {
  if (!isObject(part) || typeof part.name !== 'string' || part.name === '') {
    throw invalid('part', { where, expected: 'an object with name, plan, dtype and rowShape', found: part });
  }
  const at = `${where} ${part.name}`;
  checkPlan(part.plan, worldSize, 'plan', at);
  if (!isDType(part.dtype)) {
    throw invalid('dtype', { where: at, expected: `one of ${DTYPES.join(', ')}`, found: part.dtype });
  }
  if (!Array.isArray(part.rowShape) || !part.rowShape.every((extent) => Number.isSafeInteger(extent) && extent > 0)) {
    throw invalid('rowShape', { where: at, expected: 'positive extents', found: part.rowShape });
  }
  if (part.reduce !== undefined) checkReduction(part.reduce, 'reduce', at);
}

/** `EP_INVALID_ARGUMENT` or `EP_INVALID_PLAN` where a part is to be summed by a reduction that is not of its plan. */
export function checkReductions(parts: readonly PartSpec[], where: string): void {
  for (const { name, plan, reduce } of parts) {
    if (reduce === undefined) continue;
    const at = `${where} ${name}`;
    if (plan.kind !== 'rev-kv-compact') {
      throw invalid('plan', { where: at, expected: 'a rev-kv-compact plan to reduce', found: plan.kind });
    }
    // HAZARD: the kernel that sums reads and writes the rows that the reduction names, wherever they lie.
    rules(at, () => validateReduction(reduce, plan));
  }
}

/** `EP_INVALID_ARGUMENT` unless they are parts with different names. */
export function checkParts(parts: unknown, worldSize: number, where: string): asserts parts is readonly PartSpec[] {
  if (!Array.isArray(parts) || parts.length === 0) {
    throw invalid('parts', { where, expected: 'a list of at least one part', found: parts });
  }
  const names = new Set<string>();
  for (const part of parts as unknown[]) {
    checkPart(part, worldSize, where);
    const { name } = part as PartSpec;
    if (names.has(name)) throw invalid('name', { where, expected: 'different for each part', found: name });
    names.add(name);
  }
}

/** `EP_INVALID_ARGUMENT` unless a dispatcher can be opened on it. */
export function checkTransport(transport: unknown, where: string): void {
  if (!isObject(transport) || !isObject(transport.capabilities) || typeof transport.allocate !== 'function') {
    throw invalid('transport', { where, expected: 'an open transport', found: transport });
  }
}

/** `EP_INVALID_ARGUMENT` unless they are parts whose sizes can be asked for: what is not looked at may be left out. */
export function checkSizedParts(parts: unknown, arrays: readonly string[], where: string): void {
  if (!Array.isArray(parts)) throw invalid('parts', { where, expected: 'a list of parts', found: parts });
  for (const [at, part] of (parts as unknown[]).entries()) {
    checkObject(part, `parts[${at}]`, 'an object with plan, dtype and rowShape', where);
    if (!hasArrays(part.plan, arrays)) {
      throw invalid(`parts[${at}].plan`, { where, expected: 'a dispatch plan', found: part.plan });
    }
    if (part.reduce !== undefined) checkReduction(part.reduce, `parts[${at}].reduce`, where);
  }
}

/** `EP_INVALID_ARGUMENT` unless it is an object. */
export function checkObject(value: unknown, what: string, expected: string, where: string): asserts value is Fields {
  if (!isObject(value)) throw invalid(what, { where, expected, found: value });
}
