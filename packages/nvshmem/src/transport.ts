/** The shared-memory transport: every rank's memory is mapped by every other rank of this host; ranks of other hosts, if there are any, are reached by others (`compose`). */
import {
  type AdoptedMemory,
  type AllocateOptions,
  type Capabilities,
  checkInteger,
  type DeviceHandle,
  type Endpoint,
  EpError,
  formatRanks,
  type Need,
  type Rank,
  type RenewOptions,
  Resource,
  type Succession,
  type SymmetricMemory,
  type Transport,
  type WaitOptions,
} from '@ep/core';
import { type NativeRankContext, native, segmentHandleLayout } from '@ep/native';
import {
  allocateMemory,
  checkHostAllocation,
  checkLimits,
  fenceRanks,
  inheritMemory,
  type Liveness,
  Members,
  RankMemory,
  type RankTeam,
  type ReadmitOptions,
  type RenewableReach,
  type Renewer,
  renewMemory,
  withClosing,
} from '@ep/native/ranks';
import type { ResolvedShmConfig } from './config.js';
import { ShmEndpoint } from './endpoint.js';
import { shmCapabilities } from './probe.js';
import { splitTeam } from './split.js';

const HANDLE_BYTES = segmentHandleLayout.byteLength;

const MAPS_OWN = 'peers map what it allocates; put it first in compose()';

/** Every rank maps every part. */
const MAPPED: RenewableReach = {
  pins: false,
  byteLength: () => HANDLE_BYTES,
  describe: (memory) => memory.handle(),
  connect: (memory, handles) => {
    const all = new Uint8Array(handles.length * HANDLE_BYTES);
    for (const [peer, bytes] of handles.entries()) all.set(bytes, peer * HANDLE_BYTES);
    memory.connect(all);
  },
  failure: "map the others' parts",
  release: () => {},
  described: (memory) => memory.handle(),
  replace: (memory, peer, handle) => memory.replace(peer, handle),
};

export interface ShmTransportInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly world: RankTeam;
  readonly controls: readonly Uint8Array[];
  readonly round: number;
  /** For each rank the lowest one of its host; undefined: all are on one. */
  readonly hosts?: readonly Rank[] | undefined;
  /** Of the world. */
  readonly id: string;
  /** What ranks that come later must have chosen alike. */
  readonly facts: string;
  /** This process came later than the world was opened. */
  readonly isNew: boolean;
  readonly config: ResolvedShmConfig;
}

export class ShmTransport extends Resource implements Transport<Need> {
  readonly name = 'nvshmem:shm';
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities = shmCapabilities();
  /** For each rank the lowest one of its host, where it was opened on several: it reaches those of its own. */
  readonly hosts?: readonly Rank[];
  /** Absent where ranks are on several hosts. */
  readonly succession?: Succession;
  /** Likewise. */
  readonly isEmpty?: (rank: Rank) => boolean;
  readonly #members: Members;
  readonly #init: ShmTransportInit;
  readonly #endpoints = new Map<Rank, ShmEndpoint>();
  readonly #listeners = new Set<(ranks: readonly Rank[]) => void>();

  constructor(init: ShmTransportInit) {
    super('nvshmem:shm transport');
    this.rank = init.rank;
    this.worldSize = init.worldSize;
    if (init.hosts !== undefined) this.hosts = init.hosts;
    this.#members = new Members({
      ...init,
      transport: this.name,
      timeoutMs: init.config.timeoutMs,
      onReplace: (ranks) => {
        for (const listener of [...this.#listeners]) listener(ranks);
      },
    });
    this.children.add(init.world);
    this.#init = init;
    if (!this.#isOfSeveral) {
      this.succession = this.#makeSuccession();
      this.isEmpty = (rank) => this.#members.empty[rank] === 1;
    }
  }

