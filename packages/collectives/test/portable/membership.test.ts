/** The agreement alone, over every order of deliveries, deaths and detections that a seed makes. */
import { describe, expect, it } from 'vitest';
import { type Commit, Membership } from '../../src/portable/membership.js';
import type { StateRecord } from '../../src/portable/records.js';
import { numbers } from './world.js';

const SEEDS = process.env.EP_TEST_FULL === '1' ? 20_000 : 500;

interface Committed extends Commit {
  readonly active: readonly number[];
}

/** Ranks that speak over queues which keep the order of each pair and nothing else. */
class Model {
  readonly members: readonly Membership[];
  readonly commits: readonly Committed[][];
  readonly completed: number[];
  readonly #queues: StateRecord[][][];
  readonly #dead = new Set<number>();
  /** Taken out alive, which they do not know. */
  readonly #out = new Set<number>();
  /** Repairs that ranks are to make. */
  readonly calls = new Map<number, number>();
  /** Ranks that wait in a repair, and the number of their call. */
  readonly #repairing = new Map<number, number>();
  /** Repairs that were told of with fewer calls than their ranks had completed. */
  understated = 0;
  readonly #below: (limit: number) => number;

  constructor(size: number, seed: number) {
    const ranks = [...Array(size).keys()];
    this.#below = numbers(seed);
    this.#queues = ranks.map(() => ranks.map(() => []));
    this.commits = ranks.map(() => []);
    // As the closing of calls has it: some have completed the one that others have not.
    this.completed = ranks.map(() => 7 + this.#below(2));
    this.members = ranks.map(
      (rank) =>
        new Membership({
          rank,
          size,
          active: ranks,
          tell: (peer, record) => {
            // HAZARD: whoever hears of a repair carries no call on that the other has not completed: less than is true ends a call here that has ended well there.
            if (record.repair !== undefined && record.completed < this.completed[rank]!) this.understated++;
            this.#queues[rank]![peer]!.push(record);
          },
          completed: () => this.completed[rank]!,
          onCommit: (commit) => {
            this.commits[rank]!.push({ ...commit, active: this.members[rank]!.active });
            this.completed[rank] = commit.repair ?? commit.completed + 1;
            const mine = this.#repairing.get(rank);
            if (commit.repair !== undefined) this.#repairing.delete(rank);
            else if (mine !== undefined) this.members[rank]!.repair(mine);
          },
          onRepair: (_from, completed) => {
            this.completed[rank] = Math.max(this.completed[rank]!, completed);
            // It may be what this rank makes next.
            if (this.#below(2) === 0) this.come(rank);
          },
          onAwaited: () => {},
          onExpelled: (by) => {
            throw new Error(`rank ${by} takes rank ${rank} for dead`);
          },
        }),
    );
  }

  get survivors(): readonly number[] {
    return this.#living.filter((rank) => !this.#out.has(rank));
  }

  get #living(): readonly number[] {
    return [...this.members.keys()].filter((rank) => !this.#dead.has(rank));
  }

  /** What it has said may be lost from some point on, differently for each peer. */
  die(rank: number): void {
    this.#dead.add(rank);
    for (const queue of this.#queues[rank]!) queue.length = this.#below(queue.length + 1);
  }

  /** `by` has won the right to take it out, and goes on without it; the others hear of that from `by` alone. */
  evict(rank: number, by: number): void {
    this.#out.add(rank);
    this.members[by]!.lose(rank);
    this.members[by]!.begin();
  }

  /** Makes the call that it is to make, unless it has made it. */
  come(rank: number): void {
    const sequence = this.calls.get(rank);
    this.calls.delete(rank);
    if (sequence !== undefined) this.repair(rank, sequence);
  }

  repair(rank: number, sequence: number): void {
    if (this.#dead.has(rank)) return;
    this.#repairing.set(rank, sequence);
    this.members[rank]!.repair(sequence);
  }

  /** One rank hears of a death, and needs it gone; or one record is delivered. False: nothing is left to do. */
  step(): boolean {
    const events: (() => void)[] = [];
    for (const to of this.#living) {
      const member = this.members[to]!;
      for (const from of this.members.keys()) {
        const queue = this.#queues[from]![to]!;
        if (queue.length > 0) events.push(() => member.receive(from, queue.shift()!));
        if (this.#dead.has(from) && !member.isGone(from)) {
          events.push(() => {
            // What landed before is looked at first, or not: the transport may find the death by another way.
            member.lose(from);
            member.begin();
          });
        }
      }
      if (!this.#out.has(to) && !member.agreeing && member.goneMembers.length > 0) events.push(() => member.begin());
    }
    if (events.length === 0) return false;
    events[this.#below(events.length)]!();
    return true;
  }
}

describe.each([
  { size: 2, deaths: 1 },
  { size: 3, deaths: 1 },
  { size: 3, deaths: 2 },
  { size: 4, deaths: 2 },
  { size: 5, deaths: 3 },
  { size: 6, deaths: 4 },
])('$size ranks of which $deaths die', ({ size, deaths }) => {
  it('end with the same views, the same calls and nobody waiting', () => {
    let several = 0;
    for (let seed = 1; seed <= SEEDS; seed++) {
      const model = new Model(size, seed);
      const below = numbers(seed + 1_000_000);
      const victims = [...Array(size).keys()].sort(() => below(2) - 0.5).slice(0, deaths);
      for (const victim of victims) {
        model.die(victim);
        // Any number of steps until the next one dies: in the middle of an agreement, or after it.
        for (let steps = below(4 * size); steps > 0 && model.step(); steps--);
      }
      for (let steps = 0; model.step(); steps++) expect(steps, `seed ${seed} does not end`).toBeLessThan(10_000);
      const { survivors } = model;
      const [first] = survivors;
      for (const rank of survivors) {
        expect(model.commits[rank], `seed ${seed}: rank ${rank} and rank ${first}`).toEqual(model.commits[first!]);
        expect(model.members[rank]!.active, `seed ${seed}`).toEqual(survivors);
        expect(model.members[rank]!.agreeing, `seed ${seed}`).toBe(false);
      }
      const commits = model.commits[first!]!;
      expect(commits.flatMap(({ lost }) => lost).sort()).toEqual([...victims].sort());
      if (commits.length > 1) several++;
    }
    // The seeds reach one agreement after the other as well.
    if (deaths > 1) expect(several).toBeGreaterThan(20);
  });
});

describe.each([
  { size: 2, deaths: 0, evictions: 0 },
  { size: 3, deaths: 0, evictions: 1 },
  { size: 3, deaths: 1, evictions: 0 },
  { size: 4, deaths: 1, evictions: 1 },
  { size: 6, deaths: 2, evictions: 2 },
])(
  '$size ranks that repair, of which $deaths die and $evictions are taken out alive',
  ({ size, deaths, evictions }) => {
    it('end with the same views and go on behind the highest call, once', () => {
      let several = 0;
      for (let seed = 1; seed <= SEEDS; seed++) {
        const model = new Model(size, seed);
        const below = numbers(seed + 2_000_000);
        const ranks = [...Array(size).keys()].sort(() => below(2) - 0.5);
        const [dying, out, staying] = [
          ranks.slice(0, deaths),
          ranks.slice(deaths, deaths + evictions),
          ranks.slice(deaths + evictions),
        ];
        for (const rank of staying) model.calls.set(rank, 10 + below(9));
        const highest = Math.max(...model.calls.values());
        const events = [
          ...dying.map((rank) => () => model.die(rank)),
          ...out.map((rank) => () => model.evict(rank, staying[below(staying.length)]!)),
          // Those that go may have come before.
          ...[...dying, ...out].flatMap((rank) => (below(2) === 0 ? [] : [() => model.repair(rank, 30)])),
          ...staying.map((rank) => () => model.come(rank)),
        ].sort(() => below(2) - 0.5);
        for (const event of events) {
          event();
          for (let steps = below(3 * size); steps > 0 && model.step(); steps--);
        }
        for (let steps = 0; model.step(); steps++) expect(steps, `seed ${seed} does not end`).toBeLessThan(10_000);
        expect(model.understated, `seed ${seed}`).toBe(0);
        const [first] = staying;
        for (const rank of staying) {
          expect(model.commits[rank], `seed ${seed}: rank ${rank} and rank ${first}`).toEqual(model.commits[first!]);
          expect(model.members[rank]!.active, `seed ${seed}`).toEqual([...staying].sort());
          expect(model.members[rank]!.agreeing, `seed ${seed}`).toBe(false);
        }
        const idle = model.commits[first!]!.filter(({ lost, repair }) => lost.length === 0 && repair === undefined);
        expect(idle, `seed ${seed}: agreed on nothing`).toEqual([]);
        const repairs = model.commits[first!]!.flatMap(({ repair }) => repair ?? []);
        expect(repairs.length, `seed ${seed}`).toBe(1);
        // Of one that goes the number counts if it goes later.
        expect([highest, 30], `seed ${seed}`).toContain(repairs[0]);
        if (deaths + evictions === 0) expect(repairs[0]).toBe(highest);
        if (model.commits[first!]!.length > 1) several++;
      }
      // The seeds reach deaths before and after the repair as well.
      if (deaths + evictions > 0) expect(several).toBeGreaterThan(20);
    });
  },
);

it('the last completed call is the highest that a survivor has completed', () => {
  for (let seed = 1; seed <= 200; seed++) {
    const model = new Model(4, seed);
    const before = [...model.completed];
    model.die(seed % 4);
    while (model.step());
    const highest = Math.max(...model.survivors.map((rank) => before[rank]!));
    for (const rank of model.survivors) expect(model.commits[rank]![0]!.completed).toBe(highest);
  }
});
