/** Endpoints of EFA, posted to by kernels and by JS. */
import {
  type AllocateOptions,
  type Capabilities,
  checkInteger,
  type DeviceHandle,
  EpError,
  isEpError,
  type Pausing,
  type Rank,
  type RenewOptions,
  Resource,
  type Succession,
  type SymmetricMemory,
  type Transport,
  type WaitOptions,
} from '@ep/core';
import {
  EP_LIFE_ALIVE,
  type NativeEfaDevice,
  type NativeEfaNic,
  type NativeRankContext,
  native,
  type SoftEfaCounts,
} from '@ep/native';
import {
  AdoptedRange,
  type Allocator,
  allocateMemory,
  checkHostAllocation,
  checkLimits,
  checkOver,
  fenceRanks,
  inheritMemory,
  type Liveness,
  Members,
  meetAnew,
  overOrFailure,
  RankMemory,
  type RankTeam,
  type ReadmitOptions,
  type ReconnectedReach,
  renewMemory,
  successionOf,
  type WorldTeam,
  withClosing,
} from '@ep/native/ranks';
import type { ResolvedEfaConfig } from './config.js';
import { EfaEndpoint } from './endpoint.js';
import { pairError } from './failure.js';
import { type EfaGin, type GinOptions, openGin } from './gin.js';
import { checkRenewable } from './members.js';
import { checkSignalSlots, reachBy } from './memory.js';
import { type EfaBacking, type EfaNeeds, efaCapabilities } from './probe.js';

export interface EfaTransportInit {
  readonly backing: EfaBacking;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly world: WorldTeam;
  /** Where ranks share a host, and others may come in the place of dead ones. */
  readonly members?: {
    readonly world: RankTeam;
    readonly controls: readonly Uint8Array[];
    readonly round: number;
    /** Of the world. */
    readonly id: string;
    /** What ranks that come later must have chosen alike. */
    readonly facts: string;
    /** This process came in the place of another one. */
    readonly isNew: boolean;
  };
  readonly nic: NativeEfaNic;
  readonly config: ResolvedEfaConfig;
}

export class EfaTransport extends Resource implements Transport<EfaNeeds> {
  readonly name: string;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities;
  /** Absent over a network, where nobody comes in the place of a dead rank. Memory begins again on all ranks: nothing that was sent before `readmit` lands after it. */
  readonly renew?: (options: RenewOptions) => Promise<RankMemory>;
  readonly renews = 'all';
  /** Absent over a network. */
  readonly succession?: Succession;
  /** Likewise. */
  readonly isEmpty?: (rank: Rank) => boolean;
  /** Of the software NIC on one host, which is part of the sender's process. Elsewhere what a dead rank sent may be on its way, and endpoints are no pairs: absent until `readmit`. */
  readonly fence?: (ranks: readonly Rank[]) => Promise<readonly Rank[]>;
  /** The device, and what its queue pairs are like. */
  readonly nic: NativeEfaDevice;
  readonly #init: EfaTransportInit;
  readonly #reach: ReconnectedReach;
  readonly #members: Members | undefined;
  readonly #contexts = new Set<EfaGin>();
  readonly #endpoints = new Map<Rank, EfaEndpoint>();
  readonly #listeners = new Set<(ranks: readonly Rank[]) => void>();
  readonly #users = new Set<Pausing>();
  /** The round in which the endpoints were made. */
  #generation = 0;
  /** From when users are asked to pause until they resume. */
  #isChanging = false;

