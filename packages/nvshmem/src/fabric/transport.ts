/** Ranks on any hosts that a network joins: a progress thread of each rank carries what kernels and JS ask for, through libfabric. */
import {
  type AllocateOptions,
  type Capabilities,
  checkInteger,
  type DeviceHandle,
  EpError,
  type Rank,
  Resource,
  type RoundMaker,
  type SymmetricMemory,
  type Transport,
  type WaitOptions,
} from '@ep/core';
import { type FabricCounts, type FabricOffer, type NativeFabricNic, type NativeRankContext, native } from '@ep/native';
import {
  AdoptedRange,
  allocateMemory,
  checkHostAllocation,
  checkLimits,
  type LinkedTeam,
  type Liveness,
  overOrFailure,
  RankMemory,
  type Reach,
  refuseOver,
  withClosing,
} from '@ep/native/ranks';
import type { ResolvedFabricConfig } from './config.js';
import { FabricEndpoint } from './endpoint.js';
import { allocateGpuMemory, type GpuRankMemory, gpuError } from './gpu-memory.js';
import { type FabricNeeds, fabricCapabilities, pinsMemory } from './probe.js';
import { roundMaker } from './rounds.js';

export interface FabricTransportInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly hosts: readonly Rank[];
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly world: LinkedTeam;
  readonly nic: NativeFabricNic;
  readonly offer: FabricOffer;
  readonly config: ResolvedFabricConfig;
}

export class FabricTransport extends Resource implements Transport<FabricNeeds> {
  readonly name = 'nvshmem:fabric';
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities;
  /** For each rank the lowest one of those that share its network interfaces, process ids and user. */
  readonly hosts: readonly Rank[];
  /** Provider, interface and limits that were chosen, and why there are no atomics. */
  readonly offer: FabricOffer;
  /** Absent in a world of more than 64 ranks. */
  readonly rounds?: RoundMaker;
  /** All ranks, in order. */
  readonly world: LinkedTeam;
  readonly #init: FabricTransportInit;
  readonly #reach: Reach;
  readonly #endpoints = new Map<Rank, FabricEndpoint>();

