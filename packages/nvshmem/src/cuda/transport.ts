/** Ranks that share GPUs: device memory that kernels of all ranks reach, beside the host memory of `nvshmem:shm`. */
import {
  type AllocateOptions,
  type Capabilities,
  checkInteger,
  type DeviceHandle,
  type Endpoint,
  EpError,
  type Need,
  type Rank,
  Resource,
  type SymmetricMemory,
  type Transport,
  type WaitOptions,
} from '@ep/core';
import { GpuCopier, type NativeGpuLibrary, native } from '@ep/native';
import {
  AdoptedDeviceMemory,
  allocateDeviceMemory,
  checkLimits,
  DeviceMemory,
  type RankMemory,
  type RankTeam,
  refuseOver,
  withClosing,
} from '@ep/native/ranks';
import { ShmTransport, type ShmTransportInit } from '../transport.js';
import type { ResolvedCudaConfig } from './config.js';
import { cudaCapabilities } from './probe.js';

export interface CudaTransportInit extends Omit<ShmTransportInit, 'config' | 'facts' | 'isNew'> {
  readonly library: NativeGpuLibrary;
  readonly config: ResolvedCudaConfig;
}

/**
 * What JS itself starts (`connect`, `barrier`, teams) works on host memory; device memory is for kernels, which get there by `device(memory)`, and for `read` and `write`
 * of this rank's own part.
 */
export class CudaTransport extends Resource implements Transport<Need> {
  readonly name = 'nvshmem:cuda';
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities;
  /** All ranks, in order. */
  readonly world: RankTeam;
  /** Ordinal of this rank's GPU. */
  readonly deviceIndex: number;
  readonly #init: CudaTransportInit;
  readonly #host: ShmTransport;
  readonly #copier: GpuCopier;

  constructor(init: CudaTransportInit) {
    super('nvshmem:cuda transport');
    const { rank, worldSize, context, liveness, world, controls, round, id, config } = init;
    this.#init = init;
    this.rank = rank;
    this.worldSize = worldSize;
    this.deviceIndex = config.device;
    this.#copier = GpuCopier.open(init.library, config.device);
    this.#host = this.children.add(
      new ShmTransport({
        rank,
        worldSize,
        context,
        liveness,
        world,
        controls,
        round,
        id,
        facts: '',
        isNew: false,
        config,
      }),
    );
    this.capabilities = cudaCapabilities();
    this.world = world;
  }

  get failed(): AbortSignal {
    return this.#host.failed;
  }

  /** What ends a wait of this transport that gives no timeout of its own, in milliseconds. */
  get timeoutMs(): number {
    return this.#host.timeoutMs;
  }

  lostRanks(): Rank[] {
    return this.#host.lostRanks();
  }

  /** Collective over the world. `EP_PEER_LOST` or `EP_TIMEOUT` names who has not come. */
  barrier(options?: WaitOptions): Promise<void> {
    return this.#host.barrier(options);
  }

  readonly allocate = (options: AllocateOptions): Promise<RankMemory | DeviceMemory> => {
    if (options?.space !== 'device') return this.#host.allocate(options);
    return this.guard('allocate', async () => {
      const where = 'allocate';
      checkLimits(options, where, this.worldSize);
      const byteLength = checkInteger(options.byteLength, 'byteLength', where);
      const signalSlots = checkInteger(options.signalSlots, 'signalSlots', where, 0, this.capabilities.maxSignalSlots);
      refuseOver(options, this.name, 'peers map what it allocates');
      const { rank, worldSize, context, liveness, world, library, config } = this.#init;
      return withClosing(options, this.closing, async (limits) => {
        const made: DeviceMemory = await allocateDeviceMemory(
          {
            ...{ rank, worldSize, context, liveness, world, library },
            timeoutMs: config.timeoutMs,
            device: config.device,
            copier: this.#copier,
            onRelease: () => this.children.remove(made),
          },
          { byteLength, signalSlots },
          limits,
        );
        return this.children.add(made);
      });
    });
  };

  /**
   * Device memory of others, all of it on this rank's GPU: PyTorch's, opened by `CudaDevice.openIpc`, or what `dlpackTensor` makes of a tensor's fields. Its regions are for `read` and `write` of this transport's device
   * memory; a dispatch sends from any device memory as it is, adopted or not. Peers cannot write there: what is received needs symmetric memory. HAZARD: its owner
   * keeps it until this is closed.
   */
  readonly adopt = async (memory: {
    readonly address: bigint;
    readonly byteLength: number;
  }): Promise<AdoptedDeviceMemory> => {
    this.checkOpen('adopt');
    const { library, config } = this.#init;
    const made: AdoptedDeviceMemory = new AdoptedDeviceMemory(memory, library, config.device, () =>
      this.children.remove(made),
    );
    return this.children.add(made);
  };

  /** Operations of JS, on host memory. */
  readonly connect = (peer: Rank): Promise<Endpoint<Need>> => this.#host.connect(peer);

  readonly device = (memory: SymmetricMemory): DeviceHandle<Need> => {
    if (!(memory instanceof DeviceMemory)) return this.#host.device(memory);
    this.checkOpen('device');
    if (memory.context !== this.#init.context) {
      throw new EpError('EP_INVALID_ARGUMENT', 'device: the memory belongs to another transport');
    }
    return {
      kind: 'memory:load-store',
      abi: native().binding.abi,
      bytes: memory.nativeMemory('device').deviceHandle(),
    };
  };

  protected override async release(): Promise<void> {
    await this.#copier.close();
  }
}
