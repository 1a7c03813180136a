/**
 * How a rank that takes no part comes to the members, in a place that it has in the transport's memory. Through the store:
 *
 * 1. The rank retires its channels (links.ts), and writes that it asks, with a number that no other attempt of it has.
 * 2. Members that find this retire theirs to it. In a call of all they tell which ranks they have found; all of them know then whom all have found.
 * 3. Once all have completed a call that admits it, which they agree on as on a view (membership.ts), each lets its word to the others land and writes what the rank has to know.
 *    HAZARD: in this order. Whoever finds a member dead has then read its word, so that no member can go on as if nobody had been admitted.
 * 4. The rank opens channels to the members and says that it is ready; nobody writes to it before.
 *
 * A rank that gives up writes that in the place of what it waits for; one of both is first. Members that find it take the rank for lost.
 */
import type { Store } from '@ep/core';
import { lifeIn, readKey, readyKey, saysLeft } from './meeting.js';

const NOTHING = new Uint8Array(0);
const GIVEN_UP = Uint8Array.of(0);

const countKey = (key: string, rank: number): string => `${key}/joins/${rank}`;
const askKey = (key: string, rank: number): string => `${key}/joining/${rank}`;
const answerKey = (key: string, { rank, attempt }: Attempt): string => `${key}/admitted/${rank}/${attempt}`;

/** Written by a rank that was admitted, when it may be written to. */
export const joinedKey = (key: string, { rank, attempt }: Attempt): string => `${key}/joined/${rank}/${attempt}`;

export interface Attempt {
  readonly rank: number;
  readonly attempt: number;
}

/** What a rank that was admitted has to know. */
export interface Admission {
  /** Agreements of the members, and changes of their view. */
  readonly epoch: number;
  readonly changes: number;
  readonly active: readonly number[];
  /** The call that admitted it. */
  readonly sequence: number;
  /** Ranks of the group. */
  readonly size: number;
  /** By rank: how often it was admitted. */
  readonly lives: readonly number[];
  /** Those who were admitted together. */
  readonly admitted: readonly Attempt[];
}

/** Which process asks, and how often that rank has. */
const parseAsk = (bytes: Uint8Array): { readonly attempt: number; readonly life: string } => {
  const [attempt, life = ''] = Buffer.from(bytes).toString().split(' ');
  return { attempt: Number(attempt), life };
};

/**
 * What a member has found of a rank that takes no part: the number of its attempt, 0 if it makes none; undefined if it is not there. HAZARD: what a process has said that died
 * in this place, another one has not.
 */
export async function attemptOf(store: Store, key: string, rank: number, life: string): Promise<number | undefined> {
  const asks = await readKey(store, askKey(key, rank));
  const asked = asks && parseAsk(asks);
  if (asked?.life === life) return asked.attempt;
  const ready = await readKey(store, readyKey(key, rank));
  return ready !== undefined && !saysLeft(ready) && lifeIn(ready) === life ? 0 : undefined;
}

/** Tells the rank. False if it has given up. */
export async function answer(store: Store, key: string, attempt: Attempt, admission: Admission): Promise<boolean> {
  const mine = new Uint8Array(Buffer.from(JSON.stringify(admission)));
  const held = await store.compareSet(answerKey(key, attempt), NOTHING, mine);
  return held.byteLength !== GIVEN_UP.byteLength;
}

/** Asks, and waits for the answer. Rejects with `EP_TIMEOUT`, the reason of the signal, or what the store throws. */
export async function ask(
  store: Store,
  key: string,
  { rank, life }: { readonly rank: number; readonly life: string },
  limits: { readonly timeoutMs: number; readonly signal?: AbortSignal | undefined },
): Promise<{ readonly mine: Attempt; readonly admission: Admission }> {
  const mine = { rank, attempt: await store.add(countKey(key, rank), 1) };
  const { timeoutMs, signal } = limits;
  await store.set(askKey(key, rank), new Uint8Array(Buffer.from(`${mine.attempt} ${life}`)));
  let answered: Uint8Array;
  try {
    answered = await store.get(answerKey(key, mine), { timeoutMs, ...(signal && { signal }) });
  } catch (error) {
    answered = await store.compareSet(answerKey(key, mine), NOTHING, GIVEN_UP);
    if (answered.byteLength === GIVEN_UP.byteLength) throw error;
  } finally {
    await store.delete(askKey(key, rank));
  }
  return { mine, admission: JSON.parse(Buffer.from(answered).toString()) as Admission };
}

/** Of a group that is over. */
export async function forget(store: Store, key: string, rank: number): Promise<void> {
  const attempts = await store.add(countKey(key, rank), 0);
  for (let attempt = 1; attempt <= attempts; attempt++) {
    await store.delete(answerKey(key, { rank, attempt }));
    await store.delete(joinedKey(key, { rank, attempt }));
  }
  await store.delete(countKey(key, rank));
}

/** `[rank, attempt]` of those that a member has found. */
export type Found = readonly (readonly [rank: number, attempt: number])[];

/** Whom all members have found, with the attempt that all of them have found: 0 where they differ, or it makes none. */
export function foundByAll(each: readonly Found[]): ReadonlyMap<number, number> {
  const [first, ...others] = each.map((found) => new Map(found));
  const agreed = new Map<number, number>();
  for (const [rank, attempt] of first ?? []) {
    const said = others.map((found) => found.get(rank));
    if (said.includes(undefined)) continue;
    agreed.set(rank, said.every((one) => one === attempt) ? attempt : 0);
  }
  return agreed;
}
