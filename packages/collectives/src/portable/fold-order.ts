/**
 * In which order the elements of ranks are folded. A group of one host folds in ascending rank order. One of several folds the ranks of each host first, in that order,
 * and then what the hosts have come to, in the order of the lowest ranks that each has among the contributors: as two levels do, so that which of them carries a call out cannot be seen in its bits.
 *
 * Sums and products of f16 and bf16 are kept in single precision until all hosts are folded, and rounded once, behind that.
 */
import { createStorage, type DType, decode, encode, type FloatDType, type Storage } from '@ep/core';
import type { Elements } from '../engine.js';
import { reduceOpName } from '../reduce.js';
import type { ReduceOp } from '../reduce-op.js';
import { foldElements } from './fold-elements.js';
import type { Placement } from './placement.js';

/** Folds `sources`, of all contributors in ascending order, into `target`, which may be one of them. */
export type FoldOrder = (dtype: DType, op: ReduceOp, target: Elements, sources: readonly Elements[]) => void;

const FLOATS: ReadonlySet<DType> = new Set<DType>(['f64', 'f32', 'f16', 'bf16']);

const isExtreme = (op: ReduceOp): boolean => op === 'min' || op === 'max';

/** What hosts come to is kept in this: f32 for what would be rounded to 16 bits on the way. */
export const partialDType = (dtype: DType, op: ReduceOp): DType =>
  (dtype === 'f16' || dtype === 'bf16') && !isExtreme(op) ? 'f32' : dtype;

/** The elements in `wide`, as `partialDType` says: themselves where that is their own. */
export const widened = (dtype: DType, wide: DType, elements: Elements): Elements =>
  wide === dtype ? elements : decode(dtype as FloatDType, elements as Storage[FloatDType]);

/** The other way, rounded once. */
export const rounded = (dtype: DType, wide: DType, elements: Elements): Elements =>
  wide === dtype ? elements : (encode(dtype as FloatDType, elements as Float32Array) as Elements);

/** What each host does with its ranks, and then all with what the hosts have come to. */
export function levelsOf(op: ReduceOp): { readonly within: ReduceOp; readonly across: ReduceOp } {
  const name = reduceOpName(op);
  if (name === 'avg') return { within: 'sum', across: 'avg' };
  if (name === 'premul-sum') return { within: op, across: 'sum' };
  return { within: op, across: op };
}

export const inRankOrder: FoldOrder = (dtype, op, target, sources) => foldElements(dtype, op, target, sources);

/** Of what hosts have come to: sources are those of one rank of each host, in rank order, and `ofHost` says by host which it is; `ranks` of them all, for `avg`. */
export const ofHosts =
  (ranks: number, ofHost: readonly number[]): FoldOrder =>
  (dtype, op, target, sources) =>
    foldElements(
      dtype,
      op,
      target,
      ofHost.map((at) => sources[at]!),
      ranks,
    );

/** Ranks of one host each, which are folded before what hosts have come to: one list where that makes no difference. */
export function foldsOf({ hosts }: Placement, contributors: readonly number[]): readonly (readonly number[])[] {
  const present = hosts.map((members) => members.filter((rank) => contributors.includes(rank)));
  const groups = present.filter(({ length }) => length > 0).sort(([a], [b]) => a! - b!);
  return groups.every(({ length }) => length === 1) ? [contributors] : groups;
}

/** The order of these contributors. */
export function orderOf(placement: Placement, contributors: readonly number[]): FoldOrder {
  const groups = foldsOf(placement, contributors);
  if (groups.length === 1) return inRankOrder;
  const places = groups.map((members) => members.map((rank) => contributors.indexOf(rank)));
  const across = ofHosts(
    contributors.length,
    groups.map((_, host) => host),
  );
  return (dtype, op, target, sources) => {
    // Of integers every order gives the same.
    if (!FLOATS.has(dtype)) {
      inRankOrder(dtype, op, target, sources);
      return;
    }
    const wide = partialDType(dtype, op);
    const levels = levelsOf(op);
    const folded = places.map((members) => {
      const partial = createStorage(wide, target.length);
      const given = members.map((at) => widened(dtype, wide, sources[at]!));
      inRankOrder(wide, levels.within, partial, given);
      return partial;
    });
    if (wide === dtype) {
      across(dtype, levels.across, target, folded);
      return;
    }
    across(wide, levels.across, folded[0]!, folded);
    target.set(rounded(dtype, wide, folded[0]!) as never);
  };
}
