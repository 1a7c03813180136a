/** All ranks of a small world in this thread: the engine never blocks it, and the hostile transport's own threads reorder what they say. */
import { type HostileConfig, type HostileTransport, hostile } from '@ep/conformance/hostile';
import {
  byCapability,
  CloseScope,
  compose,
  type Member,
  memoryStore,
  prefixStore,
  type Store,
  type Transport,
} from '@ep/core';
import { efaGda } from '@ep/efa-gda';
import { ibgda } from '@ep/ibgda';
import { type FabricConfig, nvshmem } from '@ep/nvshmem';
import { openHost } from '../../src/backends.js';
import type { EngineCall, EngineEnd, GroupEngine, MembershipCall, MembershipEnd, OpKind } from '../../src/engine.js';
import { openPortableEngine, type PortableEngineOptions } from '../../src/portable/engine.js';

export type Kind = 'hostile' | 'shm' | 'ibgda' | 'mixed' | 'efa' | 'mixed-efa' | 'fabric';

interface Readmission {
  readonly store: Store;
  readonly joining: readonly number[];
  readonly without: readonly number[];
}

type Opening = readonly [member: Member, options: { readonly signal: AbortSignal }];
type Nic = Transport<'bundled' | 'add'> & { readmit(options: Readmission): Promise<void> };

/** Shared memory within nodes of two ranks, a NIC between them. */
const mixedOf =
  (how: 'open' | 'rejoin', openNic: (...opening: Opening) => Promise<Nic>) =>
  async (...opening: Opening) => {
    const [member, options] = opening;
    const of = (name: string): Member => ({ ...member, store: prefixStore(member.store, name) });
    const shm = await nvshmem.shm[how](of('shm'), options);
    const nic = await openNic(of('nic'), options);
    const nodes = Array.from({ length: member.worldSize }, (_, rank) => Math.floor(rank / 2));
    const readmit = async ({ store, joining, without }: Readmission): Promise<void> => {
      await shm.readmit({ store: prefixStore(store, 'shm'), joining, without });
      await nic.readmit({ store: prefixStore(store, 'nic'), joining, without });
    };
    return Object.assign(compose([shm, nic], byCapability(nodes)), { readmit });
  };
const mixed = (how: 'open' | 'rejoin') => mixedOf(how, (...opening) => ibgda.soft[how](...opening));
const mixedEfa = (how: 'open' | 'rejoin') => mixedOf(how, (...opening) => efaGda.soft[how](...opening));

/** Over these, others come in the place of ranks that are gone. */
const rejoiners = {
  shm: nvshmem.shm.rejoin,
  ibgda: ibgda.soft.rejoin,
  mixed: mixed('rejoin'),
  efa: efaGda.soft.rejoin,
  'mixed-efa': mixedEfa('rejoin'),
} as const;
const isElastic = (kind: Kind): kind is keyof typeof rejoiners => Object.hasOwn(rejoiners, kind);

export interface WorldOptions {
  readonly kind?: Kind;
  readonly size: number;
  readonly hostile?: HostileConfig;
  /** Of the NICs of `efa`. */
  readonly faults?: string;
  readonly stagingBytes?: number;
  readonly maxGroups?: number;
  readonly timeoutMs?: number;
  /** Calls whose time is up take ranks out. */
  readonly evicts?: boolean;
  /** Who takes part at first; the others ask to be taken in. */
  readonly active?: readonly number[];
  /** By rank. Those of one host share memory. */
  readonly hosts?: readonly number[];
  /** What each rank's engine gets in the place of its transport. */
  readonly wrap?: (transport: Transport<'bundled' | 'add'>, rank: number) => Transport<'bundled' | 'add'>;
}

/** Where libfabric is. */
export const LOOPBACK: FabricConfig = { provider: 'tcp;ofi_rxm', address: '127.0.0.1' };

/** Small enough that a few hundred elements are many chunks. */
export const SMALL_STAGING = 2 ** 16;

export class World implements AsyncDisposable {
  readonly size: number;
  readonly stores: readonly Store[];
  readonly transports: readonly (Transport<'bundled' | 'add'> & { readonly closed: boolean })[];
  readonly engines: readonly GroupEngine[];
  readonly #opened: { readonly transports: World['transports'][number][]; readonly engines: GroupEngine[] };
  readonly #options: WorldOptions;
  readonly #scope: CloseScope;
  readonly #sequences: number[];

  private constructor(init: {
    readonly options: WorldOptions;
    readonly scope: CloseScope;
    readonly stores: readonly Store[];
    readonly transports: World['transports'][number][];
    readonly engines: GroupEngine[];
  }) {
    this.#opened = init;
    this.#options = init.options;
    this.#scope = init.scope;
    this.size = init.options.size;
    this.stores = init.stores;
    this.transports = init.transports;
    this.engines = init.engines;
    this.#sequences = init.engines.map(() => 0);
  }

