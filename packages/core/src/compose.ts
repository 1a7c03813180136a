/**
 * One transport out of several: each peer is reached through one of them, chosen once.
 *
 * Memory. A kernel or a reader sees one memory and one signal pad, whoever writes to it, so the first transport allocates and the others register
 * the same bytes and words (`AllocateOptions.over`). Where one cannot, `allocate` rejects with `EP_UNSUPPORTED` instead of quietly giving each
 * transport bytes of its own: data would then arrive in another place than the reader looks. Who can live with that asks for `memory:
 * 'split'`: every transport allocates, what a peer sends lands in `memory.part(peer)`, and the members that mean one place (`view`, `local`,
 * `signals`, `read`, `write`) throw `EP_UNSUPPORTED`. Split memory needs a policy that both ends of every pair answer alike.
 *
 * Hosts. A transport that maps its peers' memory reaches the ranks of its own host (`Transport.hosts`), and allocates with those alone; what one host could not, the transport of all ranks tells the others
 * (`AllocateOptions.overFailure`).
 *
 * Kernels take one handle. Where the first transport maps its peers' memory ('load-store') and one other reaches the rest, that other's handle is for both (`AllocateOptions.near`);
 * the policy is then answered alike by both ends of every pair, too.
 */
import { byCapability } from './by-capability.js';
import { ComposedAdoption, ComposedMemory } from './composed-memory.js';
import { checkObject, EpError, invalid, isEpError } from './errors.js';
import { formatRanks } from './ranks.js';
import { composeSuccession, type Renewing, renewParts } from './renewed-parts.js';
import type { CarrierMaker, RoundMaker } from './rounds.js';
import { type AbortOptions, CloseScope, Resource } from './scope.js';
import type {
  AdoptedMemory,
  AllocateOptions,
  Capabilities,
  DeviceHandle,
  Endpoint,
  Need,
  Rank,
  Region,
  RemoteRegion,
  RenewOptions,
  Request,
  Route,
  SignalUpdate,
  Succession,
  SymmetricMemory,
  Transport,
  WaitOptions,
} from './transport.js';
import { linkSignals } from './waiting.js';
import { createWork, type Work, WorkOwner } from './work.js';

/** Returns the transport, one of those given, through which `peer` is reached. Asked once for every rank, this one too. */
export type RoutePolicy<C extends Need> = (peer: Rank, transports: readonly Transport<C>[]) => Transport<C>;

/**
 * The needs that all of the transports offer: inferring from several contravariant places intersects. Several have no `atomics` together: those of one are not atomic against those of
 * another, and a word may be reached by both, from different ranks.
 */
export type CommonNeeds<T extends readonly Transport<never>[]> = T extends readonly [Transport<infer C extends Need>]
  ? C
  : T[number] extends Transport<infer C extends Need>
    ? Exclude<C, 'atomics'>
    : never;

/** One transport's share of a composed transport, as a kernel needs it. */
export interface DeviceRoute<in C extends Need> {
  readonly via: string;
  readonly peers: readonly Rank[];
  readonly handle: DeviceHandle<C>;
}

export interface ComposedTransport<in C extends Need> extends Transport<C> {
  readonly allocate: (options: AllocateOptions) => Promise<ComposedMemory>;
  readonly routes: () => readonly Route[];
  /** One handle for each transport that reaches anybody: for kernels that take several. `device` serves those that take one. */
  readonly devices: (memory: SymmetricMemory) => readonly DeviceRoute<C>[];
}

/** The routes as lines of `transport  ranks`. */
export function formatRoutes(routes: readonly Route[]): string {
  if (!Array.isArray(routes)) throw invalid('routes', { where: 'formatRoutes', expected: 'a list', found: routes });
  const names = [...new Set(routes.map(({ via }) => via))];
  const width = Math.max(0, ...names.map((name) => name.length));
  return names
    .map(
      (name) =>
        `${name.padEnd(width)}  ${formatRanks(routes.filter(({ via }) => via === name).map(({ peer }) => peer))}`,
    )
    .join('\n');
}

const ALL_NEEDS: ReadonlySet<string> = new Set<Need>([
  ...(['bundled', 'prior', 'inc', 'add', 'set', 'get', 'atomics', 'load-store'] as const),
]);