  /** All ranks that are here, on this host, in order. */
  get world(): RankTeam {
    return this.#members.world;
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

  /**
   * Lets ranks in that come in the place of dead ones, or into places in which nobody has been yet (`nvshmem.shm.rejoin`), as processes or threads of this host. Collective over all
   * ranks that are here but those of `joining` and `without`, and over the newcomers. From then on `world` has all ranks that are here, allocations are theirs, and memory that there was before is renewed by whoever has it
   * (`MoeBuffer.updateMembers`, `ProcessGroup.recoverRanks`); teams of before stay without the newcomers. `EP_TIMEOUT` or `EP_PEER_LOST` names who did not come, or died: nothing has changed
   * then, and a later call may do it. `EP_INVALID_ARGUMENT` where a rank to be replaced lives, `EP_RENDEZVOUS` where a newcomer has another version or configuration.
   */
  readmit(options: ReadmitOptions): Promise<void> {
    return this.guard('readmit', async () => {
      this.#checkOneHost('readmit');
      checkLimits(options, 'readmit', this.worldSize);
      const before = this.world;
      await withClosing(options, this.closing, async (limits) => {
        this.children.add(await this.#members.readmit({ ...options, ...limits }));
      });
      this.children.remove(before);
      await before.close();
    });
  }

  readonly renew = (options: RenewOptions): Promise<RankMemory> =>
    this.guard('renew', async () => {
      this.#checkOneHost('renew');
      const size = checkHostAllocation(options, this, { refusesOver: MAPS_OWN });
      return withClosing(options, this.closing, async (limits) => {
        // HAZARD: what fails in between closes the memory before there is a name for it.
        let known: RankMemory | undefined;
        const made = await renewMemory(
          this.#allocator(() => void (known && this.children.remove(known))),
          size,
          options,
          limits,
        );
        known = made;
        return options.memory === made ? made : this.children.add(made);
      });
    });

  /** Collective over the ranks of this host. `EP_PEER_LOST` or `EP_TIMEOUT` names who has not come. */
  async barrier(options?: WaitOptions): Promise<void> {
    this.checkOpen('barrier');
    await this.world.barrier(options);
  }

  readonly allocate = (options: AllocateOptions): Promise<RankMemory> =>
    this.guard('allocate', async () => {
      const size = checkHostAllocation(options, this, {
        instead: '; backing cuda has device memory',
        refusesOver: MAPS_OWN,
      });
      return withClosing(options, this.closing, async (limits) => {
        const made: RankMemory = await allocateMemory(
          this.#allocator(() => this.children.remove(made)),
          size,
          limits,
        );
        return this.children.add(made);
      });
    });

  readonly adopt = async (_memory: {
    readonly address: bigint;
    readonly byteLength: number;
  }): Promise<AdoptedMemory> => {
    this.checkOpen('adopt');
    throw new EpError(
      'EP_UNSUPPORTED',
      'adopt: peers cannot map memory that is not in a shared segment; allocate() symmetric memory and let the data be written there, or copy it in',
    );
  };

  /** Those whose processes have ended, or that are on other hosts, from which nothing is stored here. */
  readonly fence = (ranks: readonly Rank[]): Promise<readonly Rank[]> =>
    this.guard('fence', () => {
      const { context } = this.#init;
      const { closing: signal } = this;
      return fenceRanks(ranks, { ...this.#init, signal, isOver: (rank) => context.ended(rank) });
    });

  readonly connect = async (peer: Rank): Promise<Endpoint<Need>> => {
    this.checkOpen('connect');
    checkInteger(peer, 'peer', 'connect', 0, this.worldSize - 1);
    if (this.hosts !== undefined && this.hosts[peer] !== this.hosts[this.rank]) {
      throw new EpError(
        'EP_UNSUPPORTED',
        `connect: rank ${peer} is on another host than rank ${this.rank}, and ${this.name} reaches ${formatRanks(this.world.ranks)}: compose it with a transport that reaches the others`,
        { context: { peer, hosts: this.hosts } },
      );
    }
    let endpoint = this.#endpoints.get(peer);
    if (endpoint === undefined || endpoint.closed) {
      endpoint = this.children.add(new ShmEndpoint(peer, this.#init.context, this.#init.liveness, this.#members.empty));
      this.#endpoints.set(peer, endpoint);
    }
    return endpoint;
  };

  readonly device = (memory: SymmetricMemory): DeviceHandle<Need> => {
    this.checkOpen('device');
    // HAZARD: what a kernel stores to a part that is not mapped ends the process.
    this.#checkOneHost('device', 'compose it with a transport that reaches the others, whose handle is for all');
    return {
      kind: 'memory:load-store',
      abi: native().binding.abi,
      bytes: this.#own(memory, 'device').nativeMemory('device').deviceHandle(),
    };
  };

  /**
   * Collective over `parent`: a team of its own, with its own barrier, of the world ranks `ranks` in team order. Members give the same list
   * (`EP_MISMATCH` names those that do not); the rest may give theirs, so that one call makes several disjoint teams. Undefined for ranks
   * that are not in their own list. Closed with the transport, or by its `close()`.
   */
  createTeam(ranks: readonly Rank[], parent: RankTeam, options?: WaitOptions): Promise<RankTeam | undefined> {
    return this.guard('createTeam', () => {
      checkLimits(options, 'createTeam', this.worldSize);
      return withClosing(options, this.closing, async (limits) => {
        const team = await splitTeam(this.#init, ranks, parent, limits);
        return team && this.children.add(team);
      });
    });
  }

  #makeSuccession(): Succession {
    return {
      world: this.#init.id,
      isNew: this.#init.isNew,
      lifeOf: (rank) => this.#members.lifeOf(rank),
      onReplace: (listener) => {
        this.#listeners.add(listener);
        return () => this.#listeners.delete(listener);
      },
      part: (memory) => this.#own(memory, 'part').nativeMemory('part').handle(),
      inherit: (options) =>
        this.guard('inherit', async () => {
          const size = checkHostAllocation(options, this, { refusesOver: MAPS_OWN });
          const made: RankMemory = inheritMemory(
            this.#allocator(() => this.children.remove(made)),
            size,
          );
          return this.children.add(made);
        }),
      replace: (memory, peer, part) => this.#own(memory, 'replace').nativeMemory('replace').replace(peer, part),
    };
  }

  get #isOfSeveral(): boolean {
    return this.hosts?.some((host) => host !== this.hosts![0]) ?? false;
  }

  #checkOneHost(where: string, instead = 'open it anew'): void {
    if (!this.#isOfSeveral) return;
    throw new EpError('EP_UNSUPPORTED', `${where}: ${this.name} was opened on several hosts: ${instead}`, {
      context: { hosts: this.hosts },
    });
  }

  #own(memory: SymmetricMemory, where: string): RankMemory {
    if (memory instanceof RankMemory && memory.context === this.#init.context) return memory;
    throw new EpError('EP_INVALID_ARGUMENT', `${where}: the memory belongs to another transport`);
  }

  #allocator(onRelease: () => void): Renewer {
    const { config, ...init } = this.#init;
    return { ...init, world: this.world, timeoutMs: config.timeoutMs, reach: MAPPED, onRelease };
  }

  protected override release(): void {
    this.#init.liveness.stop();
    this.#init.context.close();
  }
}