  static async open(options: WorldOptions): Promise<World> {
    const { size, kind = 'hostile' } = options;
    const scope = new CloseScope();
    const root = scope.add(memoryStore());
    const stores = Array.from({ length: size }, () => scope.add(root.handle()));
    const { signal } = new AbortController();
    const transports = await Promise.all(
      stores.map(async (store, rank) => {
        const member = { rank, worldSize: size, store };
        const config = { maxDelayUs: 100, ...options.hostile };
        if (kind === 'shm') return scope.add(await nvshmem.shm.open(member, { signal }));
        if (kind === 'ibgda') return scope.add(await ibgda.soft.open(member, { signal }));
        if (kind === 'mixed') return scope.add(await mixed('open')(member, { signal }));
        if (kind === 'mixed-efa') return scope.add(await mixedEfa('open')(member, { signal }));
        if (kind === 'fabric') return scope.add(await nvshmem.fabric.open(member, { signal, config: LOOPBACK }));
        if (kind === 'efa') {
          const faulty = options.faults === undefined ? {} : { config: { faults: options.faults } };
          return scope.add(await efaGda.soft.open(member, { signal, ...faulty }));
        }
        return scope.add(await hostile.open(member, { signal, config }));
      }),
    );
    const engines = await World.#openGroup(scope, options, transports, stores, 'world', [...stores.keys()]);
    return new World({ options, scope, stores, transports, engines });
  }

