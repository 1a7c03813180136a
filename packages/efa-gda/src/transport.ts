/** Endpoints of EFA, posted to by kernels and by JS. */
import {
  type AllocateOptions,
  type Capabilities,
  checkInteger,
  type DeviceHandle,
  EpError,
  type Rank,
  Resource,
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
  allocateMemory,
  checkHostAllocation,
  type Liveness,
  overOrFailure,
  RankMemory,
  type Reach,
  type WorldTeam,
  withClosing,
} from '@ep/native/ranks';
import type { ResolvedEfaConfig } from './config.js';
import { EfaEndpoint } from './endpoint.js';
import { pairError } from './failure.js';
import { type EfaGin, type GinOptions, openGin } from './gin.js';
import { checkSignalSlots, reachBy } from './memory.js';
import { type EfaBacking, type EfaNeeds, efaCapabilities } from './probe.js';

export interface EfaTransportInit {
  readonly backing: EfaBacking;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly world: WorldTeam;
  readonly nic: NativeEfaNic;
  readonly config: ResolvedEfaConfig;
}

export class EfaTransport extends Resource implements Transport<EfaNeeds> {
  readonly name: string;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities;
  /** All ranks, in order. */
  readonly world: WorldTeam;
  /** The device, and what its queue pairs are like. */
  readonly nic: NativeEfaDevice;
  readonly #init: EfaTransportInit;
  readonly #reach: Reach;
  readonly #endpoints = new Map<Rank, EfaEndpoint>();

  constructor(init: EfaTransportInit) {
    super(`efa-gda:${init.backing} transport`);
    this.name = `efa-gda:${init.backing}`;
    this.rank = init.rank;
    this.worldSize = init.worldSize;
    this.nic = init.nic.device();
    this.capabilities = efaCapabilities(this.nic.maxMessageBytes, this.nic.counters);
    this.world = this.children.add(init.world);
    this.#init = init;
    // The software NIC pins nothing.
    this.#reach = reachBy(init.nic, init.rank, init.backing !== 'soft');
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

  /** Collective over the world. `EP_PEER_LOST` or `EP_TIMEOUT` names who has not come. */
  async barrier(options?: WaitOptions): Promise<void> {
    this.checkOpen('barrier');
    await this.world.barrier(options);
  }

  readonly allocate = (options: AllocateOptions): Promise<RankMemory> =>
    this.guard('allocate', async () => {
      const { rank, worldSize, context, liveness, world, config, nic } = this.#init;
      const size = checkHostAllocation(options, this, {});
      const over = overOrFailure(options, size, { name: this.name, rank, worldSize, context });
      return withClosing(options, this.closing, async (limits) => {
        checkSignalSlots(nic, size.signalSlots);
        const made: RankMemory = await allocateMemory(
          {
            rank,
            worldSize,
            context,
            liveness,
            world,
            ...(config.network === undefined ? {} : { ranksOnHost: config.ranksOnHost }),
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
      endpoint = this.children.add(new EfaEndpoint({ peer, nic, context, liveness, timeoutMs: config.timeoutMs }));
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
      const onRelease = (gin: EfaGin): void => void this.children.remove(gin);
      return this.children.add(await openGin({ ...this.#init, timeoutMs, onRelease }, options, this.closing));
    });

  protected override release(): void {
    this.#init.liveness.stop();
    this.#init.nic.close();
    this.#init.context.close();
  }
}
