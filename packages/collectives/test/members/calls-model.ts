/** Small calls of ranks without a transport: over queues which keep the order of each pair and nothing else, in any order of deliveries, deaths and detections that a seed makes. */
import { EpError } from '@ep/core';
import { expect } from 'vitest';
import type { EngineEnd } from '../../src/engine.js';
import { Collectives } from '../../src/portable/collectives.js';
import { farewell } from '../../src/portable/collectives-init.js';
import { inRankOrder } from '../../src/portable/fold-order.js';
import { Membership } from '../../src/portable/membership.js';
import type { ControlRecord } from '../../src/portable/records.js';
import { parseSet } from '../../src/portable/records.js';
import { Traces } from '../../src/portable/traces.js';
import { complete, numbers } from '../portable/world.js';

const never = (): never => {
  throw new Error('a small call needs no more than records');
};

/** What a rank gives to a call: sums show who contributed. */
const givenBy = (rank: number, sequence: number): number => 2 ** rank + 1000 * sequence;

interface Between {
  readonly send: (peer: number, record: ControlRecord) => void;
  /** False if the rank was taken out before; otherwise those are from now on. */
  readonly takeOut: (ranks: readonly number[], by: number) => boolean;
  readonly isDead: (rank: number) => boolean;
}

export class Rank {
  readonly membership: Membership;
  readonly collectives: Collectives;
  /** How its calls ended: those before a repair, and those after it. */
  readonly stories: [Promise<string>[], Promise<string>[]] = [[], []];
  /** It has made its repair, which has ended. */
  repaired = false;
  repairing = false;
  readonly #rank: number;
  readonly #between: Between;
  readonly #everyone: readonly number[];
  #sequence = 0;
  #abort: AbortController | undefined;

  constructor(rank: number, size: number, between: Between) {
    this.#rank = rank;
    this.#between = between;
    this.#everyone = [...Array(size).keys()];
    const tell = (peer: number, record: ControlRecord): void => {
      if (!this.membership.isGone(peer)) between.send(peer, record);
    };
    this.membership = new Membership({
      rank,
      size,
      active: this.#everyone,
      tell: (peer, record) => {
        this.collectives.relay(peer, parseSet(record.dead));
        tell(peer, record);
      },
      completed: () => this.collectives.completed,
      onCommit: (commit) => this.collectives.onCommit(commit),
      onAwaited: () => this.collectives.onAwaited(),
      onRepair: (from, completed) => this.collectives.onRepair(from, completed),
      onExpelled: never,
    });
    this.collectives = new Collectives({
      size: () => size,
      rank,
      membership: this.membership,
      traces: new Traces(),
      rounds: () => undefined,
      planOf: never,
      orderOf: () => inRankOrder,
      tell,
      reaches: () => true,
      send: never,
      kick: () => {},
      look: () => {},
      lookLately: () => {},
      drain: () => {},
      evict: async (ranks) => this.evict(ranks),
      leave: () => this.collectives.end(0, new EpError('EP_EVICTED', 'it went itself')),
    });
  }

  get story(): Promise<string>[] {
    return this.stories[this.repaired ? 1 : 0];
  }

