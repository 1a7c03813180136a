/** Ranks that are admitted while members die: the agreement alone, over every order of deliveries, deaths, detections and answers that a seed makes. */
import { memoryStore } from '@ep/core';
import { describe, expect, it } from 'vitest';
import { answer, ask, attemptOf, foundByAll } from '../../src/portable/admission.js';
import { lifeOf, takeOut } from '../../src/portable/evictions.js';
import { readyKey, readyWord } from '../../src/portable/meeting.js';
import { type Commit, Membership } from '../../src/portable/membership.js';
import type { StateRecord } from '../../src/portable/records.js';
import { numbers } from '../portable/world.js';

const SEEDS = process.env.EP_TEST_FULL === '1' ? 20_000 : 500;
const CALL = 8;

type Word = StateRecord | { readonly kind: 'done' };

/**
 * Members 0 .. size - 1 make a call that admits rank `size`. Each tells all that it has its part of the call, and completes it with the word of the last one. What a dead member has said
 * may be lost from some point on, but for what had landed when it answered; who finds the death itself looks at what has landed first.
 */
class Model {
  readonly members: readonly Membership[];
  readonly commits: readonly Commit[][];
  readonly #comer: number;
  readonly #queues: Word[][][];
  /** Of each queue: how many words of it can not be lost. */
  readonly #landed: number[][];
  readonly #dead = new Set<number>();
  readonly #made = new Set<number>();
  readonly #done: readonly Set<number>[];
  /** Members that have completed the call and have not answered: what they will say. */
  readonly #answering = new Map<number, Parameters<Membership['enter']>[0]>();
  readonly #below: (limit: number) => number;
  joined = false;

  constructor(size: number, seed: number) {
    const ranks = [...Array(size + 1).keys()];
    this.#comer = size;
    this.#below = numbers(seed);
    this.#queues = ranks.map(() => ranks.map(() => []));
    this.#landed = ranks.map(() => ranks.map(() => 0));
    this.commits = ranks.map(() => []);
    this.#done = ranks.map((rank) => new Set([rank]));
    this.members = ranks.map(
      (rank) =>
        new Membership({
          rank,
          size: size + 1,
          active: rank === size ? [size] : ranks.slice(0, size),
          tell: (peer, record) => this.#queues[rank]![peer]!.push(record),
          completed: () => (this.commits[rank]!.some(({ admitted }) => admitted) ? CALL : CALL - 1),
          onCommit: (commit) => {
            this.commits[rank]!.push(commit);
            const { epoch, changes, active } = this.members[rank]!;
            if (commit.admitted !== undefined) this.#answering.set(rank, { epoch, changes, active });
            // Forfeited: nobody makes it again.
            else this.#made.add(rank);
          },
          onRepair: () => {},
          onAwaited: () => {},
          onExpelled: (by) => {
            throw new Error(`rank ${by} takes rank ${rank} for dead`);
          },
        }),
    );
  }