function intersect<T>(sets: readonly ReadonlySet<T>[]): ReadonlySet<T> {
  const [first = new Set<T>(), ...others] = sets;
  return new Set([...first].filter((item) => others.every((other) => other.has(item))));
}

/** What all of them can do, together: what a composed transport offers. */
export function commonCapabilities(all: readonly Capabilities[]): Capabilities {
  const needs = intersect(all.map((one) => one.needs));
  const chunkBytes = Math.max(...all.map((one) => one.chunkBytes ?? 0));
  return {
    needs: all.length === 1 ? needs : new Set([...needs].filter((need) => need !== 'atomics')),
    initiators: intersect(all.map(({ initiators }) => initiators)),
    maxMessageBytes: Math.min(...all.map(({ maxMessageBytes }) => maxMessageBytes)),
    maxSignalSlots: Math.min(...all.map(({ maxSignalSlots }) => maxSignalSlots)),
    ...(chunkBytes > 0 && { chunkBytes }),
  };
}

/**
 * Says regions and memories of the composed transport in the words of the member that reaches the peer. What not all members offer is refused, also where this one does: who
 * could use it with some peers would fail with others. Whatever is wrong with a call is carried by its Work, as by those of the members: in a batch each request has its own status.
 */
class ComposedEndpoint<C extends Need> extends Resource implements Endpoint<C> {
  readonly peer: Rank;
  readonly #inner: Endpoint<C>;
  readonly #member: number;
  readonly #needs: ReadonlySet<Need>;
  /** Of the requests that were refused here: the member has all others. */
  readonly #owner: WorkOwner;
  #refused = 0;

  constructor(inner: Endpoint<C>, member: number, needs: ReadonlySet<Need>) {
    const label = `endpoint to rank ${inner.peer}`;
    super(label);
    this.peer = inner.peer;
    this.#inner = inner;
    this.#member = member;
    this.#needs = needs;
    this.#owner = new WorkOwner(label);
  }

  readonly put = (from: Region, to: RemoteRegion, options?: { readonly signal?: SignalUpdate<C> }): Work => {
    this.#checkUsable('put');
    let source: Region;
    let target: RemoteRegion;
    try {
      this.#checkOffered(options?.signal);
      source = this.#local(from, 'put');
      target = this.#remote(to, 'put');
    } catch (error) {
      return this.#failed('put', error);
    }
    return this.#inner.put(source, target, options);
  };

  readonly putValue = (to: RemoteRegion, value: bigint, options?: { readonly signal?: SignalUpdate<C> }): Work => {
    this.#checkUsable('putValue');
    let target: RemoteRegion;
    try {
      this.#checkOffered(options?.signal);
      target = this.#remote(to, 'putValue');
    } catch (error) {
      return this.#failed('putValue', error);
    }
    return this.#inner.putValue(target, value, options);
  };

  readonly signal = (memory: SymmetricMemory, update: SignalUpdate<C>): Work => {
    this.#checkUsable('signal');
    let target: SymmetricMemory;
    try {
      this.#checkOffered(update);
      target = this.#memory(memory);
    } catch (error) {
      return this.#failed('signal', error);
    }
    return this.#inner.signal(target, update);
  };

  readonly get = (from: RemoteRegion, to: Region): Work => {
    this.#checkUsable('get');
    let source: RemoteRegion;
    let target: Region;
    try {
      this.#checkNeed('get');
      source = this.#remote(from, 'get');
      target = this.#local(to, 'get');
    } catch (error) {
      return this.#failed('get', error);
    }
    return this.#inner.get(source, target);
  };

  readonly fetchAdd = (to: RemoteRegion, add: bigint): Work<bigint> =>
    this.#atomic('fetchAdd', to, (word) => this.#inner.fetchAdd!(word, add));

  readonly compareSwap = (to: RemoteRegion, compare: bigint, swap: bigint): Work<bigint> =>
    this.#atomic('compareSwap', to, (word) => this.#inner.compareSwap!(word, compare, swap));

