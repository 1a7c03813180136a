import { describe } from '../check.js';
import { invalidArgument } from '../error.js';

/** A rank mask as callers hold it: one element for each rank, 1 or true = in the set, 0 or false = not. */
export type RankMask = ArrayLike<number | boolean>;

/**
 * A checked copy of a mask; all ranks are `otherwise` without one. HAZARD: a mask of another length is refused; replaced by a default, as some
 * libraries do, it would leave its owner waiting for an outcome that is written elsewhere.
 */
export function rankMask(mask: RankMask | undefined, name: string, worldSize: number, otherwise: 0 | 1): Uint8Array {
  if (mask === undefined) return new Uint8Array(worldSize).fill(otherwise);
  if (typeof mask !== 'object' || mask === null || mask.length !== worldSize) {
    const found = (mask as RankMask | null)?.length ?? describe(mask);
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