  constructor(init: FabricTransportInit) {
    super('nvshmem:fabric transport');
    const { nic } = init;
    this.rank = init.rank;
    this.worldSize = init.worldSize;
    this.hosts = init.hosts;
    this.offer = init.offer;
    this.capabilities = fabricCapabilities(this.offer);
    this.world = this.children.add(init.world);
    this.#init = init;
    const rounds = roundMaker({
      ...init,
      settle: async (peer, options) => (await this.connect(peer)).flush(options),
    });
    if (rounds !== undefined) this.rounds = rounds;
    this.#reach = {
      pins: pinsMemory(this.offer.provider),
      byteLength: () => nic.partBytes(),
      describe: (memory) => nic.addMemory(memory),
      connect: (memory, parts) => nic.route(memory, parts),
      failure: 'route to the parts of the others',
      addresses: (memory) => ({ bytes: memory.address(init.rank), signals: memory.signalAddress() }),
      release: (memory) => nic.removeMemory(memory),
    };
  }

  get failed(): AbortSignal {
    return this.#init.liveness.failed;
  }

  /** What ends a wait of this transport that gives no timeout of its own, in milliseconds. */
  get timeoutMs(): number {
    return this.#init.config.timeoutMs;
  }

  /** Ranks that have died or were not heard for `silenceMs` (not those that closed in order). */
  lostRanks(): Rank[] {
    this.checkOpen('lostRanks');
    return this.#init.liveness.lostRanks();
  }

  /** What the progress thread has done so far. */
  counts(): FabricCounts {
    this.checkOpen('counts');
    return this.#init.nic.counts();
  }

  /** What a kernel's request, or a peer, did wrong first; empty if nothing. */
  violation(): string {
    this.checkOpen('violation');
    return this.#init.nic.violation();
  }

  /** Collective over the world. `EP_PEER_LOST` or `EP_TIMEOUT` names who has not come. */
  async barrier(options?: WaitOptions): Promise<void> {
    this.checkOpen('barrier');
    await this.world.barrier(options);
  }

  /**
   * With `space: 'device'`, of a transport that was opened with `device`, memory of that GPU, of the same size on all ranks: for puts and gets of JS between GPUs, and the host's memory.
   */
  readonly allocate = (options: AllocateOptions): Promise<RankMemory> => {
    const named = this.#init.config.gpu >= 0;
    if (options?.space === 'device' && named) return this.#allocateGpu(options);
    return this.guard('allocate', async () => {
      const { config, nic: _, offer: __, ...ranks } = this.#init;
      const size = checkHostAllocation(options, this, {
        instead: '; open it with `device`, the ordinal of a GPU, for memory there',
      });
      const over = overOrFailure(options, size, { name: this.name, ...ranks });
      return withClosing(options, this.closing, async (limits) => {
        const made: RankMemory = await allocateMemory(
          {
            ...ranks,
            ranksOnHost: config.ranksOnHost,
            timeoutMs: config.timeoutMs,
            reach: this.#reach,
            onRelease: () => this.children.remove(made),
          },
          size,
          limits,
          over,
        );
        return this.children.add(made);
      });
    });
  };

  #allocateGpu(options: AllocateOptions): Promise<GpuRankMemory> {
    return this.guard('allocate', async () => {
      const where = 'allocate';
      checkLimits(options, where, this.worldSize);
      const byteLength = checkInteger(options.byteLength, 'byteLength', where, 1);
      const signalSlots = checkInteger(options.signalSlots, 'signalSlots', where, 0, this.capabilities.maxSignalSlots);
      refuseOver(options, this.name, 'memory of a GPU is of its own making');
      const { config, offer: _, ...ranks } = this.#init;
      return withClosing(options, this.closing, async (limits) => {
        const made: GpuRankMemory = await allocateGpuMemory(
          { ...ranks, timeoutMs: config.timeoutMs, onRelease: () => this.children.remove(made) },
          { byteLength, signalSlots },
          limits,
        );
        return this.children.add(made);
      });
    });
  }

  /**
   * For sources of puts and targets of gets: memory of the host, or of the GPU that was named as `device`. `EP_UNSUPPORTED` where the provider cannot register that. HAZARD: its owner
   * frees it after `close()` only.
   */
  readonly adopt = async (memory: { readonly address: bigint; readonly byteLength: number }): Promise<AdoptedRange> => {
    this.checkOpen('adopt');
    try {
      return this.children.add(
        new AdoptedRange(this.#init.nic, memory, (range) => this.children.remove(range), this.#reach),
      );
    } catch (error) {
      throw gpuError('adopt', error);
    }
  };

  readonly connect = async (peer: Rank): Promise<FabricEndpoint> => {
    this.checkOpen('connect');
    checkInteger(peer, 'peer', 'connect', 0, this.worldSize - 1);
    let endpoint = this.#endpoints.get(peer);
    if (endpoint === undefined || endpoint.closed) {
      const { nic, context, liveness, config } = this.#init;
      const { timeoutMs } = config;
      const { noAtomics } = this.offer;
      endpoint = this.children.add(new FabricEndpoint({ peer, nic, context, liveness, timeoutMs, noAtomics }));
      this.#endpoints.set(peer, endpoint);
    }
    return endpoint;
  };

  readonly device = (memory: SymmetricMemory): DeviceHandle<FabricNeeds> => {
    this.checkOpen('device');
    if (!(memory instanceof RankMemory) || memory.context !== this.#init.context) {
      throw new EpError('EP_INVALID_ARGUMENT', 'device: the memory belongs to another transport');
    }
    if (memory.space === 'device') {
      throw new EpError(
        'EP_UNSUPPORTED',
        'device: kernels post nothing to memory of a GPU over the fabric; JS puts and gets',
      );
    }
    const kind = memory.isOver ? 'memory:load-store+proxy' : 'memory:proxy';
    return { kind, abi: native().binding.abi, bytes: memory.nativeMemory('device').deviceHandle() };
  };

  protected override release(): void {
    this.#init.liveness.stop();
    this.#init.nic.close();
    this.#init.context.close();
  }
}
