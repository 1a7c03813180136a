/**
 * In which order the elements of ranks are folded. A group of one host folds in ascending rank order. One of several folds the ranks of each host first, in that order,
 * and then what the hosts have come to, in the order of their lowest ranks: as two levels do, so that which of them carries a call out cannot be seen in its bits.
 *
 * Sums and products of f16 and bf16 are always folded in ascending rank order: what a host has come to would be rounded to 16 bits on the way.
 */
import { createStorage, type DType } from '@ep/core';
import type { Elements } from '../engine.js';
import { reduceOpName } from '../reduce.js';
import type { ReduceOp } from '../reduce-op.js';
import { foldElements } from './fold-elements.js';
import type { Placement } from './placement.js';

/** Folds `sources`, of all contributors in ascending order, into `target`, which may be one of them. */
export type FoldOrder = (dtype: DType, op: ReduceOp, target: Elements, sources: readonly Elements[]) => void;

const FLOATS: ReadonlySet<DType> = new Set<DType>(['f64', 'f32', 'f16', 'bf16']);

const isExtreme = (op: ReduceOp): boolean => op === 'min' || op === 'max';

/** Whether folding the ranks of a host first, and rounding what they come to, gives what the contract says. */
export const foldsByHost = (dtype: DType, op: ReduceOp): boolean =>
  (dtype !== 'f16' && dtype !== 'bf16') || isExtreme(op);

/** What each host does with its ranks, and then all with what the hosts have come to. */
export function levelsOf(op: ReduceOp): { readonly within: ReduceOp; readonly across: ReduceOp } {
  const name = reduceOpName(op);
  if (name === 'avg') return { within: 'sum', across: 'avg' };
  if (name === 'premul-sum') return { within: op, across: 'sum' };
  return { within: op, across: op };
}

export const inRankOrder: FoldOrder = (dtype, op, target, sources) => foldElements(dtype, op, target, sources);

/** Of what hosts have come to; `ranks` of them all, for `avg`. */
export const ofHosts =
  (ranks: number): FoldOrder =>
  (dtype, op, target, sources) =>
    foldElements(dtype, op, target, sources, ranks);

/** The order of these contributors. */
export function orderOf({ hosts }: Placement, contributors: readonly number[]): FoldOrder {
  const present = hosts.map((members) => members.filter((rank) => contributors.includes(rank)));
  const groups = present.filter(({ length }) => length > 0);
  if (groups.length === 1 || groups.every(({ length }) => length === 1)) return inRankOrder;
  const places = groups.map((members) => members.map((rank) => contributors.indexOf(rank)));
  return (dtype, op, target, sources) => {
    // Of integers every order gives the same.
    if (!FLOATS.has(dtype) || !foldsByHost(dtype, op)) {
      inRankOrder(dtype, op, target, sources);
      return;
    }
    const { within, across } = levelsOf(op);
    const folded = places.map((members) => {
      const partial = createStorage(dtype, target.length);
      inRankOrder(
        dtype,
        within,
        partial,
        members.map((at) => sources[at]!),
      );
      return partial;
    });
    ofHosts(contributors.length)(dtype, across, target, folded);
  };
}
