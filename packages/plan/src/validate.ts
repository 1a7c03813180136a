import { type AttentionPlan, planAttention } from './attention.js';
import { checkAttached, describe } from './check.js';
import { type DispatchPlan, type PairTable, planVersion } from './dispatch-plan.js';
import { PlanError, shown, violation } from './error.js';
import { entryFields } from './form.js';
import { pairTables } from './pairs.js';

const kinds: readonly string[] = ['fwd-q', 'rev-q', 'fwd-kv', 'rev-kv', 'rev-kv-compact'];

/**
 * Checks every invariant of a plan. Throws EP_INVALID_PLAN that names the field, the index, what was expected and what was found, or
 * EP_PLAN_VERSION for a plan of another version, or EP_DETACHED for an array whose buffer is gone. O(n log n) in the dispatches of a receiver.
 */
export function validate(plan: DispatchPlan | AttentionPlan): void {
  if (typeof plan !== 'object' || plan === null) throw violation('plan', undefined, 'a plan', describe(plan));
  if ('layout' in plan) validateAttention(plan);
  else validateDispatch(plan);
}

export function checkVersion(version: unknown): void {
  if (version === planVersion) return;
  throw new PlanError(
    'EP_PLAN_VERSION',
    `the plan has version ${shown(version)}, this package reads version ${planVersion}: plan again with it`,
    {
      expected: planVersion,
      found: version,
    },
  );
}

function validateAttention(plan: AttentionPlan): void {
  for (const part of [plan.fwdQ, plan.revQ, plan.fwdKv, plan.revKv, plan.revKvCompact]) validateDispatch(part);
  // A plan is a function of its documents and servers, so the rest is checked against the plan that they give.
  let again: AttentionPlan;
  try {
    again = planAttention(plan.shards, plan.serverRank, { sharing: plan.sharing });
  } catch (cause) {
    if (!(cause instanceof PlanError)) throw cause;
    throw new PlanError('EP_INVALID_PLAN', `the plan's own documents are invalid: ${cause.message}`, cause.context);
  }
  for (const part of ['fwdQ', 'revQ', 'fwdKv', 'revKv', 'revKvCompact'] as const) {
    if (plan[part].kind !== again[part].kind)
      throw violation(`${part}.kind`, undefined, again[part].kind, plan[part].kind);
    if (plan[part].replicas !== again[part].replicas)
      throw violation(`${part}.replicas`, undefined, again[part].replicas, plan[part].replicas);
    for (const name of entryFields) sameArray(`${part}.${name}`, again[part][name], plan[part][name]);
  }
  sameFields('reduction', again.reduction, plan.reduction);
  sameFields('layout', again.layout, plan.layout);
}

function validateDispatch(plan: DispatchPlan): void {
  if (typeof plan !== 'object' || plan === null) throw violation('plan', undefined, 'a dispatch plan', describe(plan));
  checkVersion(plan.version);
  if (!kinds.includes(plan.kind)) throw violation('kind', undefined, kinds.join(' | '), plan.kind);
  const w = plan.worldSize;
  if (!Number.isSafeInteger(w) || w < 1) throw violation('worldSize', undefined, 'an integer of at least 1', w);
  if (!Number.isSafeInteger(plan.replicas) || plan.replicas < 1)
    throw violation('replicas', undefined, 'an integer of at least 1', plan.replicas);
  if (plan.kind.endsWith('-q') && plan.replicas !== 1) throw violation('replicas', undefined, 1, plan.replicas);
  for (const name of entryFields) {
    if (!(plan[name] instanceof Int32Array)) throw violation(name, undefined, 'an Int32Array', describe(plan[name]));
    checkAttached(plan[name], name);
  }
  checkLength('entryOffsets', plan.entryOffsets, w + 1);
  checkLength('sendTokens', plan.sendTokens, w);
  checkLength('recvTokens', plan.recvTokens, w);
  const entries = plan.dstRank.length;
  for (const name of ['srcOffset', 'dstOffset', 'length', 'srcShard', 'dstShard', 'replica'] as const)
    checkLength(name, plan[name], entries);
  if (plan.entryOffsets[0] !== 0) throw violation('entryOffsets', 0, 0, plan.entryOffsets[0]);
  for (let r = 0; r < w; r++) {
    if (plan.entryOffsets[r + 1]! < plan.entryOffsets[r]!)
      throw violation('entryOffsets', r + 1, `at least ${plan.entryOffsets[r]}`, plan.entryOffsets[r + 1]);
    inRange(plan.sendTokens, 'sendTokens', r, 0, 2 ** 31 - 1);
    inRange(plan.recvTokens, 'recvTokens', r, 0, 2 ** 31 - 1);
  }
  if (plan.entryOffsets[w] !== entries) throw violation('entryOffsets', w, entries, plan.entryOffsets[w]);
  for (let r = 0; r < w; r++) {
    for (let e = plan.entryOffsets[r]!; e < plan.entryOffsets[r + 1]!; e++) checkEntry(plan, r, e);
    if (plan.kind.startsWith('fwd')) checkForwardOrder(plan, r);
    else checkSlotOrder(plan, r);
  }
  checkArrivals(plan);
  const { sent, received } = pairTables(w, plan.entryOffsets, plan.dstRank, plan.length);
  samePairs('sent', sent, plan.sent);
  samePairs('received', received, plan.received);
}