  static #openGroup(
    scope: CloseScope,
    {
      stagingBytes,
      maxGroups,
      timeoutMs = 10_000,
      evicts,
      active,
      hosts,
      wrap = (transport) => transport,
    }: WorldOptions,
    transports: World['transports'],
    stores: readonly Store[],
    name: string,
    ranks: readonly number[],
  ): Promise<GroupEngine[]> {
    return Promise.all(
      ranks.map(async (worldRank, rank) =>
        scope.add(
          await openPortableEngine({
            transport: wrap(transports[worldRank]!, worldRank),
            store: stores[worldRank]!,
            ranks,
            rank,
            name,
            timeoutMs,
            ...(hosts && {
              hosts: ranks.map((member) => hosts[member]!),
              openHost: (placement) =>
                openHost(
                  {
                    store: stores[worldRank]!,
                    root: stores[worldRank]!,
                    rank,
                    size: ranks.length,
                    ranks,
                    name,
                    timeoutMs,
                  },
                  placement,
                ),
            }),
            ...(stagingBytes === undefined ? {} : { stagingBytes }),
            ...(maxGroups === undefined ? {} : { maxGroups }),
            evicts,
            active,
            joins: active?.includes(rank) === false,
          }),
        ),
      ),
    );
  }

  /** Engines of a group of these ranks, in group order. */
  group(name: string, ranks: readonly number[]): Promise<GroupEngine[]> {
    return World.#openGroup(this.#scope, this.#options, this.transports, this.stores, name, ranks);
  }

  /** What the hostile transport did to the order of what was sent. */
  overtakes(): number {
    return this.transports.reduce((sum, transport) => sum + (transport as HostileTransport).counts().overtakes, 0);
  }

  /** The next call of one rank. */
  run(rank: number, call: Call): Promise<EngineEnd> {
    return Promise.resolve(this.engines[rank]!.run(complete(call, ++this.#sequences[rank]!)));
  }

  /** A call of every rank, or of some. */
  all(
    call: (rank: number) => Call,
    ranks: readonly number[] = [...this.engines.keys()],
  ): Promise<readonly EngineEnd[]> {
    return Promise.all(ranks.map((rank) => this.run(rank, call(rank))));
  }

  settled(
    call: (rank: number) => Call,
    ranks: readonly number[] = [...this.engines.keys()],
  ): Promise<PromiseSettledResult<EngineEnd>[]> {
    return Promise.allSettled(ranks.map((rank) => this.run(rank, call(rank))));
  }

  /** A question or change of one rank about who takes part; afterwards it counts as told. */
  async change(rank: number, call: Partial<MembershipCall> = {}): Promise<MembershipEnd> {
    const sequence = ++this.#sequences[rank]!;
    const nothing = { evicted: [], admitted: [], size: 0, repairs: false, timeoutMs: 20_000 };
    const end = await this.engines[rank]!.elastic!.change({ ...nothing, ...call, sequence });
    this.#sequences[rank] = end.sequence;
    return end;
  }

  /** What `deactivate` makes. */
  repair(rank: number, evicted: readonly number[] = [], timeoutMs = 20_000): Promise<MembershipEnd> {
    return this.change(rank, { evicted, repairs: true, timeoutMs });
  }

  /** Asks to be taken in; afterwards it counts as told. */
  async join(rank: number, limits: { timeoutMs?: number; signal?: AbortSignal } = {}): Promise<void> {
    this.#sequences[rank] = await this.engines[rank]!.elastic!.join({ timeoutMs: 20_000, ...limits });
  }

  /** Each of the members looks whether these ranks ask, until all of them say that they do, and takes them in. */
  async takeIn(members: readonly number[], comers: readonly number[]): Promise<void> {
    await Promise.all(
      members.map(async (rank) => {
        const { elastic } = this.engines[rank]!;
        for (;;) {
          await elastic!.refresh();
          const { states } = await this.change(rank);
          if (comers.every((comer) => states[comer] === 'joining')) break;
          await pause(1);
        }
        await elastic!.refresh();
        const { admitted } = await this.change(rank, { admitted: comers });
        if (!admitted) throw new Error(`rank ${rank}: they do not wait any more`);
      }),
    );
  }

  /** As a rank that is gone looks to the others: its transport is closed under its engine. */
  async lose(rank: number): Promise<void> {
    await this.transports[rank]!.close();
  }

  /** Over `shm`, a NIC and both: another one comes in the place of this rank, which is gone, and opens the group that the others have. */
  async replace(rank: number): Promise<void> {
    await this.readmit(rank);
    await this.openSuccessor(rank);
  }

  /** As far as the transport goes. */
  readmit(rank: number): Promise<void> {
    return this.readmitWithout(rank, []);
  }

  /** `without`: who is gone as well, and not replaced yet. */
  async readmitWithout(rank: number, without: readonly number[]): Promise<void> {
    const member = { rank, worldSize: this.size, store: this.stores[rank]! };
    type Staying = { readonly rank: number; readmit(options: Readmission): Promise<void> };
    const staying = this.transports.filter(
      (transport) => transport.rank !== rank && !without.includes(transport.rank),
    ) as unknown as Staying[];
    const { kind = 'shm' } = this.#options;
    const [comer] = await Promise.all([
      rejoiners[isElastic(kind) ? kind : 'shm'](member, { signal: new AbortController().signal }),
      ...staying.map((transport) =>
        transport.readmit({ store: this.stores[transport.rank]!, joining: [rank], without }),
      ),
    ]);
    this.#opened.transports[rank] = this.#scope.add(comer);
  }

  async openSuccessor(rank: number, others: Partial<PortableEngineOptions> = {}): Promise<void> {
    const { stagingBytes, maxGroups, timeoutMs = 10_000, evicts } = this.#options;
    this.#opened.engines[rank] = this.#scope.add(
      await openPortableEngine({
        transport: this.transports[rank]!,
        store: this.stores[rank]!,
        ranks: [...this.engines.keys()],
        rank,
        name: 'world',
        timeoutMs,
        ...(stagingBytes === undefined ? {} : { stagingBytes }),
        ...(maxGroups === undefined ? {} : { maxGroups }),
        evicts,
        joins: true,
        ...others,
      }),
    );
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.#scope.close();
  }
}

/** What matters of a call; the rest is filled in. */
export type Call = { readonly kind: OpKind } & Partial<Omit<EngineCall, 'kind' | 'sequence'>>;

export function complete(call: Call, sequence: number): EngineCall {
  return { dtype: 'u8', root: -1, inputs: [], outputs: [], timeoutMs: 20_000, ...call, sequence };
}

/** The same object but for some members; private ones stay reachable. */
export function withMembers<T extends object>(target: T, members: Partial<T>): T {
  return new Proxy(target, {
    get: (object, key) => {
      if (Object.hasOwn(members, key)) return members[key as keyof T];
      const value: unknown = Reflect.get(object, key, object);
      return typeof value === 'function' ? value.bind(object) : value;
    },
  });
}

export const pause = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

/** A rejection, for `toMatchObject`. */
export const rejection = (code: string, context: object = {}): object => ({
  status: 'rejected',
  reason: { code, context },
});

/** The same numbers in every run. */
export function numbers(seed: number): (limit: number) => number {
  let state = seed >>> 0;
  return (limit) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
}

/** Elements that are many chunks in `SMALL_STAGING`. */
export const MANY_CHUNKS = 3000;

/** Sums `output.length` elements that are 2^rank on each rank: the sum says who took part. */
export const reduceOf = (rank: number, output = new Float32Array(MANY_CHUNKS)): Call => ({
  kind: 'all-reduce',
  dtype: 'f32',
  reduceOp: 'sum',
  inputs: [new Float32Array(output.length).fill(2 ** rank)],
  outputs: [output],
});
