import { checkAttached, describe } from '../check.js';
import { WordHash } from '../digest.js';
import { PlanError, shown, violation } from '../error.js';
import { type ExpertMap, mapExperts, moeVersion } from './experts.js';
import { checkMoePlan } from './form.js';
import { type MoePlan, planMoe } from './plan.js';

/** The arrays that an expert map and a plan consist of, by path. */
const mapArrays = ['rankOffsets', 'expert', 'rank', 'expertOffsets', 'replicas'] as const;
const planArrays = ['activeRanks', 'lostRanks', 'replica', 'slot', 'row', 'tokensPerRank', 'tokensPerNode'] as const;
const placementArrays = ['count', 'begin', 'rows', 'blockStart', 'recvRows'] as const;

/**
 * Checks every field of a plan: a plan is a function of routing, map, form and options, so it must be what they give again. Throws
 * EP_INVALID_PLAN that names the field, the index, what was expected and what was found, or EP_PLAN_VERSION.
 */
export function validateMoe(plan: MoePlan): void {
  if (typeof plan !== 'object' || plan === null) throw violation('plan', undefined, 'a plan', describe(plan));
  checkMoeVersion(plan.version);
  const again = remake('routing, map, form or options', () =>
    planMoe(plan.routing, plan.map, plan.form, {
      policy: plan.policy,
      ranksPerNode: plan.ranksPerNode,
      activeRanks: plan.activeRanks,
      lostRanks: plan.lostRanks,
    }),
  );
  sameMap('map.', again.map, plan.map);
  for (const name of ['policy', 'ranksPerNode'] as const)
    if (plan[name] !== again[name]) throw violation(name, undefined, again[name], plan[name]);
  for (const name of planArrays) sameArray(name, again[name], plan[name]);
  for (const name of placementArrays) sameArray(`placement.${name}`, again.placement[name], plan.placement?.[name]);
  if (plan.unserved !== again.unserved) throw violation('unserved', undefined, again.unserved, plan.unserved);
}

/** Checks every field of an expert map, with the same errors. */
export function validateExpertMap(map: ExpertMap): void {
  if (typeof map !== 'object' || map === null) throw violation('map', undefined, 'an expert map', describe(map));
  sameMap(
    '',
    remake('ranks or experts', () => mapExperts(map)),
    map,
  );
}

/** 128 bits over every field, as hexadecimal: ranks that compare it know whether they hold the same plan. Not cryptographic. */
export function moeDigest(plan: MoePlan): string {
  checkMoePlan(plan);
  const hash = new WordHash();
  const { map, routing, form } = plan;
  hash.text('moe');
  for (const n of [plan.version, map.worldSize, map.experts, routing.topK, plan.ranksPerNode, plan.unserved])
    hash.word(n);
  hash.text(plan.policy);
  hash.text(form.mode);
  hash.word(form.mode === 'low-latency' ? form.maxTokens : (form.alignment ?? 1));
  hash.array(routing.tokenOffsets);
  hash.array(routing.topkIdx);
  for (const name of mapArrays) hash.array(map[name]);
  for (const name of planArrays) hash.array(Int32Array.from(plan[name]));
  for (const name of placementArrays) hash.array(plan.placement[name]);
  return hash.hex();
}

function checkMoeVersion(version: unknown): void {
  if (version === moeVersion) return;
  throw new PlanError(
    'EP_PLAN_VERSION',
    `the plan has version ${shown(version)}, this package reads version ${moeVersion}: plan again with it`,
    { expected: moeVersion, found: version },
  );
}

function remake<T>(of: string, make: () => T): T {
  try {
    return make();
  } catch (cause) {
    if (!(cause instanceof PlanError)) throw cause;
    throw new PlanError('EP_INVALID_PLAN', `the plan's own ${of} are invalid: ${cause.message}`, cause.context);
  }
}

function sameMap(prefix: string, expected: ExpertMap, found: ExpertMap): void {
  checkMoeVersion(found.version);
  for (const name of mapArrays) sameArray(`${prefix}${name}`, expected[name], found[name]);
  if (found.maxLocalExperts !== expected.maxLocalExperts)
    throw violation(`${prefix}maxLocalExperts`, undefined, expected.maxLocalExperts, found.maxLocalExperts);
}

function sameArray(name: string, expected: Int32Array | Uint8Array, found: unknown): void {
  if (!(found instanceof expected.constructor)) throw violation(name, undefined, describe(expected), describe(found));
  checkAttached(found, name);
  const values = found as Int32Array;
  if (values.length !== expected.length) throw violation(`${name}.length`, undefined, expected.length, values.length);
  for (let i = 0; i < expected.length; i++)
    if (values[i] !== expected[i]) throw violation(name, i, expected[i], values[i]);
}