function checkEntry(plan: DispatchPlan, r: number, e: number): void {
  inRange(plan.dstRank, 'dstRank', e, 0, plan.worldSize - 1);
  inRange(plan.replica, 'replica', e, 0, plan.replicas - 1);
  inRange(plan.length, 'length', e, 0, 2 ** 31 - 1);
  inRange(plan.srcShard, 'srcShard', e, 0, 2 ** 31 - 1);
  inRange(plan.dstShard, 'dstShard', e, 0, 2 ** 31 - 1);
  inRange(plan.srcOffset, 'srcOffset', e, 0, plan.sendTokens[r]! - plan.length[e]!);
  inRange(plan.dstOffset, 'dstOffset', e, 0, plan.recvTokens[plan.dstRank[e]!]! - plan.length[e]!);
}

/** Home side: shards ascend and lie in row order without overlap; the dispatches of a shard send the same rows, replicas ascending. */
function checkForwardOrder(plan: DispatchPlan, r: number): void {
  let shard = -1;
  let end = 0;
  for (let e = plan.entryOffsets[r]!; e < plan.entryOffsets[r + 1]!; e++) {
    if (plan.srcShard[e] === shard) {
      if (plan.srcOffset[e] !== plan.srcOffset[e - 1])
        throw violation('srcOffset', e, plan.srcOffset[e - 1], plan.srcOffset[e]);
      if (plan.length[e] !== plan.length[e - 1]) throw violation('length', e, plan.length[e - 1], plan.length[e]);
      if (plan.replica[e]! <= plan.replica[e - 1]!)
        throw violation('replica', e, `above ${plan.replica[e - 1]}`, plan.replica[e]);
      continue;
    }
    if (plan.srcShard[e]! < shard) throw violation('srcShard', e, `at least ${shard}`, plan.srcShard[e]);
    // Unsent shards in between may own rows; without one the rows follow on.
    const follows = plan.srcShard[e] === shard + 1;
    if (follows ? plan.srcOffset[e] !== end : plan.srcOffset[e]! < end) {
      throw violation('srcOffset', e, follows ? end : `at least ${end}`, plan.srcOffset[e]);
    }
    shard = plan.srcShard[e]!;
    end = plan.srcOffset[e]! + plan.length[e]!;
  }
}

/** Server side: entry i is slot i, and the slots fill the tensor from row 0 without gaps. */
function checkSlotOrder(plan: DispatchPlan, t: number): void {
  let end = 0;
  for (let e = plan.entryOffsets[t]!; e < plan.entryOffsets[t + 1]!; e++) {
    const slot = e - plan.entryOffsets[t]!;
    if (plan.srcShard[e] !== slot) throw violation('srcShard', e, slot, plan.srcShard[e]);
    if (plan.srcOffset[e] !== end) throw violation('srcOffset', e, end, plan.srcOffset[e]);
    end += plan.length[e]!;
  }
  if (plan.sendTokens[t] !== end) throw violation('sendTokens', t, end, plan.sendTokens[t]);
}

