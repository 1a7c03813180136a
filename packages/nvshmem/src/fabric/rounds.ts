/** Short exchanges over the backing `fabric`: within a host through memory of its first rank, between hosts by one put of that rank to each other one's. */
import {
  type CarriedCall,
  type Carrier,
  type CarrierMaker,
  EpError,
  invalid,
  type Rank,
  Resource,
  type RoundFold,
  type RoundMaker,
  type Rounds,
  type RoundsOptions,
} from '@ep/core';
import {
  type NativeCarriedCall,
  type NativeFabricCarrier,
  type NativeFabricNic,
  type NativeFabricRounds,
  type NativeRankContext,
  native,
} from '@ep/native';
import { RankMemory } from '@ep/native/ranks';

export interface FabricRoundsInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly nic: NativeFabricNic;
  readonly settle: RoundMaker['settle'];
}

/** Of an entry: the length of what follows. */
const HEAD_BYTES = 8;

/** Members of a host next to each other, hosts in the order of their first ranks: places in the group. */
function seatsOf(hosts: readonly number[]): { readonly seats: readonly number[]; readonly firsts: readonly number[] } {
  const byHost = new Map<number, number[]>();
  for (const [place, host] of hosts.entries()) {
    const known = byHost.get(host);
    if (known === undefined) byHost.set(host, [place]);
    else known.push(place);
  }
  const firsts: number[] = [];
  const seats: number[] = [];
  for (const places of byHost.values()) {
    firsts.push(seats.length);
    seats.push(...places);
  }
  return { seats, firsts };
}

/** What all said in a round. */
class Heard {
  readonly into: Uint8Array;
  /** 0: nothing that came whole. */
  round = 0;
  readonly #lengths: Uint32Array;

  constructor(byteLength: number) {
    this.into = new Uint8Array(byteLength);
    this.#lengths = new Uint32Array(this.into.buffer);
  }

  /** `entries`: by place in the group, where the member's is. */
  words(entries: readonly number[]): readonly Uint8Array[] {
    return entries.map((at) => {
      const begin = at + HEAD_BYTES;
      return this.into.subarray(begin, begin + this.#lengths[at / Uint32Array.BYTES_PER_ELEMENT]!);
    });
  }
}

const EXCHANGES = ['late', 'unlike', 'alike'] as const;
const JOINS = [...EXCHANGES, 'over'] as const;

class FabricRounds extends Resource implements Rounds {
  readonly #native: NativeFabricRounds;
  /** Of even and of odd rounds. */
  readonly #heard: readonly [Heard, Heard];
  readonly #entries: readonly number[];

  constructor(rounds: NativeFabricRounds, seats: readonly number[], entryBytes: number) {
    super('rounds');
    this.#native = rounds;
    this.#heard = [new Heard(seats.length * entryBytes), new Heard(seats.length * entryBytes)];
    this.#entries = seats.map((_, place) => seats.indexOf(place) * entryBytes);
  }

  enter(round: number, said: Uint8Array, mostMs: number): readonly Uint8Array[] | undefined {
    this.checkOpen('enter');
    const heard = this.#place(round);
    return this.#words(heard, round, this.#native.enter(round, said, mostMs, heard.into));
  }

  look(round: number): readonly Uint8Array[] | undefined {
    this.checkOpen('look');
    const heard = this.#place(round);
    return this.#words(heard, round, this.#native.look(round, heard.into));
  }

  exchange(
    round: number,
    head: Uint8Array,
    given: ArrayBufferView | undefined,
    mostMs: number,
    fold?: RoundFold,
    output?: ArrayBufferView,
  ): (typeof EXCHANGES)[number] {
    this.checkOpen('exchange');
    const heard = this.#place(round);
    const { into } = heard;
    const end =
      fold === undefined || output === undefined
        ? this.#native.exchange(round, head, given, mostMs, into)
        : this.#native.exchange(round, head, given, mostMs, into, fold.type, fold.reduction, fold.factor, output);
    if (end !== 0) heard.round = round;
    return EXCHANGES[end];
  }

  kept(round: number): readonly Uint8Array[] | undefined {
    const heard = this.#heard[round % 2]!;
    return heard.round === round ? heard.words(this.#entries) : undefined;
  }

  /** As `exchange`, of a carrier that joins a call in this round. */
  joined(
    round: number,
    join: (rounds: NativeFabricRounds, into: Uint8Array) => ReturnType<NativeFabricCarrier['join']>,
  ): (typeof JOINS)[number] {
    this.checkOpen('join');
    const heard = this.#place(round);
    const end = join(this.#native, heard.into);
    if (end !== 0) heard.round = round;
    return JOINS[end];
  }

  /** HAZARD: until a round came whole, what is there is half of it and half of the one before the last. */
  #place(round: number): Heard {
    const heard = this.#heard[round % 2]!;
    heard.round = 0;
    return heard;
  }

  #words(heard: Heard, round: number, came: boolean): readonly Uint8Array[] | undefined {
    if (!came) return undefined;
    heard.round = round;
    return heard.words(this.#entries);
  }

  protected override release(): void {
    this.#native.close();
  }
}

/** As the addon numbers them. */
const KINDS = [
  'all-reduce',
  'all-to-all',
  'all-gather',
  'broadcast',
  'reduce-scatter',
  'reduce',
  'gather',
  'scatter',
] as const satisfies CarriedCall['kind'][];
const TURNS = ['over', 'moved', 'stuck'] as const;

type Arrays = Parameters<Carrier['carry']>[0];

class FabricCarrier extends Resource implements Carrier {
  readonly #native: NativeFabricCarrier;
  /** Places in the group, in the order of the members. */
  readonly #seats: readonly number[];
  /** Members of a host are next to each other in the group. */
  readonly #inOrder: boolean;

