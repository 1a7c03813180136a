/** A wrap of transports that counts what carriers are asked for, and holds ranks up in the middle of it. */
import type { Carrier, CarrierMaker, RoundMaker, Rounds, Transport } from '@ep/core';
import { expect } from 'vitest';
import type { Elements, EngineEnd } from '../../src/engine.js';
import { type Call, World, type WorldOptions, withMembers } from './world.js';

export const TWO_BY_TWO = [0, 0, 1, 1];
export const SIZE = TWO_BY_TWO.length;
/** Elements of f32 that are several steps of a carrier. */
export const LONG = 300_001;

/** Of f32, in place, unless `others` say otherwise. */
export const sumOf = (array: Elements, others: Partial<Call> = {}): Call => ({
  kind: 'all-reduce',
  dtype: 'f32',
  reduceOp: 'sum',
  inputs: [array],
  outputs: [array],
  ...others,
});

/** Counts the calls of all carriers, and the turns that these took. */
export class Counts {
  begun = 0;
  /** By rank. */
  readonly carriers: Carrier[] = [];
  /** Ranks that have taken rounds: by then they know whether all can carry calls. */
  readonly decided = new Set<number>();
  turns = 0;
  /** Calls that ranks have begun before all had said theirs. */
  joined = 0;
  /** Before a rank has a turn. */
  onTurn: (rank: number) => void = () => {};
  /** Once a rank has said its word where calls end that end at once; it hears the others' before it goes on. */
  onSaid: ((rank: number) => void) | undefined;
  readonly #rounds: Rounds[] = [];
  /** Times that words of a call were looked at by which it has not ended at once. */
  looks = 0;
  /** Ranks that do not hear yet that a call is over. */
  isHeld: (rank: number) => boolean = () => false;
  /** By rank: places in the memory of rounds and of carriers, in the order in which they were opened. */
  readonly places: { readonly rounds: number[]; readonly carriers: number[] }[] = [];
  /** Ranks that cannot map their host's memory. */
  refusing: number | undefined;

  readonly wrap = (transport: Transport<'bundled' | 'add'>, rank: number): Transport<'bundled' | 'add'> => {
    const { rounds } = transport;
    const maker = rounds!.carriers!;
    const places = { rounds: [] as number[], carriers: [] as number[] };
    this.places[rank] = places;
    const carriers: CarrierMaker = {
      ...maker,
      open: (options) => {
        places.carriers.push(options.group);
        const carrier = maker.open(rank === this.refusing ? { ...options, parts: [] } : options);
        this.carriers[rank] = carrier;
        return this.#counted(carrier, rank);
      },
    };
    const open: RoundMaker['open'] = (options) => {
      places.rounds.push(options.group);
      const made = rounds!.open(options);
      this.#rounds.push(made);
      return withMembers(made, {
        enter: (...said) => this.#say(rank, said[0], () => made.enter(...said), undefined),
        exchange: (...said) => this.#say(rank, said[0], () => made.exchange!(...said), 'late'),
        look: (round) => {
          this.looks++;
          return made.look(round);
        },
      });
    };
    return withMembers(transport, { rounds: { ...rounds!, open, carriers } });
  };

  #say<End>(rank: number, round: number, say: () => End, late: End): End {
    this.decided.add(rank);
    let end = say();
    this.onSaid?.(rank);
    const until = performance.now() + 5000;
    while (this.onSaid && end === late && performance.now() < until) {
      // Those of the first ranks of hosts pass on what they find.
      for (const each of this.#rounds) if (!each.closed) each.look(round);
      end = say();
    }
    return end;
  }

  #counted(carrier: Carrier, rank: number): Carrier {
    return withMembers(carrier, {
      begin: (call) => {
        this.begun++;
        carrier.begin(call);
      },
      carry: (inputs, outputs, mostMs) => {
        this.turns++;
        this.onTurn(rank);
        const found = carrier.carry(inputs, outputs, mostMs);
        return found === 'over' && this.isHeld(rank) ? 'stuck' : found;
      },
      join: (rounds, head, call, inputs, outputs, roundMs, mostMs) => {
        this.begun++;
        this.joined++;
        let end: ReturnType<NonNullable<Carrier['join']>> | undefined;
        const said = this.#say(
          rank,
          call.number,
          () => {
            end = end === undefined ? carrier.join!(rounds, head, call, inputs, outputs, roundMs, mostMs) : 'late';
            const words = end === 'late' ? rounds.look(call.number) : undefined;
            if (end === 'late') this.looks--;
            if (words !== undefined) end = words.every((word) => Buffer.compare(word, head) === 0) ? 'alike' : 'unlike';
            return end;
          },
          'late' as const,
        );
        if (said === 'late' || said === 'unlike') return said;
        this.turns++;
        try {
          this.onTurn(rank);
        } catch {
          // As where the transport takes nothing more: the next turn throws.
          return 'alike';
        }
        const found = said === 'over' ? said : carrier.carry(inputs, outputs, mostMs);
        return found === 'over' && !this.isHeld(rank) ? 'over' : 'alike';
      },
    });
  }
}

/** Ranks make the call, each inside of the one before, which has said its word: the last one hears all at once, and so do the others then. Nobody has told anything in a record. */
export function nested(
  world: World,
  counts: Counts,
  call: (rank: number) => Call,
  ranks: readonly number[] = [...Array(world.size).keys()],
): Promise<PromiseSettledResult<EngineEnd>[]> {
  const ends: Promise<EngineEnd>[] = [];
  counts.onSaid = (rank) => {
    const at = ranks.indexOf(rank) + 1;
    if (at < ranks.length) ends[at] = world.run(ranks[at]!, call(ranks[at]!));
  };
  ends[0] = world.run(ranks[0]!, call(ranks[0]!));
  counts.onSaid = undefined;
  // Where it is told in records.
  for (const [at, rank] of ranks.entries()) ends[at] ??= world.run(rank, call(rank));
  return Promise.allSettled(ends);
}

/** All ranks have found that all can. */
export async function carried(counts: Counts, options: Partial<WorldOptions> = {}): Promise<World> {
  const world = await World.open({ kind: 'fabric', size: SIZE, hosts: TWO_BY_TWO, wrap: counts.wrap, ...options });
  const { size } = world;
  const arrays = Array.from({ length: size }, () => new Float32Array(200));
  for (let i = 0; counts.begun < size && i < 2000; i++) await world.all((rank) => sumOf(arrays[rank]!));
  expect(counts.begun).toBe(size);
  return world;
}
