/** Queue pairs of mlx5, posted by kernels and by JS. */
import {
  type AllocateOptions,
  type Capabilities,
  checkInteger,
  type DeviceHandle,
  EpError,
  type Rank,
  type RenewOptions,
  Resource,
  type Succession,
  type SymmetricMemory,
  type Transport,
  type WaitOptions,
} from '@ep/core';
import {
  GpuCopier,
  type NativeIbgdaNic,
  type NativeIbgdaPort,
  type NativeRankContext,
  native,
  openGpus,
  type SoftNicCounts,
} from '@ep/native';
import {
  AdoptedRange,
  allocateDeviceMemory,
  allocateMemory,
  checkHostAllocation,
  checkLimits,
  checkOver,
  DeviceMemory,
  fenceRanks,
  inheritMemory,
  type Liveness,
  Members,
  meetAnew,
  overOrFailure,
  RankMemory,
  type RankTeam,
  type ReadmitOptions,
  type RenewableReach,
  type Renewer,
  refuseOver,
  renewMemory,
  successionOf,
  type WorldTeam,
  withClosing,
} from '@ep/native/ranks';
import type { ResolvedIbgdaConfig } from './config.js';
import { IbgdaEndpoint } from './endpoint.js';
import { pairError } from './failure.js';
import { checkRenewable } from './members.js';
import { deviceReachBy, reachBy } from './memory.js';
import { type IbgdaBacking, type IbgdaNeeds, ibgdaCapabilities } from './probe.js';

export interface IbgdaTransportInit {
  readonly backing: IbgdaBacking;
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
  readonly nic: NativeIbgdaNic;
  readonly config: ResolvedIbgdaConfig;
}

export class IbgdaTransport extends Resource implements Transport<IbgdaNeeds> {
  readonly name: string;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities;
  /** Device, port and addresses that the queue pairs use, and what was passed over for them. */
  readonly port: NativeIbgdaPort;
  readonly #init: IbgdaTransportInit;
  /** Absent where nobody comes in the place of a dead rank: over a network, and for kernels on a GPU. */
  readonly renew?: (options: RenewOptions) => Promise<RankMemory>;
  /** Likewise. */
  readonly isEmpty?: (rank: Rank) => boolean;
  /** Likewise. What kernels post to a peer before `replace` breaks the queue pair. */
  readonly succession?: Succession;
  /** Ends this rank's queue pairs to them: they take nothing from there any more, until another process is in their place. Absent over `verbs`, where it has not been tried. */
  readonly fence?: (ranks: readonly Rank[]) => Promise<readonly Rank[]>;
  readonly #members: Members | undefined;
  readonly #reach: RenewableReach;
  /** Of the GPU whose kernels post. */
  readonly #copier: GpuCopier | undefined;
  readonly #endpoints = new Map<Rank, IbgdaEndpoint>();
  readonly #listeners = new Set<(ranks: readonly Rank[]) => void>();

