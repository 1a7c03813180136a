import { checkInteger, describe } from '../check.js';
import { invalidArgument, shown } from '../error.js';

/** A rank mask as callers hold it: one element for each rank, 1 or true = in the set, 0 or false = not. */
export type RankMask = ArrayLike<number | boolean>;

/**
 * A checked copy of a mask; all ranks are `otherwise` without one. HAZARD: a mask of another length is refused; replaced by a default, as some
 * libraries do, it would leave its owner waiting for an outcome that is written elsewhere.
 */
export function rankMask(mask: RankMask | undefined, name: string, worldSize: number, otherwise: 0 | 1): Uint8Array {
  if (mask === undefined) return new Uint8Array(worldSize).fill(otherwise);
  if (typeof mask !== 'object' || mask === null || mask.length !== worldSize) {
    const { length } = (mask ?? {}) as { readonly length?: unknown };
    const found = length === undefined ? describe(mask) : shown(length);
    throw invalidArgument(`${name} must have ${worldSize} elements, one for each rank, found ${found}`, {
      name,
      expected: worldSize,
      found,
    });
  }
  return Uint8Array.from({ length: worldSize }, (_, r) => {
    const value = mask[r];
    if (value !== 0 && value !== 1 && value !== false && value !== true) {
      throw invalidArgument(`${name}[${r}] must be 0 or 1, found ${describe(value)}`, { name, rank: r, found: value });
    }
    return Number(value);
  });
}

/** An integer in [0, max] for each rank, from one for all of them or from one each. */
export function integersOfRanks(
  value: number | ArrayLike<number>,
  name: string,
  worldSize: number,
  max: number,
): Int32Array {
  if (typeof value === 'number') return new Int32Array(worldSize).fill(checkInteger(value, name, 0, max));
  const { length } = (value ?? {}) as { readonly length?: unknown };
  if (typeof value !== 'object' || length !== worldSize) {
    const found = length === undefined ? describe(value) : shown(length);
    throw invalidArgument(`${name} must be a number or have ${worldSize} elements, found ${found}`, {
      name,
      expected: worldSize,
      found,
    });
  }
  return Int32Array.from({ length: worldSize }, (_, r) => checkInteger(value[r], `${name} of rank ${r}`, 0, max));
}
