/** What the members of a group tell each other through the store: which section is theirs, and who has opened the group. */
import { EpError } from '@ep/core';
import type { Arena, Section } from './arena.js';
import type { PortableEngineOptions } from './options.js';
import { describeError } from './records.js';

/** What a member says of itself in the store. */
export const READY = Uint8Array.of(1);
export const LEFT = Uint8Array.of(1, 0);
export const LEFT_DETAIL = 'it closed the group';

export const sectionKey = (key: string): string => `${key}/section`;
export const readyKey = (key: string, rank: number): string => `${key}/ready/${rank}`;

/** Rank 0 of the group finds a section and tells the others, or why there is none. */
export async function agreeOnSection(arena: Arena, key: string, options: PortableEngineOptions): Promise<Section> {
  const { rank, store, name, timeoutMs, signal } = options;
  if (rank === 0) {
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
  if ('index' in told) return arena.section(told.index, told.token);
  throw new EpError(told.code === 'EP_CAPACITY' ? told.code : 'EP_RENDEZVOUS', told.text, { context: told.context });
}
