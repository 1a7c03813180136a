/** What the members of a group tell each other through the store: which section is theirs, and who has opened the group. */
import { EpError } from '@ep/core';
import type { Arena, Section } from './arena.js';
import type { PortableEngineOptions } from './options.js';
import { describeError } from './records.js';

/** What a member says of itself in the store. `life`: which process it is, where others may come in its place. */
export const LEFT = Uint8Array.of(0);
export const readyWord = (life: string): Uint8Array => new Uint8Array(Buffer.from(`\u0001${life}`));
export const saysLeft = (word: Uint8Array): boolean => word[0] === LEFT[0];
export const lifeIn = (word: Uint8Array): string => Buffer.from(word.subarray(1)).toString();
export const LEFT_DETAIL = 'it closed the group';

export const sectionKey = (key: string): string => `${key}/section`;
export const readyKey = (key: string, rank: number): string => `${key}/ready/${rank}`;

/** Rank 0 of the group finds a section and tells the others, or why there is none. */
export async function agreeOnSection(arena: Arena, key: string, options: PortableEngineOptions): Promise<Section> {
  const { rank, store, name, timeoutMs, signal, joins = false } = options;
  // The first process in the place of rank 0 has found it.
  if (rank === 0 && !(joins && arena.inherited)) {
    try {
      const section = await arena.take(name);
      await store.set(sectionKey(key), Buffer.from(JSON.stringify({ index: section.index, token: section.token })));
      return section;
    } catch (error) {
      await store.set(sectionKey(key), Buffer.from(JSON.stringify(describeError(error))));
      throw error;
    }
  }
  const bytes = await store.get(sectionKey(key), { timeoutMs, ...(signal && { signal }) });
  const told = JSON.parse(Buffer.from(bytes).toString()) as
    | { readonly index: number; readonly token: string }
    | ReturnType<typeof describeError>;
  if ('index' in told) {
    const section = arena.section(told.index, told.token);
    if (joins && arena.inherited) await arena.takeUp(section, rank);
    return section;
  }
  throw new EpError(told.code === 'EP_CAPACITY' ? told.code : 'EP_RENDEZVOUS', told.text, { context: told.context });
}