  constructor(init: IbgdaTransportInit) {
    super(`ibgda:${init.backing} transport`);
    this.name = `ibgda:${init.backing}`;
    this.rank = init.rank;
    this.worldSize = init.worldSize;
    this.port = init.nic.port();
    this.capabilities = ibgdaCapabilities(this.port);
    this.children.add(init.world);
    this.#init = init;
    // The software NIC pins nothing.
    this.#reach = reachBy(init.nic, init.rank, init.backing !== 'soft');
    const { members, config } = init;
    this.#members =
      members === undefined
        ? undefined
        : new Members({
            ...init,
            ...members,
            transport: this.name,
            timeoutMs: config.timeoutMs,
            onReplace: (ranks) => {
              for (const listener of [...this.#listeners]) listener(ranks);
            },
          });
    if (members !== undefined && config.device === undefined) {
      this.renew = (options) => this.#renew(options);
      this.succession = this.#makeSuccession(this.#members!, members.isNew);
      this.isEmpty = (rank) => this.#members!.empty[rank] === 1;
    }
    if (init.backing !== 'verbs') this.fence = (ranks) => this.#fence(ranks);
    const { device } = init.config;
    this.#copier = device === undefined ? undefined : GpuCopier.open(openGpus().library, device);
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
    const error = pairError('kernel', failure.peer, failure, context.life(failure.peer));
    liveness.fail(error);
    return error;
  }

  /** What the software NIC has done so far. */
  counts(): SoftNicCounts {
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
   * Lets ranks in that come in the place of dead ones, or into places in which nobody has been yet (`rejoin` of the same backing), as processes or threads of this host. Collective over all ranks that are here but those of `joining` and `without`,
   * and over the newcomers, while nothing is under way to the ranks of `joining`. Queue pairs to those are made anew; all others, memories and keys stay. From then on `world` has all ranks
   * that are here, allocations are theirs, and memory that there was before is renewed by whoever has it (`renew`, as `MoeBuffer.updateMembers` does). `EP_TIMEOUT` or `EP_PEER_LOST` names who
   * did not come, or died: a later call may do it. `EP_INVALID_ARGUMENT` where a rank to be replaced lives, `EP_RENDEZVOUS` where a newcomer has another version or configuration,
   * `EP_UNSUPPORTED` over a network and for kernels on a GPU.
   */
  readmit(options: ReadmitOptions): Promise<void> {
    const where = 'readmit';
    return this.guard(where, async () => {
      checkLimits(options, where, this.worldSize);
      const { config, nic } = this.#init;
      checkRenewable(config, `${this.name}: ${where}`);
      const members = this.#members!;
      const timeoutMs = options.timeoutMs ?? config.timeoutMs;
      const begin = performance.now();
      await withClosing(options, this.closing, async (limits) => {
        const before = members.world;
        const world = this.children.add(await members.readmit({ ...options, ...limits }));
        this.children.remove(before);
        await before.close();
        const left = Math.max(1, timeoutMs - (performance.now() - begin));
        const meeting = {
          ...{ world, worldSize: this.worldSize, where },
          prepare: () => {
            for (const peer of options.joining) nic.resetPeer(peer);
            return nic;
          },
          say: (of: NativeIbgdaNic) => of.connection(),
          connect: (_: NativeIbgdaNic, connections: readonly Uint8Array[]) => {
            for (const peer of options.joining) nic.connectPeer(peer, connections[peer]!);
          },
          // Whoever posts there finds the queue pairs broken, until somebody else comes.
          undo: () => {},
        };
        await meetAnew(meeting, { ...limits, timeoutMs: left });
        // Requests to the dead may have told of it meanwhile.
        this.#init.liveness.renew();
      });
    });
  }

  /** Collective over the world. `EP_PEER_LOST` or `EP_TIMEOUT` names who has not come. */
  async barrier(options?: WaitOptions): Promise<void> {
    this.checkOpen('barrier');
    await this.world.barrier(options);
  }

  /**
   * Collective. With `space: 'device'`, of a transport that was opened for a GPU, what its kernels send from and receive in; peers have no address there. It lies in the place of
   * the kernels' queues (`port.placement`).
   */
  readonly allocate = (options: AllocateOptions): Promise<RankMemory | DeviceMemory> => {
    if (options?.space === 'device' && this.#copier !== undefined) return this.#allocateDevice(options, this.#copier);
    return this.#allocateHost(options);
  };

  #allocateDevice(options: AllocateOptions, copier: GpuCopier): Promise<DeviceMemory> {
    return this.guard('allocate', async () => {
      const where = 'allocate';
      checkLimits(options, where, this.worldSize);
      const byteLength = checkInteger(options.byteLength, 'byteLength', where);
      const signalSlots = checkInteger(options.signalSlots, 'signalSlots', where, 0, this.capabilities.maxSignalSlots);
      refuseOver(options, this.name, 'kernels on a GPU reach no memory of other transports');
      const { rank, worldSize, context, liveness, nic, config } = this.#init;
      const { world } = this;
      return withClosing(options, this.closing, async (limits) => {
        const made: DeviceMemory = await allocateDeviceMemory(
          {
            ...{ rank, worldSize, context, liveness, world, copier },
            library: openGpus().library,
            device: config.device!,
            timeoutMs: config.timeoutMs,
            reach: deviceReachBy(nic),
            onRelease: () => this.children.remove(made),
          },
          { byteLength, signalSlots },
          limits,
        );
        return this.children.add(made);
      });
    });
  }

  #allocateHost(options: AllocateOptions): Promise<RankMemory> {
    return this.guard('allocate', async () => {
      const size = checkHostAllocation(options, this, {});
      const over = overOrFailure(options, size, this.#registrar);
      return withClosing(options, this.closing, async (limits) => {
        const made: RankMemory = await allocateMemory(
          this.#allocator(() => this.children.remove(made)),
          size,
          limits,
          over,
        );
        return this.children.add(made);
      });
    });
  }

  #makeSuccession(members: Members, isNew: boolean): Succession {
    const { context } = this.#init;
    return successionOf({
      ...{ context, members, id: this.#init.members!.id, isNew, reach: this.#reach, listeners: this.#listeners },
      inherit: (options) =>
        this.guard('inherit', async () => {
          const size = checkHostAllocation(options, this, {});
          const made: RankMemory = inheritMemory(
            this.#allocator(() => this.children.remove(made)),
            size,
            this.#overOf(options, size),
          );
          return this.children.add(made);
        }),
    });
  }

  #renew(options: RenewOptions): Promise<RankMemory> {
    return this.guard('renew', async () => {
      const size = checkHostAllocation(options, this, {});
      const over = this.#overOf(options, size);
      return withClosing(options, this.closing, async (limits) => {
        // HAZARD: what fails in between closes the memory before there is a name for it.
        let known: RankMemory | undefined;
        const made = await renewMemory(
          this.#allocator(() => void (known && this.children.remove(known))),
          size,
          options,
          limits,
          over,
        );
        known = made;
        return options.memory === made ? made : this.children.add(made);
      });
    });
  }

  #overOf(options: AllocateOptions, size: { readonly byteLength: number; readonly signalSlots: number }) {
    return checkOver(options, size, this.#registrar);
  }

  get #registrar() {
    const { rank, worldSize, context } = this.#init;
    return { name: this.name, rank, worldSize, context };
  }

  #allocator(onRelease: () => void): Renewer {
    const { rank, worldSize, context, liveness, config } = this.#init;
    return {
      ...{ rank, worldSize, context, liveness, world: this.world },
      ...(config.network === undefined ? {} : { ranksOnHost: config.ranksOnHost }),
      timeoutMs: config.timeoutMs,
      reach: this.#reach,
      onRelease,
    };
  }