  /** The next call. */
  call(): void {
    const sequence = ++this.#sequence;
    const array = [Uint32Array.of(givenBy(this.#rank, sequence))];
    const call = { kind: 'all-reduce', dtype: 'u32', reduceOp: 'sum', inputs: array, outputs: array } as const;
    this.#abort ??= new AbortController();
    const { signal } = this.#abort;
    const end = this.collectives.run(complete({ ...call, timeoutMs: Number.POSITIVE_INFINITY, signal }, sequence));
    this.story.push(
      Promise.resolve(end).then(
        ({ contributors }) => {
          const expected = contributors.reduce((sum, one) => sum + givenBy(one, sequence), 0);
          expect(array[0]![0], `call ${sequence} of ${contributors}`).toBe(expected);
          return `over ${contributors}`;
        },
        (error: EpError) => (error.code === 'EP_PEER_LOST' ? `lost ${error.context.lost}` : error.code),
      ),
    );
  }

  /** Gives up what it calls: nobody can go on from there. */
  giveUp(): void {
    this.#abort?.abort(new EpError('EP_ABORTED', 'enough'));
  }

  repair(evicted: readonly number[]): void {
    const sequence = ++this.#sequence;
    const membership = { evicted, admitted: [], size: 0, repairs: true, found: [] };
    const call = { ...complete({ kind: 'barrier', timeoutMs: Number.POSITIVE_INFINITY }, sequence), membership };
    this.repairing = true;
    void Promise.resolve(this.collectives.run(call)).then(
      (end: EngineEnd & { readonly sequence?: number }) => {
        this.#sequence = end.sequence!;
        this.#abort = undefined;
        this.repaired = true;
      },
      () => {},
    );
  }

  evict(ranks: readonly number[]): void {
    if (!this.#between.takeOut(ranks, this.#rank)) {
      const error = new EpError('EP_EVICTED', 'the members had taken it out before');
      this.collectives.end(0, error);
      throw error;
    }
    this.learn(() => {
      for (const rank of ranks) this.membership.lose(rank);
    });
  }

  /** As the engine does it. */
  learn(known: () => void): void {
    const before = this.#everyone.filter((rank) => this.membership.isGone(rank));
    const lastBefore = this.collectives.last;
    known();
    const { last } = this.collectives;
    for (const rank of this.#everyone) {
      if (before.includes(rank) || !this.membership.isGone(rank)) continue;
      if (!this.#between.isDead(rank)) {
        for (const record of farewell(rank, last, lastBefore)) this.#between.send(rank, record);
      }
      this.collectives.onLost(rank);
    }
  }

  receive(from: number, record: ControlRecord): void {
    if (this.membership.isGone(from)) return;
    if (record.kind === 'call') this.collectives.onCall(from, record);
    else if (record.kind === 'poison') this.collectives.onPoison(from, record);
    else if (record.kind === 'state' || record.kind === 'view') this.learn(() => this.membership.receive(from, record));
    else if (record.kind === 'evicted') this.collectives.end(record.completed, new EpError('EP_EVICTED', 'out'));
    else never();
  }
}

/** What ranks do: so many calls, of which some are given up; then a repair and as many calls again, where there is one. */
export interface Script {
  readonly calls: number;
  readonly repairs: boolean;
  /** Are named by the repair of each. */
  readonly evicted: readonly number[];
  readonly givingUp: readonly number[];
}

export class Model {
  readonly ranks: readonly Rank[];
  /** Words of one rank that another one passed on. */
  relayed = 0;
  readonly #script: Script;
  readonly #queues: ControlRecord[][][];
  readonly #dead = new Set<number>();
  readonly #out = new Set<number>();
  readonly #givingUp: Set<number>;
  readonly below: (limit: number) => number;

  constructor(size: number, seed: number, script: Script) {
    const all = [...Array(size).keys()];
    this.#script = script;
    this.#givingUp = new Set(script.givingUp);
    this.below = numbers(seed);
    this.#queues = all.map(() => all.map(() => []));
    this.ranks = all.map(
      (rank) =>
        new Rank(rank, size, {
          send: (peer, record) => this.#queues[rank]![peer]!.push(record),
          takeOut: (ranks, by) => {
            if (this.#out.has(by)) return false;
            for (const one of ranks) this.#out.add(one);
            return true;
          },
          isDead: (one) => this.#dead.has(one),
        }),
    );
  }

  get survivors(): readonly number[] {
    return this.#living.filter((rank) => !this.#out.has(rank));
  }

  get #living(): readonly number[] {
    return [...this.ranks.keys()].filter((rank) => !this.#dead.has(rank));
  }

  /** What it has said may be lost from some point on, differently for each peer; or all that was not heard. */
  die(rank: number, heard: 'some' | 'none' = 'some'): void {
    this.#dead.add(rank);
    for (const queue of this.#queues[rank]!) queue.length = heard === 'none' ? 0 : this.below(queue.length + 1);
  }

  /** All that one has said to the other. */
  deliver(from: number, to: number): void {
    for (const record of this.#queues[from]![to]!.splice(0)) this.ranks[to]!.receive(from, record);
  }

  hearOfDeath(dead: number, at: number): void {
    const rank = this.ranks[at]!;
    rank.learn(() => rank.membership.lose(dead));
  }

  /** One rank does what it does next, or hears of a death; or one record is delivered. False: nothing is left to do. */
  async step(): Promise<boolean> {
    const events = this.#living.flatMap((to) => [...this.#ownEvents(to), ...this.#hear(to)]);
    if (events.length === 0) return false;
    events[this.below(events.length)]!();
    // What waits for the end of a repair goes on.
    if (this.#script.repairs) for (let i = 0; i < 8; i++) await undefined;
    return true;
  }

  #ownEvents(at: number): (() => void)[] {
    const rank = this.ranks[at]!;
    const { calls, repairs, evicted } = this.#script;
    const events: (() => void)[] = [];
    if (rank.story.length < calls && (rank.repaired || !rank.repairing)) events.push(() => rank.call());
    if (this.#givingUp.has(at) && rank.story.length > 0 && !rank.repairing) {
      events.push(() => {
        this.#givingUp.delete(at);
        rank.giveUp();
      });
    }
    const isDone = rank.story.length === calls && !this.#givingUp.has(at);
    if (repairs && isDone && !rank.repairing && !this.#out.has(at)) events.push(() => rank.repair(evicted));
    return events;
  }

  #hear(to: number): (() => void)[] {
    const rank = this.ranks[to]!;
    const events: (() => void)[] = [];
    for (const from of this.ranks.keys()) {
      const queue = this.#queues[from]![to]!;
      if (queue.length > 0) {
        events.push(() => {
          const record = queue.shift()!;
          if (record.kind === 'call' && record.of !== undefined) this.relayed++;
          rank.receive(from, record);
        });
      }
      if (this.#dead.has(from) && !rank.membership.isGone(from)) {
        events.push(() => rank.learn(() => rank.membership.lose(from)));
      }
    }
    return events;
  }
}
