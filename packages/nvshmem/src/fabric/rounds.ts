/** Short exchanges over the backing `fabric`: within a host through memory of its first rank, between hosts by one put of that rank to each other one's. */
import {
  type CarriedCall,
  type Carrier,
  type CarrierMaker,
  EpError,
  invalid,
  type Rank,
  Resource,
  type RoundMaker,
  type Rounds,
  type RoundsOptions,
} from '@ep/core';
import {
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

class FabricRounds extends Resource implements Rounds {
  readonly #native: NativeFabricRounds;
  readonly #into: Uint8Array;
  readonly #lengths: Uint32Array;
  /** By place in the group: where the member's entry is. */
  readonly #entries: readonly number[];

  constructor(rounds: NativeFabricRounds, seats: readonly number[], entryBytes: number) {
    super('rounds');
    this.#native = rounds;
    this.#into = new Uint8Array(seats.length * entryBytes);
    this.#lengths = new Uint32Array(this.#into.buffer);
    this.#entries = seats.map((_, place) => seats.indexOf(place) * entryBytes);
  }

  enter(round: number, said: Uint8Array, mostMs: number): readonly Uint8Array[] | undefined {
    this.checkOpen('enter');
    return this.#native.enter(round, said, mostMs, this.#into) ? this.#words() : undefined;
  }

  look(round: number): readonly Uint8Array[] | undefined {
    this.checkOpen('look');
    return this.#native.look(round, this.#into) ? this.#words() : undefined;
  }

  #words(): readonly Uint8Array[] {
    return this.#entries.map((at) => {
      const begin = at + HEAD_BYTES;
      return this.#into.subarray(begin, begin + this.#lengths[at / Uint32Array.BYTES_PER_ELEMENT]!);
    });
  }

  protected override release(): void {
    this.#native.close();
  }
}

const TURNS = ['over', 'moved', 'stuck'] as const;

class FabricCarrier extends Resource implements Carrier {
  readonly #native: NativeFabricCarrier;
  /** Places in the group, in the order of the members. */
  readonly #seats: readonly number[];

  constructor(carrier: NativeFabricCarrier, seats: readonly number[]) {
    super('carrier');
    this.#native = carrier;
    this.#seats = seats;
  }

  begin({ kind, type, reduction, factor, longest }: CarriedCall): void {
    this.checkOpen('begin');
    this.#native.begin(kind === 'all-reduce' ? 0 : 1, type, reduction, factor, longest);
  }

  carry(inputs: readonly Uint8Array[], outputs: readonly Uint8Array[], mostMs: number): ReturnType<Carrier['carry']> {
    this.checkOpen('carry');
    const seated = (arrays: readonly Uint8Array[]): readonly Uint8Array[] =>
      arrays.length === this.#seats.length ? this.#seats.map((place) => arrays[place]!) : arrays;
    return TURNS[this.#native.carry(seated(inputs), seated(outputs), mostMs)];
  }

  get sent(): number {
    return this.#native.sent();
  }

  protected override release(): void {
    this.#native.close();
  }
}

/** Undefined in a world with more ranks than there are places for. */
export function roundMaker({ rank, worldSize, context, nic }: FabricRoundsInit): RoundMaker | undefined {
  const { binding } = native();
  const { byteLength, signalSlots, mostMembers, mostBytes, entryBytes } = binding.fabricRoundsSize(worldSize);
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
    size: (groups) => ({ byteLength: groups * byteLength, signalSlots: groups * signalSlots }),
    part: (memory) => binding.fabricRoundsPart(nativeOf(memory, 'part')),
    open: ({ memory, group, token, ranks, hosts, leader }) => {
      const { self, seats, firsts } = seated({ ranks, hosts }, 'rounds');
      const made = new binding.FabricRounds(
        nic,
        nativeOf(memory, 'rounds'),
        group,
        BigInt.asUintN(64, token),
        Int32Array.from(seats, (place) => ranks[place]!),
        Uint32Array.from(firsts),
        seats.indexOf(self),
        leader,
      );
      return new FabricRounds(made, seats, entryBytes);
    },
    carriers,
  };
}