/** Receiver side: no row is written twice, and every row is written in the forms that have no holes. */
function checkArrivals(plan: DispatchPlan): void {
  const { worldSize, dstRank, dstShard, replica } = plan;
  const from = new Int32Array(worldSize + 1);
  for (let e = 0; e < dstRank.length; e++) from[dstRank[e]! + 1]!++;
  for (let t = 0; t < worldSize; t++) from[t + 1]! += from[t]!;
  const next = from.slice(0, worldSize);
  const arrivals = new Int32Array(dstRank.length);
  for (let e = 0; e < dstRank.length; e++) arrivals[next[dstRank[e]!]!++] = e;
  const forward = plan.kind.startsWith('fwd');
  for (let t = 0; t < worldSize; t++) {
    const mine = arrivals
      .subarray(from[t]!, from[t + 1]!)
      .sort((a, b) => dstShard[a]! - dstShard[b]! || replica[a]! - replica[b]!);
    if (forward) {
      mine.forEach((e, slot) => {
        if (dstShard[e] !== slot)
          throw violation('dstShard', e, `slot ${slot} of rank ${t}, each slot once`, dstShard[e]);
      });
    }
    if (forward || plan.kind === 'rev-kv-compact') checkTiling(plan, t, mine);
    else checkHomeBuffer(plan, t, mine);
  }
}

function checkTiling(plan: DispatchPlan, t: number, mine: Int32Array): void {
  let end = 0;
  for (const e of mine) {
    if (plan.dstOffset[e] !== end) throw violation('dstOffset', e, end, plan.dstOffset[e]);
    end += plan.length[e]!;
  }
  if (plan.recvTokens[t] !== end) throw violation('recvTokens', t, end, plan.recvTokens[t]);
}

/** A replica-major buffer: `replicas` copies of the home tensor; a shard has the same rows in each. */
function checkHomeBuffer(plan: DispatchPlan, t: number, mine: Int32Array): void {
  const tokens = plan.recvTokens[t]! / plan.replicas;
  if (!Number.isInteger(tokens))
    throw violation('recvTokens', t, `a multiple of ${plan.replicas} replicas`, plan.recvTokens[t]);
  let shard = -1;
  let start = 0;
  let end = 0;
  let replica = -1;
  for (const e of mine) {
    const row = plan.dstOffset[e]! - plan.replica[e]! * tokens;
    if (plan.dstShard[e] === shard) {
      if (row !== start) throw violation('dstOffset', e, plan.replica[e]! * tokens + start, plan.dstOffset[e]);
      if (plan.length[e] !== end - start) throw violation('length', e, end - start, plan.length[e]);
      if (plan.replica[e] === replica)
        throw violation(
          'replica',
          e,
          `a replica of shard ${shard} on rank ${t} that is not ${replica}`,
          plan.replica[e],
        );
    } else if (row < end || row + plan.length[e]! > tokens) {
      throw violation(
        'dstOffset',
        e,
        `${plan.replica[e]! * tokens} plus a row in [${end}, ${tokens - plan.length[e]!}]`,
        plan.dstOffset[e],
      );
    }
    shard = plan.dstShard[e]!;
    replica = plan.replica[e]!;
    start = row;
    end = row + plan.length[e]!;
  }
}

function samePairs(name: 'sent' | 'received', expected: PairTable, found: PairTable): void {
  if (typeof found !== 'object' || found === null) throw violation(name, undefined, 'a pair table', describe(found));
  sameFields(name, expected, found);
}

function sameFields<T extends object>(name: string, expected: T, found: T): void {
  if (typeof found !== 'object' || found === null) throw violation(name, undefined, 'an object', describe(found));
  for (const key of Object.keys(expected) as (keyof T & string)[]) {
    const e: unknown = expected[key];
    const f: unknown = found[key];
    if (e instanceof Int32Array) sameArray(`${name}.${key}`, e, f);
    else if (e !== f) throw violation(`${name}.${key}`, undefined, e, f);
  }
}

function sameArray(name: string, expected: Int32Array, found: unknown): void {
  if (!(found instanceof Int32Array)) throw violation(name, undefined, 'an Int32Array', describe(found));
  checkAttached(found, name);
  checkLength(name, found, expected.length);
  for (let i = 0; i < expected.length; i++)
    if (found[i] !== expected[i]) throw violation(name, i, expected[i], found[i]);
}

function checkLength(name: string, values: Int32Array, length: number): void {
  if (values.length !== length) throw violation(`${name}.length`, undefined, length, values.length);
}

function inRange(values: Int32Array, name: string, index: number, min: number, max: number): void {
  const v = values[index]!;
  if (v < min || v > max) throw violation(name, index, `an integer in [${min}, ${max}]`, v);
}