  get survivors(): readonly number[] {
    return [...Array(this.#comer).keys()].filter((rank) => !this.#dead.has(rank));
  }

  die(rank: number): void {
    this.#dead.add(rank);
    for (const [to, queue] of this.#queues[rank]!.entries()) {
      queue.length = Math.max(this.#landed[rank]![to]!, this.#below(queue.length + 1));
    }
  }

  step(): boolean {
    const events = [
      ...this.survivors.flatMap((rank) => [...this.#call(rank), ...this.#answer(rank)]),
      ...[...this.survivors, ...(this.joined ? [this.#comer] : [])].flatMap((to) => this.#hear(to)),
    ];
    if (events.length === 0) return false;
    events[this.#below(events.length)]!();
    return true;
  }

  #call(rank: number): readonly (() => void)[] {
    const member = this.members[rank]!;
    const { agreeing, goneMembers, active } = member;
    if (!agreeing && goneMembers.length > 0) return [() => member.begin()];
    if (this.#made.has(rank) || agreeing) return [];
    return [
      () => {
        this.#made.add(rank);
        for (const peer of active) if (peer !== rank) this.#queues[rank]![peer]!.push({ kind: 'done' });
        this.#complete(rank);
      },
    ];
  }

  #complete(rank: number): void {
    const member = this.members[rank]!;
    if (!this.#made.has(rank) || member.agreeing || this.commits[rank]!.length > 0) return;
    if (member.active.every((peer) => this.#done[rank]!.has(peer))) member.admit([[this.#comer, 1]], CALL);
  }

  /** All that it has said has landed; then the comer may come. */
  #answer(rank: number): readonly (() => void)[] {
    const told = this.#answering.get(rank);
    if (told === undefined) return [];
    return [
      () => {
        this.#answering.delete(rank);
        for (const [to, queue] of this.#queues[rank]!.entries()) this.#landed[rank]![to] = queue.length;
        if (this.joined) return;
        this.joined = true;
        this.members[this.#comer]!.enter(told);
      },
    ];
  }

  #hear(to: number): readonly (() => void)[] {
    const member = this.members[to]!;
    const events: (() => void)[] = [];
    for (const [from, queues] of this.#queues.entries()) {
      const queue = queues[to]!;
      // What the comer says waits until it is known.
      const held = from === this.#comer && member.isGone(from) && !this.#dead.has(from);
      if (queue.length > 0 && !held) events.push(() => this.#deliver(from, to));
      if (!this.#dead.has(from) || member.isGone(from)) continue;
      events.push(() => {
        while (queue.length > 0) this.#deliver(from, to);
        member.lose(from);
        member.begin();
      });
    }
    return events;
  }

  #deliver(from: number, to: number): void {
    const word = this.#queues[from]![to]!.shift()!;
    const landed = this.#landed[from]!;
    landed[to] = Math.max(0, landed[to]! - 1);
    const member = this.members[to]!;
    if (member.isGone(from)) return;
    if (word.kind !== 'done') {
      member.receive(from, word);
      return;
    }
    this.#done[to]!.add(from);
    this.#complete(to);
  }
}

describe.each([
  { size: 1, deaths: 0 },
  { size: 2, deaths: 1 },
  { size: 3, deaths: 1 },
  { size: 4, deaths: 2 },
  { size: 5, deaths: 3 },
])('$size members of which $deaths die while they admit a rank', ({ size, deaths }) => {
  it('all admit it, and it comes, or none does', () => {
    const found = { admitted: 0, refused: 0 };
    for (let seed = 1; seed <= SEEDS; seed++) {
      const model = new Model(size, seed);
      const below = numbers(seed + 3_000_000);
      const victims = [...Array(size).keys()].sort(() => below(2) - 0.5).slice(0, deaths);
      for (const victim of victims) {
        for (let steps = below(6 * size); steps > 0 && model.step(); steps--);
        model.die(victim);
      }
      for (let steps = 0; model.step(); steps++) expect(steps, `seed ${seed} does not end`).toBeLessThan(10_000);
      const { survivors, members, commits, joined } = model;
      const [first] = survivors;
      const admits = commits[first!]!.some(({ admitted }) => admitted !== undefined);
      expect(joined, `seed ${seed}`).toBe(admits);
      for (const rank of survivors) {
        expect(commits[rank], `seed ${seed}: rank ${rank} and rank ${first}`).toEqual(commits[first!]);
        expect(members[rank]!.active, `seed ${seed}`).toEqual(admits ? [...survivors, size] : survivors);
        expect(members[rank]!.agreeing, `seed ${seed}`).toBe(false);
      }
      if (admits) expect(members[size]!.active, `seed ${seed}`).toEqual([...survivors, size]);
      found[admits ? 'admitted' : 'refused']++;
    }
    expect(found.admitted).toBeGreaterThan(20);
    if (deaths > 0) expect(found.refused).toBeGreaterThan(20);
  });
});

it('whom all have found is whom each has found, in the same attempt', () => {
  const all = foundByAll([
    [
      [1, 3],
      [2, 1],
      [4, 0],
      [5, 2],
    ],
    [
      [1, 3],
      [2, 2],
      [5, 2],
      [4, 1],
    ],
    [
      [2, 1],
      [1, 3],
      [4, 1],
    ],
  ]);
  expect([...all]).toEqual([
    [1, 3],
    [2, 0],
    [4, 0],
  ]);
});

it('a rank that gives up and a member that admits it: one of them is first, and both know', async () => {
  const store = memoryStore();
  const admission = {
    epoch: 4,
    changes: 2,
    active: [0, 1],
    sequence: 9,
    size: 2,
    lives: [0, 1],
    admitted: [{ rank: 1, attempt: 2 }],
  };
  expect(await attemptOf(store, 'key', 1, 'a')).toBeUndefined();
  await store.set(readyKey('key', 1), readyWord('a'));
  await expect(ask(store, 'key', { rank: 1, life: 'a' }, { timeoutMs: 1 })).rejects.toMatchObject({
    code: 'EP_TIMEOUT',
  });
  expect(await answer(store, 'key', { rank: 1, attempt: 1 }, admission)).toBe(false);
  expect(await attemptOf(store, 'key', 1, 'a')).toBe(0);
  const asked = ask(store, 'key', { rank: 1, life: 'a' }, { timeoutMs: 20_000 });
  while ((await attemptOf(store, 'key', 1, 'a')) !== 2);
  // Of another process in that place: it has not said anything.
  expect(await attemptOf(store, 'key', 1, 'b')).toBeUndefined();
  // Both members say it.
  expect(await answer(store, 'key', { rank: 1, attempt: 2 }, admission)).toBe(true);
  expect(await answer(store, 'key', { rank: 1, attempt: 2 }, admission)).toBe(true);
  expect(await asked).toEqual({ mine: { rank: 1, attempt: 2 }, admission });
  expect(await attemptOf(store, 'key', 1, 'a')).toBe(0);
});

it('who is taken out takes nobody out, in this life', async () => {
  const store = memoryStore();
  expect(await takeOut(store, 'key', [lifeOf(1, 0)], lifeOf(0, 0))).toBe(true);
  expect(await takeOut(store, 'key', [lifeOf(0, 0)], lifeOf(1, 0))).toBe(false);
  expect(await takeOut(store, 'key', [lifeOf(1, 0), lifeOf(2, 0)], lifeOf(0, 0))).toBe(true);
  expect(await takeOut(store, 'key', [lifeOf(0, 0)], lifeOf(2, 0))).toBe(false);
  expect(await takeOut(store, 'key', [lifeOf(0, 0)], lifeOf(1, 1))).toBe(true);
  expect(await takeOut(store, 'key', [lifeOf(1, 1)], lifeOf(0, 0))).toBe(false);
});
