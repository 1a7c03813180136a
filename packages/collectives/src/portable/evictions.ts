/**
 * Which members were taken out of a group alive: a set in the group's store that only grows, and to which only ranks add that are not in it. So of ranks that take each other out
 * one succeeds, and the others learn that they are out.
 *
 * HAZARD: records alone cannot decide that. A rank that was stopped finds, when it wakes up, that nobody has come to its call, as the others found of it.
 *
 * Deaths are not in it: they are agreed on without the store, which may have died as well.
 */
import type { Store } from '@ep/core';

const NOTHING = new Uint8Array(0);
const encode = (lives: readonly string[]): Uint8Array => new Uint8Array(Buffer.from(lives.join(' ')));

/** A rank that comes back is another one. `life`: how often it was admitted. */
export const lifeOf = (rank: number, life: number): string => `${rank}.${life}`;

export const evictedKey = (key: string): string => `${key}/evicted`;

/** Adds `lives`, at least one. False, and nothing is added, if `self` is among those that were taken out before. Rejects with what the store throws. */
export async function takeOut(store: Store, key: string, lives: readonly string[], self: string): Promise<boolean> {
  let held = await store.compareSet(key, NOTHING, encode(lives));
  for (;;) {
    const out = Buffer.from(held).toString().split(' ');
    if (out.includes(self)) return false;
    const missing = lives.filter((life) => !out.includes(life));
    if (missing.length === 0) return true;
    held = await store.compareSet(key, held, encode([...out, ...missing]));
  }
}