  /** For sources of puts and targets of gets; kernels may send from it, too. */
  readonly adopt = async (memory: { readonly address: bigint; readonly byteLength: number }): Promise<AdoptedRange> => {
    this.checkOpen('adopt');
    return this.children.add(
      new AdoptedRange(this.#init.nic, memory, (range) => this.children.remove(range), this.#reach),
    );
  };

  #fence(ranks: readonly Rank[]): Promise<readonly Rank[]> {
    return this.guard('fence', () => {
      const { nic } = this.#init;
      const { closing: signal } = this;
      return fenceRanks(ranks, { ...this.#init, signal, isOver: (rank) => nic.endWay(rank) });
    });
  }

  readonly connect = async (peer: Rank): Promise<IbgdaEndpoint> => {
    this.checkOpen('connect');
    checkInteger(peer, 'peer', 'connect', 0, this.worldSize - 1);
    let endpoint = this.#endpoints.get(peer);
    if (endpoint === undefined || endpoint.closed) {
      const { nic, context, liveness, config } = this.#init;
      const { atomics, maskedSwap } = this.port;
      endpoint = this.children.add(
        new IbgdaEndpoint({
          ...{ peer, nic, context, liveness, timeoutMs: config.timeoutMs, atomics, maskedSwap },
          empty: this.#members?.empty,
        }),
      );
      this.#endpoints.set(peer, endpoint);
    }
    return endpoint;
  };

  readonly device = (memory: SymmetricMemory): DeviceHandle<IbgdaNeeds> => {
    this.checkOpen('device');
    if (memory instanceof DeviceMemory && memory.context === this.#init.context) {
      return { kind: 'memory:ibgda', abi: native().binding.abi, bytes: memory.nativeMemory('device').deviceHandle() };
    }
    if (this.#copier !== undefined && memory instanceof RankMemory) {
      throw new EpError(
        'EP_UNSUPPORTED',
        `device: kernels on ${this.port.kernels} post, which take memory of space 'device'`,
      );
    }
    if (!(memory instanceof RankMemory) || memory.context !== this.#init.context) {
      throw new EpError('EP_INVALID_ARGUMENT', 'device: the memory belongs to another transport');
    }
    const kind = memory.isOver ? 'memory:load-store+ibgda' : 'memory:ibgda';
    return { kind, abi: native().binding.abi, bytes: memory.nativeMemory('device').deviceHandle() };
  };

  protected override async release(): Promise<void> {
    await this.#copier?.close();
    this.#init.liveness.stop();
    this.#init.nic.close();
    this.#init.context.close();
  }
}