  readonly submit = (batch: readonly Request<C>[]): readonly Work[] => {
    this.#checkUsable('submit');
    if (!Array.isArray(batch)) {
      throw invalid('batch', { where: 'submit', expected: 'a list of requests', found: batch });
    }
    const requests: Request<C>[] = [];
    /** By place in the batch. */
    const refusals = new Map<number, unknown>();
    for (const [place, request] of (batch as readonly Request<C>[]).entries()) {
      try {
        requests.push(this.#request(request));
      } catch (reason) {
        refusals.set(place, reason);
      }
    }
    const works = this.#inner.submit(requests);
    if (refusals.size === 0) return works;
    const taken = works.values();
    return (batch as readonly Request<C>[]).map((request, place) =>
      refusals.has(place) ? this.#failed(request?.kind ?? 'submit', refusals.get(place)) : taken.next().value!,
    );
  };

  readonly flush = (options?: WaitOptions): Promise<void> =>
    this.guard('flush', () => {
      this.#owner.check();
      return this.#inner.flush(options);
    });

  protected override async release(): Promise<void> {
    await this.#inner.close();
    this.#owner.check();
  }

  #checkUsable(operation: string): void {
    this.checkOpen(operation);
    this.#owner.check();
  }

  #failed<T>(op: string, reason: unknown): Work<T> {
    const control = createWork<T>({ op, sequence: this.#refused++, owner: this.#owner });
    control.reject(reason);
    return control.work;
  }

  #atomic(
    operation: 'fetchAdd' | 'compareSwap',
    to: RemoteRegion,
    begin: (word: RemoteRegion) => Work<bigint>,
  ): Work<bigint> {
    this.#checkUsable(operation);
    let word: RemoteRegion;
    try {
      this.#checkNeed('atomics');
      word = this.#remote(to, operation);
    } catch (error) {
      return this.#failed(operation, error);
    }
    return begin(word);
  }