  constructor(carrier: NativeFabricCarrier, seats: readonly number[]) {
    super('carrier');
    this.#native = carrier;
    this.#seats = seats;
    this.#inOrder = seats.every((place, at) => place === at);
  }

  begin(call: CarriedCall): void {
    this.checkOpen('begin');
    this.#native.begin(...this.#numbered(call));
  }

  carry(inputs: Arrays, outputs: Arrays, mostMs: number): ReturnType<Carrier['carry']> {
    this.checkOpen('carry');
    return TURNS[this.#native.carry(this.#seated(inputs), this.#seated(outputs), mostMs)];
  }

  join(
    rounds: Rounds,
    head: Uint8Array,
    call: CarriedCall,
    inputs: Arrays,
    outputs: Arrays,
    roundMs: number,
    mostMs: number,
  ): (typeof JOINS)[number] {
    this.checkOpen('join');
    const [given, taken] = [this.#seated(inputs), this.#seated(outputs)];
    return (rounds as FabricRounds).joined(call.number, (words, into) =>
      this.#native.join(words, head, roundMs, mostMs, into, ...this.#numbered(call), given, taken),
    );
  }

  lengthen(longest: number): void {
    this.checkOpen('lengthen');
    this.#native.lengthen(longest);
  }

  #numbered({ number, kind, type, reduction, factor, longest, root = 0 }: CarriedCall): NativeCarriedCall {
    return [number, KINDS.indexOf(kind), type, reduction, factor, longest, this.#seats.indexOf(root)];
  }

  #seated(arrays: Arrays): Arrays {
    return this.#inOrder || arrays.length !== this.#seats.length ? arrays : this.#seats.map((place) => arrays[place]!);
  }

  get sent(): number {
    return this.#native.sent();
  }

  protected override release(): void {
    this.#native.close();
  }
}

/** Undefined in a world with more ranks than there are places for. */
export function roundMaker({ rank, worldSize, context, nic, settle }: FabricRoundsInit): RoundMaker | undefined {
  const { binding } = native();
  const { mostMembers, mostBytes, entryBytes } = binding.fabricRoundsSize(worldSize, 0);
  if (worldSize > mostMembers) return undefined;
  const nativeOf = (memory: RoundsOptions['memory'], where: string) => {
    if (memory instanceof RankMemory && memory.context === context) return memory.nativeMemory(where);
    throw new EpError('EP_INVALID_ARGUMENT', `${where}: the memory belongs to another transport`);
  };
  const seated = ({ ranks, hosts }: Pick<RoundsOptions, 'ranks' | 'hosts'>, where: string) => {
    const self = ranks.indexOf(rank);
    if (self < 0 || hosts.length !== ranks.length) {
      throw invalid('ranks', {
        where,
        expected: `ranks with rank ${rank} among them, and a host for each`,
        found: { ranks, hosts },
      });
    }
    return { self, ...seatsOf(hosts) };
  };
  const carriers: CarrierMaker = {
    size: (groups) => binding.fabricCarrierSize(worldSize, groups),
    carries: (type, reduction) => binding.fabricCarries(type, reduction),
    clear: (memory, group) => binding.fabricCarrierClear(nativeOf(memory, 'clear'), group),
    part: (memory) => binding.fabricRoundsPart(nativeOf(memory, 'part')),
    open: ({ memory, group, ranks, hosts, parts }) => {
      const { self, seats, firsts } = seated({ ranks, hosts }, 'carrier');
      const made = new binding.FabricCarrier(
        nic,
        nativeOf(memory, 'carrier'),
        group,
        Int32Array.from(seats, (place) => ranks[place]!),
        Uint32Array.from(firsts),
        seats.indexOf(self),
        Buffer.concat(parts),
      );
      return new FabricCarrier(made, seats);
    },
  };
  return {
    mostMembers,
    mostBytes,
    size: (groups) => {
      const { byteLength, signalSlots } = binding.fabricRoundsSize(worldSize, groups);
      return { byteLength, signalSlots };
    },
    part: (memory) => binding.fabricRoundsPart(nativeOf(memory, 'part')),
    open: ({ memory, group, token, ranks, hosts, leader, folds = [[...ranks.keys()]] }) => {
      const { self, seats, firsts } = seated({ ranks, hosts }, 'rounds');
      const foldedFirsts = folds.map((_, at) => folds.slice(0, at).flat().length);
      const made = new binding.FabricRounds(
        nic,
        nativeOf(memory, 'rounds'),
        group,
        BigInt.asUintN(64, token),
        Int32Array.from(seats, (place) => ranks[place]!),
        Uint32Array.from(firsts),
        seats.indexOf(self),
        leader,
        Uint32Array.from(folds.flat(), (place) => seats.indexOf(place)),
        Uint32Array.from(foldedFirsts),
      );
      return new FabricRounds(made, seats, entryBytes);
    },
    settle,
    carriers,
  };
}
