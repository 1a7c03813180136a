import { checkAttached, describe } from './check.js';
import type { GradientReduction } from './directions.js';
import type { DispatchPlan } from './dispatch-plan.js';
import { violation } from './error.js';
import { validate } from './validate.js';

const arrays = ['shardOffsets', 'lengths', 'homeRow', 'slotOffsets', 'replica', 'compactRow'] as const;

/**
 * Checks a `rev-kv-compact` plan, and that a reduction is that of it: every replica that arrives is summed once, into rows of its home
 * that are no other shard's. Throws EP_INVALID_PLAN that names the field, the index, what was expected and what was found. `denseRow` is not looked at:
 * it belongs to the `rev-kv` plan. O(n log n) in the dispatches of a receiver.
 */
export function validateReduction(reduction: GradientReduction, plan: DispatchPlan): void {
  if (typeof reduction !== 'object' || reduction === null)
    throw violation('reduction', undefined, 'a reduction', describe(reduction));
  validate(plan);
  if (plan.kind !== 'rev-kv-compact') throw violation('plan.kind', undefined, 'rev-kv-compact', plan.kind);
  for (const name of arrays) {
    if (!(reduction[name] instanceof Int32Array))
      throw violation(`reduction.${name}`, undefined, 'an Int32Array', describe(reduction[name]));
    checkAttached(reduction[name], `reduction.${name}`);
  }
  if (reduction.worldSize !== plan.worldSize)
    throw violation('reduction.worldSize', undefined, plan.worldSize, reduction.worldSize);
  const shards = reduction.lengths.length;
  checkOffsets('shardOffsets', reduction.shardOffsets, plan.worldSize, shards);
  checkOffsets('slotOffsets', reduction.slotOffsets, shards, plan.dstRank.length);
  same('homeRow.length', undefined, shards, reduction.homeRow.length);
  for (const name of ['replica', 'compactRow'] as const)
    same(`${name}.length`, undefined, plan.dstRank.length, reduction[name].length);
  checkHomes(reduction);
  checkSlots(reduction, plan);
}

function same(name: string, index: number | undefined, expected: unknown, found: unknown): void {
  if (found !== expected) throw violation(`reduction.${name}`, index, expected, found);
}

function checkOffsets(name: string, offsets: Int32Array, parts: number, end: number): void {
  same(`${name}.length`, undefined, parts + 1, offsets.length);
  same(name, 0, 0, offsets[0]);
  for (let i = 0; i < parts; i++) {
    if (offsets[i + 1]! < offsets[i]!)
      throw violation(`reduction.${name}`, i + 1, `at least ${offsets[i]}`, offsets[i + 1]);
  }
  same(name, parts, end, offsets[parts]);
}

/** Shards of a rank ascend in its home tensor without overlap. */
function checkHomes({ worldSize, shardOffsets, lengths, homeRow }: GradientReduction): void {
  for (let r = 0; r < worldSize; r++) {
    let end = 0;
    for (let g = shardOffsets[r]!; g < shardOffsets[r + 1]!; g++) {
      if (lengths[g]! < 0) throw violation('reduction.lengths', g, 'at least 0', lengths[g]);
      if (homeRow[g]! < end) throw violation('reduction.homeRow', g, `at least ${end}`, homeRow[g]);
      end = homeRow[g]! + lengths[g]!;
      if (end > 2 ** 31 - 1) throw violation('reduction.homeRow', g, `a row below 2^31 - ${lengths[g]}`, homeRow[g]);
    }
  }
}

/** The slots, shard by shard and replica by replica, are what arrives at the shard's home. */
function checkSlots(reduction: GradientReduction, plan: DispatchPlan): void {
  const { worldSize, shardOffsets, slotOffsets, lengths, replica, compactRow } = reduction;
  const homeOf = new Int32Array(lengths.length);
  for (let r = 0; r < worldSize; r++) homeOf.fill(r, shardOffsets[r]!, shardOffsets[r + 1]!);
  const global = (e: number): number => shardOffsets[plan.dstRank[e]!]! + plan.dstShard[e]!;
  const arrivals = Int32Array.from(plan.dstRank.keys()).sort(
    (a, b) =>
      plan.dstRank[a]! - plan.dstRank[b]! ||
      plan.dstShard[a]! - plan.dstShard[b]! ||
      plan.replica[a]! - plan.replica[b]!,
  );
  let slot = 0;
  for (let g = 0; g < lengths.length; g++) {
    for (; slot < slotOffsets[g + 1]!; slot++) {
      const e = arrivals[slot]!;
      if (global(e) !== g || plan.dstRank[e] !== homeOf[g]) {
        const last = slot === slotOffsets[g] ? g : g + 1;
        throw violation(
          'reduction.slotOffsets',
          last,
          `the replicas of shard ${global(e)}, rank ${plan.dstRank[e]}, to follow`,
          slotOffsets[last],
        );
      }
      same('lengths', g, plan.length[e], lengths[g]);
      same('replica', slot, plan.replica[e], replica[slot]);
      same('compactRow', slot, plan.dstOffset[e], compactRow[slot]);
    }
  }
}
