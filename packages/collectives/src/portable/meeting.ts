/** What the members of a group tell each other through the store: which section is theirs, and who has opened the group. */
import { EpError, isEpError, linkSignals, type Store } from '@ep/core';
import type { Arena } from './arena.js';
import type { PortableEngineOptions } from './options.js';
import { describeError } from './records.js';
import type { Section, SectionName } from './sections.js';

/** What a member says of itself in the store. `life`: which process it is, where others may come in its place. */
export const LEFT = Uint8Array.of(0);
export const readyWord = (life: string): Uint8Array => new Uint8Array(Buffer.from(`\u0001${life}`));
export const saysLeft = (word: Uint8Array): boolean => word[0] === LEFT[0];
export const lifeIn = (word: Uint8Array): string => Buffer.from(word.subarray(1)).toString();
export const LEFT_DETAIL = 'it closed the group';

export const sectionKey = (key: string): string => `${key}/section`;
export const readyKey = (key: string, rank: number): string => `${key}/ready/${rank}`;

/** Undefined if there is none now. */
export async function readKey(store: Store, key: string): Promise<Uint8Array | undefined> {
  if (!(await store.check([key]))) return undefined;
  try {
    return await store.get(key, { timeoutMs: 0 });
  } catch (error) {
    if (isEpError(error) && error.code === 'EP_TIMEOUT') return undefined;
    throw error;
  }
}

/** What is told of it. */
interface Told {
  readonly index: number;
  readonly token: string;
  /** Ranks of the group that open it from the beginning; others come later. */
  readonly members: readonly number[];
}

type Answer = Told | ReturnType<typeof describeError>;

const NOTHING = new Uint8Array(0);

/**
 * The lowest rank that takes part from the beginning finds a section and tells the others, or why there is none. If it is lost before it has, the next one does.
 *
 * HAZARD: who is lost when is seen differently by each: the first answer in the store counts, also against what a rank had written that is lost.
 */
export async function agreeOnSection(arena: Arena, key: string, options: PortableEngineOptions): Promise<Section> {
  const { rank, ranks, name, joins = false } = options;
  const told = await answerOf(arena, key, options);
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

async function answerOf(arena: Arena, key: string, options: PortableEngineOptions): Promise<Answer> {
  const { rank, ranks, store, timeoutMs, signal, joins = false } = options;
  const members = membersOf(options);
  const until = performance.now() + timeoutMs;
  const read = async (also?: AbortSignal): Promise<Answer> => {
    const linked = linkSignals(signal, also);
    try {
      const left = Math.max(0, until - performance.now());
      return parseAnswer(await store.get(sectionKey(key), { timeoutMs: left, signal: linked.signal }));
    } finally {
      linked.unlink();
    }
  };
  // Who comes later finds what the others have told, whoever of them is left.
  if (joins || !members.includes(rank)) return read();
  for (const [i, keeper] of members.entries()) {
    if (keeper === rank) return tellSection(arena, key, options, i > 0);
    const over = new AbortController();
    const lost = whenLost(arena, options.transport, ranks[keeper]!, over.signal);
    try {
      const answer = await Promise.race([read(over.signal), lost]);
      if (answer !== undefined) return answer;
    } finally {
      over.abort();
    }
  }
  return read();
}

/** `succeeds`: the one whose turn it was is lost, perhaps after it had found a section, or told it. */
async function tellSection(
  arena: Arena,
  key: string,
  options: PortableEngineOptions,
  succeeds: boolean,
): Promise<Answer> {
  const { ranks, store, name } = options;
  const members = membersOf(options);
  const told = succeeds ? await readKey(store, sectionKey(key)) : undefined;
  if (told !== undefined) return parseAnswer(told);
  let taken: SectionName | undefined;
  let failure: unknown;
  let mine: Answer;
  try {
    taken =
      (succeeds ? await arena.sections.takenFor(key) : undefined) ??
      (await arena.sections.take(name, ranks, members, key));
    mine = { ...taken, members };
  } catch (error) {
    failure = error;
    mine = describeError(error);
  }
  const bytes = new Uint8Array(Buffer.from(JSON.stringify(mine)));
  const held = await store.compareSet(sectionKey(key), NOTHING, bytes);
  if (Buffer.compare(held, bytes) === 0) {
    if (taken === undefined) throw failure;
    return mine;
  }
  const answer = parseAnswer(held);
  if (taken !== undefined && !('index' in answer && answer.token === taken.token)) await arena.sections.putBack(taken);
  return answer;
}

const parseAnswer = (bytes: Uint8Array): Answer => JSON.parse(Buffer.from(bytes).toString()) as Answer;

/** No word of a signal pad is above. */
const LARGEST_WORD = 2n ** 64n - 1n;

/** Resolves when the transport says that the rank is gone, or that another process is in its place; not where it says anything else. */
function whenLost(
  { memory }: Arena,
  { succession }: PortableEngineOptions['transport'],
  peer: number,
  signal: AbortSignal,
): Promise<undefined> {
  return new Promise((resolve) => {
    const stop = succession?.onReplace((replaced) => {
      if (replaced.includes(peer)) resolve(undefined);
    });
    if (stop !== undefined) signal.addEventListener('abort', stop, { once: true });
    const limits = { peers: [peer], timeoutMs: Number.POSITIVE_INFINITY, signal };
    memory.signals.until(0, { cmp: 'gt', value: LARGEST_WORD }, limits).catch((error: unknown) => {
      if (isEpError(error) && error.code === 'EP_PEER_LOST') resolve(undefined);
    });
  });
}

/** Who opens the group from the beginning, ascending. */
export function membersOf({ ranks, size = ranks.length, active }: PortableEngineOptions): readonly number[] {
  return active === undefined ? Array.from({ length: size }, (_, member) => member) : [...active].sort((a, b) => a - b);
}
