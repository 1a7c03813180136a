/** What the members of a group tell each other through the store: which section is theirs, and who has opened the group. */
import { EpError } from '@ep/core';
import type { Arena } from './arena.js';
import type { PortableEngineOptions } from './options.js';
import { describeError } from './records.js';
import type { Section } from './sections.js';

/** What a member says of itself in the store. `life`: which process it is, where others may come in its place. */
export const LEFT = Uint8Array.of(0);
export const readyWord = (life: string): Uint8Array => new Uint8Array(Buffer.from(`\u0001${life}`));
export const saysLeft = (word: Uint8Array): boolean => word[0] === LEFT[0];
export const lifeIn = (word: Uint8Array): string => Buffer.from(word.subarray(1)).toString();
export const LEFT_DETAIL = 'it closed the group';

export const sectionKey = (key: string): string => `${key}/section`;
export const readyKey = (key: string, rank: number): string => `${key}/ready/${rank}`;

/** What is told of it. */
interface Told {
  readonly index: number;
  readonly token: string;
  /** Ranks of the group that open it from the beginning; others come later. */
  readonly members: readonly number[];
}

/** The lowest rank that takes part from the beginning finds a section and tells the others, or why there is none. */
export async function agreeOnSection(arena: Arena, key: string, options: PortableEngineOptions): Promise<Section> {
  const { rank, ranks, store, name, timeoutMs, signal, joins = false } = options;
  const members = membersOf(options);
  if (!joins && rank === members[0]) {
    try {
      const taken = await arena.sections.take(name, ranks, members);
      await store.set(sectionKey(key), Buffer.from(JSON.stringify({ ...taken, members } satisfies Told)));
      return arena.section(taken, members.length);
    } catch (error) {
      await store.set(sectionKey(key), Buffer.from(JSON.stringify(describeError(error))));
      throw error;
    }
  }
  const bytes = await store.get(sectionKey(key), { timeoutMs, ...(signal && { signal }) });
  const told = JSON.parse(Buffer.from(bytes).toString()) as Told | ReturnType<typeof describeError>;
  if (!('index' in told)) {
    throw new EpError(told.code === 'EP_CAPACITY' ? told.code : 'EP_RENDEZVOUS', told.text, { context: told.context });
  }
  const section = arena.section(told, told.members.length);
  const isOfThem = told.members.includes(rank);
  if (isOfThem && !(joins && arena.inherited)) return section;
  if (await arena.sections.enter(section, rank)) return section;
  const lost = ranks.flatMap((_, member) => (told.members.includes(member) ? [member] : []));
  throw new EpError('EP_PEER_LOST', `group ${name}: all others closed it while rank ${rank} opened it`, {
    context: { lost },
  });
}

/** Who opens the group from the beginning, ascending. */
export function membersOf({ ranks, size = ranks.length, active }: PortableEngineOptions): readonly number[] {
  return active === undefined ? Array.from({ length: size }, (_, member) => member) : [...active].sort((a, b) => a - b);
}