  constructor(init: EfaTransportInit) {
    super(`efa-gda:${init.backing} transport`);
    this.name = `efa-gda:${init.backing}`;
    this.rank = init.rank;
    this.worldSize = init.worldSize;
    this.nic = init.nic.device();
    this.capabilities = efaCapabilities(this.nic.maxMessageBytes, this.nic.counters);
    this.children.add(init.world);
    this.#init = init;
    // The software NIC pins nothing.
    this.#reach = reachBy(init.nic, init.rank, init.backing !== 'soft');
    const { members, config } = init;
    if (members !== undefined) {
      const timeoutMs = config.timeoutMs;
      const onReplace = (ranks: readonly Rank[]): void => {
        for (const listener of [...this.#listeners]) listener(ranks);
      };
      this.#members = new Members({ ...init, ...members, transport: this.name, timeoutMs, onReplace });
      this.#generation = members.round;
      this.succession = this.#makeSuccession(this.#members, members);
      this.renew = (options) => this.#renew(options);
      this.isEmpty = (rank) => this.#members!.empty[rank] === 1;
    }
    if (init.backing === 'soft' && config.network === undefined) this.fence = (ranks) => this.#fence(ranks);
  }

  /** All ranks that are here, in order. */
  get world(): WorldTeam {
    return this.#members?.world ?? this.#init.world;
  }

  get failed(): AbortSignal {
    return this.#init.liveness.failed;
  }

  /** What ends a wait of this transport that gives no timeout of its own, in milliseconds. */
  get timeoutMs(): number {
    return this.#init.config.timeoutMs;
  }

  /** Ranks whose thread or process has died (not those that closed in order). */
  lostRanks(): Rank[] {
    this.checkOpen('lostRanks');
    return this.#init.liveness.lostRanks();
  }

  /** How a queue pair of kernels broke, if one did: they have no call that could reject. Also makes `failed` fire. */
  kernelFailure(): EpError | undefined {
    this.checkOpen('kernelFailure');
    const { nic, context, liveness } = this.#init;
    const failure = nic.kernelFailure();
    if (failure === undefined) return undefined;
    const { peer } = failure;
    const error = pairError('kernel', peer, failure, peer < 0 ? EP_LIFE_ALIVE : context.life(peer));
    liveness.fail(error);
    return error;
  }

  /** What the software NIC has done so far. */
  counts(): SoftEfaCounts {
    this.checkOpen('counts');
    return this.#init.nic.counts();
  }

  /** Rules of the format that requests broke, one sentence each. Of the software NIC only. */
  violations(): readonly string[] {
    this.checkOpen('violations');
    return this.#init.nic.violations();
  }

  /**
   * What the software NIC did, as far as `traceEvents` allows: a JSON object a line, as `ep wqe decode` reads it, or a file that Perfetto and chrome://tracing open.
   */
  trace(format: 'jsonl' | 'chrome' = 'jsonl'): string {
    this.checkOpen('trace');
    return this.#init.nic.trace(format);
  }

  /**
   * Lets ranks in that come in the place of dead ones, or into places in which nobody has been yet (`rejoin` of the same backing), as processes or threads of this host. Collective over all ranks that are here but those of
   * `joining` and `without`, and over the newcomers. On all ranks endpoints, keys and counters are made anew, so that nothing lands that any of them had under way, or that a dead one's NIC still
   * sends; requests that had not ended reject. From then on `world` has all ranks that are here. Memory that there was before keeps its bytes and words, and is reached again when all
   * that are here have renewed it (`renew`, as `MoeBuffer.updateMembers` does). Process groups of `initProcessGroup` let what they have put to those who stay land before, and go on by themselves
   * afterwards; where this rejects behind that, they stand still until a later call goes well. No kernel may run meanwhile, and contexts of the GIN device API are closed before (`EP_BUSY`).
   * `EP_TIMEOUT` or `EP_PEER_LOST` names who did not come, or died: a later call may do it. `EP_INVALID_ARGUMENT` where a rank to be replaced lives, `EP_RENDEZVOUS` where a
   * newcomer has another version or configuration, `EP_UNSUPPORTED` over a network.
   */
  readmit(options: ReadmitOptions): Promise<void> {
    const where = 'readmit';
    return this.guard(where, async () => {
      checkLimits(options, where, this.worldSize);
      const { config, nic, liveness } = this.#init;
      checkRenewable(config, `${this.name}: ${where}`);
      const members = this.#members!;
      const timeoutMs = options.timeoutMs ?? config.timeoutMs;
      const begin = performance.now();
      await withClosing(options, this.closing, async (limits) => {
        const before = members.world;
        const world = this.children.add(await members.readmit({ ...options, ...limits }));
        this.children.remove(before);
        await before.close();
        let isRenewing = false;
        const meeting = {
          ...{ world, worldSize: this.worldSize, where },
          land: async (left: WaitOptions) => {
            this.#checkNoContexts(where);
            this.#isChanging = true;
            await Promise.all([...this.#users].map((user) => user.pause(left)));
          },
          prepare: () => {
            isRenewing = true;
            nic.renew();
            return nic;
          },
          say: (of: NativeEfaNic) => of.address(),
          connect: (of: NativeEfaNic, addresses: readonly Uint8Array[]) => of.connect(addresses),
          // Whoever posts finds nobody there, until another call goes well.
          undo: () => {},
        };
        const left = Math.max(1, timeoutMs - (performance.now() - begin));
        await meetAnew(meeting, { ...limits, timeoutMs: left }).catch((error: unknown) => {
          // What one rank could not do, all have heard of, and nobody has made anything anew. HAZARD: of who died or was late the others may know more.
          const isTold = isEpError(error) && (error.code === 'EP_BUSY' || error.code === 'EP_TRANSPORT_FAILED');
          if (isTold && !isRenewing) this.#resume();
          throw error;
        });
        // Requests to the dead may have told of it meanwhile.
        liveness.renew();
        this.#generation = members.round;
        this.#resume();
      });
    });
  }

  #resume(): void {
    this.#isChanging = false;
    for (const user of [...this.#users]) user.resume();
  }

  #makeSuccession(members: Members, { id, isNew }: { readonly id: string; readonly isNew: boolean }): Succession {
    const { context, nic } = this.#init;
    return successionOf({
      ...{ context, members, id, isNew, reach: this.#reach, listeners: this.#listeners },
      inherit: (options) =>
        this.guard('inherit', async () => {
          const size = checkHostAllocation(options, this, {});
          const over = this.#overOf(options, size);
          checkSignalSlots(nic, size.signalSlots);
          const made: RankMemory = inheritMemory(
            this.#allocator(() => this.children.remove(made)),
            size,
            over,
          );
          return this.children.add(made);
        }),
      generations: {
        current: () => String(this.#generation),
        onChange: (user) => {
          this.#users.add(user);
          // HAZARD: it has put nothing yet, and must not before the endpoints are new.
          if (this.#isChanging) void user.pause({}).catch(() => {});
          return () => this.#users.delete(user);
        },
      },
    });
  }

  #fence(ranks: readonly Rank[]): Promise<readonly Rank[]> {
    return this.guard('fence', () => {
      const { context } = this.#init;
      const { closing: signal } = this;
      return fenceRanks(ranks, { ...this.#init, signal, isOver: (rank) => context.ended(rank) });
    });
  }

  #checkNoContexts(where: string): void {
    const open = [...this.#contexts].filter(({ closed }) => !closed).length;
    if (open === 0) return;
    const context = { contexts: open };
    throw new EpError('EP_BUSY', `${where}: ${open} contexts of the GIN device API are open: close them first`, {
      context,
    });
  }

  #renew(options: RenewOptions): Promise<RankMemory> {
    return this.guard('renew', async () => {
      const size = checkHostAllocation(options, this, {});
      const over = this.#overOf(options, size);
      return withClosing(options, this.closing, async (limits) => {
        if (options.memory === undefined) checkSignalSlots(this.#init.nic, size.signalSlots);
        // HAZARD: what fails in between closes the memory before there is a name for it.
        let known: RankMemory | undefined;
        const allocator = this.#allocator(() => void (known && this.children.remove(known)));
        const world = this.#members!.world;
        const made = await renewMemory({ ...allocator, world }, size, options, limits, over);
        known = made;
        return options.memory === made ? made : this.children.add(made);
      });
    });
  }

  #overOf(options: AllocateOptions, size: { readonly byteLength: number; readonly signalSlots: number }) {
    const { rank, worldSize, context } = this.#init;
    return checkOver(options, size, { name: this.name, rank, worldSize, context });
  }

  #allocator(onRelease: () => void): Allocator & { readonly reach: ReconnectedReach } {
    const { rank, worldSize, context, liveness, config } = this.#init;
    return {
      ...{ rank, worldSize, context, liveness, world: this.world },
      ...(config.network === undefined ? {} : { ranksOnHost: config.ranksOnHost }),
      timeoutMs: config.timeoutMs,
      reach: this.#reach,
      onRelease,
    };
  }

  /** Collective over the world. `EP_PEER_LOST` or `EP_TIMEOUT` names who has not come. */
  async barrier(options?: WaitOptions): Promise<void> {
    this.checkOpen('barrier');
    await this.world.barrier(options);
  }

  readonly allocate = (options: AllocateOptions): Promise<RankMemory> =>
    this.guard('allocate', async () => {
      const size = checkHostAllocation(options, this, {});
      const { rank, worldSize, context } = this.#init;
      const over = overOrFailure(options, size, { name: this.name, rank, worldSize, context });
      return withClosing(options, this.closing, async (limits) => {
        checkSignalSlots(this.#init.nic, size.signalSlots);
        const made: RankMemory = await allocateMemory(
          this.#allocator(() => this.children.remove(made)),
          size,
          limits,
          over,
        );
        return this.children.add(made);
      });
    });

  /** For sources of puts and targets of gets; kernels may send from it, too. */
  readonly adopt = async (memory: { readonly address: bigint; readonly byteLength: number }): Promise<AdoptedRange> => {
    this.checkOpen('adopt');
    return this.children.add(
      new AdoptedRange(this.#init.nic, memory, (range) => this.children.remove(range), this.#reach),
    );
  };

  readonly connect = async (peer: Rank): Promise<EfaEndpoint> => {
    this.checkOpen('connect');
    checkInteger(peer, 'peer', 'connect', 0, this.worldSize - 1);
    let endpoint = this.#endpoints.get(peer);
    if (endpoint === undefined || endpoint.closed) {
      const { nic, context, liveness, config } = this.#init;
      endpoint = this.children.add(
        new EfaEndpoint({
          ...{ peer, nic, context, liveness, timeoutMs: config.timeoutMs },
          empty: this.#members?.empty,
        }),
      );
      this.#endpoints.set(peer, endpoint);
    }
    return endpoint;
  };

  readonly device = (memory: SymmetricMemory): DeviceHandle<EfaNeeds> => {
    this.checkOpen('device');
    if (!(memory instanceof RankMemory) || memory.context !== this.#init.context) {
      throw new EpError('EP_INVALID_ARGUMENT', 'device: the memory belongs to another transport');
    }
    const kind = memory.isOver ? 'memory:load-store+efa' : 'memory:efa';
    return { kind, abi: native().binding.abi, bytes: memory.nativeMemory('device').deviceHandle() };
  };

  /** Collective: a context of the GIN device API, whose kernels put between this transport's memories. Rejects with `EP_CAPACITY` before anything is made. */
  readonly openGin = (options: GinOptions): Promise<EfaGin> =>
    this.guard('openGin', async () => {
      const { timeoutMs } = this.#init.config;
      const onRelease = (gin: EfaGin): void => {
        this.#contexts.delete(gin);
        this.children.remove(gin);
      };
      const { world } = this;
      const gin = await openGin({ ...this.#init, world, timeoutMs, onRelease }, options, this.closing);
      this.#contexts.add(gin);
      return this.children.add(gin);
    });

  protected override release(): void {
    this.#init.liveness.stop();
    this.#init.nic.close();
    this.#init.context.close();
  }
}