  #checkOffered(update: SignalUpdate<C> | undefined): void {
    if (update === undefined || update === null) return;
    const { op, order = 'bundled' }: SignalUpdate<Need> = update;
    this.#checkNeed(op);
    this.#checkNeed(order);
  }

  /** What is no need at all is the member's to refuse. */
  #checkNeed(need: Need): void {
    if (this.#needs.has(need) || !ALL_NEEDS.has(need)) return;
    throw new EpError(
      'EP_UNSUPPORTED',
      `endpoint to rank ${this.peer}: not all of the composed transports offer '${need}': use what the capabilities name, or compose others`,
      { context: { need, peer: this.peer } },
    );
  }

  #memory(memory: SymmetricMemory): SymmetricMemory {
    return memory instanceof ComposedMemory ? this.#partOf(memory) : memory;
  }

  #partOf<M>(memory: { member(index: number): M }): M {
    const part = memory.member(this.#member);
    // One that was composed of fewer transports.
    if (part === undefined) throw new EpError('EP_INVALID_ARGUMENT', 'the memory belongs to another transport');
    return part;
  }

  #local(region: Region, operation: string): Region {
    const memory: unknown = region?.memory;
    if (typeof memory !== 'object' || memory === null) {
      throw invalid('region', {
        where: `${operation} to rank ${this.peer}`,
        expected: 'one of this rank, which memory.local() makes',
        found: region,
      });
    }
    if (memory instanceof ComposedMemory) return this.#partOf(memory).local(region.byteOffset, region.byteLength);
    if (memory instanceof ComposedAdoption) return { ...region, memory: this.#partOf(memory) };
    return region;
  }

  #remote(region: RemoteRegion, operation: string): RemoteRegion {
    if (region?.peer !== this.peer) {
      throw invalid('remote region', {
        where: `${operation} to rank ${this.peer}`,
        expected: `one of rank ${this.peer}`,
        found: region?.peer === undefined ? region : `one of rank ${region.peer}`,
      });
    }
    return region.memory instanceof ComposedMemory ? region.memory.routed(region) : region;
  }

  #request(request: Request<C>): Request<C> {
    switch (request?.kind) {
      case 'put':
        this.#checkOffered(request.signal);
        return { ...request, from: this.#local(request.from, 'put'), to: this.#remote(request.to, 'put') };
      case 'put-value':
        this.#checkOffered(request.signal);
        return { ...request, to: this.#remote(request.to, 'put-value') };
      case 'signal':
        this.#checkOffered(request.signal);
        return { ...request, memory: this.#memory(request.memory) };
      default: {
        const found: unknown = (request as { kind?: unknown } | undefined)?.kind ?? request;
        throw invalid('kind', { where: 'submit', expected: 'put, put-value or signal', found });
      }
    }
  }
}

interface LinkedFailure {
  readonly of: readonly AbortSignal[];
  readonly signal: AbortSignal;
  readonly unlink: () => void;
}

function linkFailures(members: readonly Transport<never>[]): LinkedFailure {
  const of = members.map(({ failed }) => failed);
  return { of, ...linkSignals(...of) };
}

/** Those of a member, for memories of the composition. */
const carriersOf = (
  { size, carries, clear, part, open }: CarrierMaker,
  partOf: (memory: SymmetricMemory) => SymmetricMemory,
): CarrierMaker => ({
  size,
  carries,
  clear: (memory, group) => clear(partOf(memory), group),
  part: (memory) => part(partOf(memory)),
  open: (options) => open({ ...options, memory: partOf(options.memory) }),
});

class Composition<C extends Need> extends Resource implements ComposedTransport<C> {
  readonly name: string;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities;
  /** As `Transport.renew`: `readmit` of all transports comes first, on all ranks in one order. Absent where one of them has none. */
  readonly renew?: (options: RenewOptions) => Promise<ComposedMemory>;
  readonly renews?: 'all';
  readonly succession?: Succession;
  readonly isEmpty?: (rank: Rank) => boolean;
  /** Of those that all of its transports have cut off. Absent where one of them cannot. */
  readonly fence?: (ranks: readonly Rank[]) => Promise<readonly Rank[]>;
  readonly hosts?: readonly Rank[];
  /** Those of the one transport that has them, over the memory of the first. */
  readonly rounds?: RoundMaker;
  readonly #members: readonly Transport<C>[];
  /** peer -> index of its member. */
  readonly #routes: readonly number[];
  readonly #split: boolean;
  #failure: LinkedFailure;

  constructor(members: readonly Transport<C>[], routes: readonly number[], split: boolean) {
    const name = `compose(${members.map((member) => member.name).join(', ')})`;
    super(name);
    const first = members[0]!;
    this.name = name;
    this.rank = first.rank;
    this.worldSize = first.worldSize;
    this.capabilities = commonCapabilities(members.map(({ capabilities }) => capabilities));
    const placed = members.find(({ hosts }) => hosts !== undefined)?.hosts;
    if (placed !== undefined) this.hosts = placed;
    this.#members = members;
    this.#routes = routes;
    this.#split = split;
    this.#failure = linkFailures(members);
    const renewing: Renewing = {
      ...{ name, members },
      over: (index, parts) => this.#overOf(index, parts[0]!),
      compose: (parts) => this.children.add(this.#memoryOf(parts)),
    };
    if (members.every(({ renew }) => renew !== undefined)) {
      this.renew = (options) => this.guard('renew', () => renewParts(renewing, options));
      // Stores have landed when nothing runs any more.
      const anew = members.filter(({ renews }) => renews === 'all');
      const stores = members.filter(({ capabilities: { needs } }) => needs.has('load-store' as C));
      if (anew.length > 0 && new Set([...anew, ...stores]).size === members.length) this.renews = 'all';
    }
    if (members.some(({ isEmpty }) => isEmpty !== undefined)) {
      this.isEmpty = (rank) => members.some((member) => member.isEmpty?.(rank));
    }
    // Also of those that reach a rank from nowhere here: that rank may reach this one by them.
    const fences = members.flatMap(({ fence }) => (fence === undefined ? [] : [fence]));
    if (fences.length === members.length) {
      this.fence = (ranks) =>
        this.guard('fence', async () => {
          const each = await Promise.all(fences.map((fence) => fence(ranks)));
          return ranks.filter((rank) => each.every((cutOff) => cutOff.includes(rank)));
        });
    }
    const succession = composeSuccession(renewing);
    if (succession !== undefined) this.succession = succession;
    const rounds = this.#makeRounds();
    if (rounds !== undefined) this.rounds = rounds;
  }

  /** Another signal once the ranks whose loss it told of have come back in all transports. */
  get failed(): AbortSignal {
    const known = this.#failure;
    if (this.closed || known.of.every((signal, index) => signal === this.#members[index]!.failed)) return known.signal;
    known.unlink();
    this.#failure = linkFailures(this.#members);
    return this.#failure.signal;
  }

  readonly routes = (): readonly Route[] =>
    this.#routes.map((member, peer) => ({ peer, via: this.#members[member]!.name }));

  /** Every member allocates, also one that reaches nobody from here: allocation is collective, and other ranks may route otherwise. */
  readonly allocate = (options: AllocateOptions): Promise<ComposedMemory> =>
    this.guard('allocate', async () => {
      await using undo = new CloseScope();
      const parts: SymmetricMemory[] = [];
      for (const member of this.#members) {
        try {
          parts.push(undo.add(await this.#allocatePart(options, parts[0], member)));
        } catch (error) {
          if (parts.length === 0) await this.#tellHosts(options, error);
          throw error;
        }
      }
      const memory = this.#memoryOf(parts);
      for (const part of parts) undo.remove(part);
      return this.children.add(memory);
    });

  readonly adopt = (memory: { readonly address: bigint; readonly byteLength: number }): Promise<AdoptedMemory> =>
    this.guard('adopt', async () => {
      await using undo = new CloseScope();
      const parts: AdoptedMemory[] = [];
      for (const member of this.#members) parts.push(undo.add(await member.adopt(memory)));
      const adoption = new ComposedAdoption(parts, memory.address, memory.byteLength);
      for (const part of parts) undo.remove(part);
      return this.children.add(adoption);
    });

  readonly connect = (peer: Rank, options?: AbortOptions): Promise<Endpoint<C>> =>
    this.guard('connect', async () => {
      const member = this.#routes[peer];
      if (member === undefined) {
        throw invalid('peer', { where: this.name, expected: `a rank from 0 to ${this.worldSize - 1}`, found: peer });
      }
      const inner = await this.#members[member]!.connect(peer, options);
      return this.children.add(new ComposedEndpoint<C>(inner, member, this.capabilities.needs));
    });

  readonly devices = (memory: SymmetricMemory): readonly DeviceRoute<C>[] => {
    this.checkOpen('devices');
    return this.#members.flatMap((member, index) => {
      const peers = this.#routes.flatMap((routed, peer) => (routed === index ? [peer] : []));
      if (peers.length === 0) return [];
      const part = memory instanceof ComposedMemory ? memory.member(index) : memory;
      return [{ via: member.name, peers, handle: member.device(part) }];
    });
  };

  readonly device = (memory: SymmetricMemory): DeviceHandle<C> => {
    this.checkOpen('device');
    const used = new Set(this.#routes);
    const far = [...used].filter((member) => member !== 0);
    if (used.size > 1 && !(memory instanceof ComposedMemory)) {
      throw new EpError('EP_INVALID_ARGUMENT', 'device: the memory belongs to another transport');
    }
    // Also where all peers are reached by it: others store to this rank, and it to itself.
    if (far.length === 1 && this.#mapsNear && !this.#split && memory instanceof ComposedMemory) {
      return this.#members[far[0]!]!.device(memory.member(far[0]!));
    }
    if (used.size > 1) {
      throw new EpError(
        'EP_UNSUPPORTED',
        `${this.name}: device: ${used.size} transports reach the peers, one handle cannot: give the kernel the handles of devices()`,
        { context: { routes: this.routes() } },
      );
    }
    return this.devices(memory)[0]!.handle;
  };

  protected override async release(): Promise<void> {
    this.#failure.unlink();
    const scope = new CloseScope();
    for (const member of this.#members) scope.add(member);
    await scope.close();
  }

  /** Kernels reach the first transport's peers by plain stores, so another's handle can be for them as well. */
  get #mapsNear(): boolean {
    return this.#members[0]!.capabilities.needs.has('load-store');
  }

  #makeRounds(): RoundMaker | undefined {
    const makers = this.#members.flatMap(({ rounds }, index) => (rounds === undefined ? [] : [{ index, rounds }]));
    const [only] = makers;
    // HAZARD: not by routes, which other ranks may have chosen otherwise: all have rounds, or none.
    if (only === undefined || makers.length > 1 || this.#split) return undefined;
    const { index, rounds } = only;
    const partOf = (memory: SymmetricMemory): SymmetricMemory =>
      memory instanceof ComposedMemory ? memory.member(index) : memory;
    return {
      mostMembers: rounds.mostMembers,
      mostBytes: rounds.mostBytes,
      size: (groups) => rounds.size(groups),
      part: (memory) => rounds.part(partOf(memory)),
      open: (options) => rounds.open({ ...options, memory: partOf(options.memory) }),
      settle: (peer, options) => rounds.settle(peer, options),
      ...(rounds.carriers && { carriers: carriersOf(rounds.carriers, partOf) }),
    };
  }

  #memoryOf(parts: readonly SymmetricMemory[]): ComposedMemory {
    const failed = () => this.#members.map((member) => member.failed);
    return new ComposedMemory(parts, this.#routes, this.#split, failed);
  }

  /** What a member's part lies over, where the first one's is `first`. */
  #overOf(index: number, first: SymmetricMemory): Pick<AllocateOptions, 'over' | 'near'> {
    if (index === 0 || this.#split) return {};
    const near = this.#routes.flatMap((routed, peer) => (routed === 0 ? [peer as Rank] : []));
    return { over: first, ...(this.#mapsNear ? { near } : {}) };
  }

  /** The first transport's call was one of this host: those of others await these ranks in the next one's. */
  async #tellHosts(options: AllocateOptions, failure: unknown): Promise<void> {
    const [first, next] = this.#members;
    const severalHosts = first!.hosts?.some((host) => host !== first!.hosts![0]) ?? false;
    if (next === undefined || this.#split || !severalHosts || !this.#mapsNear) return;
    // What is refused at once is refused on all hosts; and where time is up, it is for all, or soon.
    const alone: readonly unknown[] = ['EP_INVALID_ARGUMENT', 'EP_UNSUPPORTED', 'EP_CLOSED', 'EP_TIMEOUT'];
    if (options.signal?.aborted === true || !isEpError(failure) || alone.includes(failure.code)) return;
    await next.allocate({ ...options, overFailure: failure }).catch(() => {}); // it says no more than what is known here
  }

  async #allocatePart(
    options: AllocateOptions,
    first: SymmetricMemory | undefined,
    member: Transport<C>,
  ): Promise<SymmetricMemory> {
    if (first === undefined) return member.allocate(options);
    try {
      return await member.allocate({ ...options, ...this.#overOf(this.#members.indexOf(member), first) });
    } catch (error) {
      if (!isEpError(error) || error.code !== 'EP_UNSUPPORTED') throw error;
      const advice = `put another transport first, or compose with memory 'split'`;
      throw new EpError('EP_UNSUPPORTED', `${this.name}: ${error.message}: ${advice}`, { cause: error });
    }
  }
}

/**
 * Composes transports of one rank, which the result takes over and closes. Its type is what all of them offer: the intersection of their needs.
 * Peers are reached `byCapability()` unless a policy is given; `formatRoutes(composed.routes())` prints what was chosen.
 * Throws `EP_INVALID_ARGUMENT` if they disagree about rank or world size, or if the policy answers with something else.
 */
export function compose<const T extends readonly Transport<never>[]>(
  transports: T,
  policy: RoutePolicy<CommonNeeds<T>> = byCapability(),
  options: { readonly memory?: 'shared' | 'split' } = {},
): ComposedTransport<CommonNeeds<T>> {
  // The compiler cannot see that every member offers the intersection of what all offer; CommonNeeds is what makes it true.
  const members: readonly Transport<CommonNeeds<T>>[] = transports as readonly Transport<never>[] as readonly Transport<
    CommonNeeds<T>
  >[];
  const where = 'compose';
  if (!Array.isArray(transports) || !transports.every((member) => typeof member?.connect === 'function')) {
    throw invalid('transports', { where, expected: 'a list of transports', found: transports });
  }
  if (typeof policy !== 'function') throw invalid('policy', { where, expected: 'a function', found: policy });
  checkObject(options, 'options', "an object with memory, 'shared' or 'split'", where);
  const [first] = members;
  if (first === undefined) throw invalid('transports', { where, expected: 'at least one', found: transports });
  for (const { name, rank, worldSize } of members) {
    if (rank === first.rank && worldSize === first.worldSize) continue;
    throw invalid(name, {
      where,
      expected: `rank ${first.rank} of ${first.worldSize}, as ${first.name}`,
      found: `rank ${rank} of ${worldSize}`,
    });
  }
  const routes = Array.from({ length: first.worldSize }, (_, peer) => {
    const chosen = policy(peer, members);
    const index = members.indexOf(chosen);
    if (index >= 0) return index;
    throw invalid(`policy(${peer})`, { where, expected: 'one of the transports', found: chosen });
  });
  return new Composition([...members], routes, options.memory === 'split');
}
