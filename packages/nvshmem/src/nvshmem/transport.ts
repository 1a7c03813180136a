/** Ranks as PEs of NVIDIA's NVSHMEM: device memory on its symmetric heap, moved by its calls on streams or by kernels, beside the host memory of `nvshmem:shm`. */
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
  GpuCopier,
  type GpuQueue,
  type NativeGpuLibrary,
  type NativeGpuStream,
  type NativeNvshmemWorld,
  native,
} from '@ep/native';
import {
  AdoptedDeviceMemory,
  allocateDeviceMemory,
  checkLimits,
  DeviceMemory,
  nativeTimeout,
  type RankMemory,
  type RankTeam,
  refuseOver,
  runWait,
  waitError,
  withClosing,
} from '@ep/native/ranks';
import { ShmTransport, type ShmTransportInit } from '../transport.js';
import type { ResolvedNvshmemConfig } from './config.js';
import { NvshmemEndpoint } from './endpoint.js';
import { reachByNvshmem, takeAlike } from './heap.js';
import { type NvshmemNeeds, nvshmemCapabilities } from './probe.js';

export interface NvshmemTransportInit extends Omit<ShmTransportInit, 'config' | 'facts' | 'isNew'> {
  readonly library: NativeGpuLibrary;
  readonly nvshmem: NativeNvshmemWorld;
  readonly config: ResolvedNvshmemConfig;
}

export class NvshmemTransport extends Resource implements Transport<NvshmemNeeds> {
  readonly name = 'nvshmem:nvshmem';
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities = nvshmemCapabilities();
  /** All ranks, in order. */
  readonly world: RankTeam;
  /** Ordinal of this rank's GPU. */
  readonly deviceIndex: number;
  /** PEs share a GPU by turns (without MPS): kernels of two ranks never run at once, so none may wait for another's. */
  readonly byTurns: boolean;
  readonly #init: NvshmemTransportInit;
  readonly #host: ShmTransport;
  readonly #copier: GpuCopier;
  readonly #stream: NativeGpuStream;
  readonly #endpoints = new Map<Rank, NvshmemEndpoint>();
  /** NVSHMEM waits on this transport's stream for a rank that will not come. */
  #stuck = false;

  constructor(init: NvshmemTransportInit) {
    super('nvshmem:nvshmem transport');
    const { rank, worldSize, context, liveness, world, controls, round, id, config, library, nvshmem } = init;
    this.#init = init;
    this.rank = rank;
    this.worldSize = worldSize;
    this.world = world;
    this.deviceIndex = config.device;
    this.byTurns = nvshmem.facts().byTurns;
    this.#copier = GpuCopier.open(library, config.device);
    this.#stream = new (native().binding.GpuStream)(library, config.device, true);
    const own = { facts: '', isNew: false, config };
    this.#host = this.children.add(
      new ShmTransport({ rank, worldSize, context, liveness, world, controls, round, id, ...own }),
    );
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

  /** The addon's object, for what stands above this package; throws `EP_CLOSED` after close(). */
  nativeWorld(operation: string): NativeNvshmemWorld {
    this.checkOpen(operation);
    return this.#init.nvshmem;
  }

  /** Collective over the world, by the host. `EP_PEER_LOST` or `EP_TIMEOUT` names who has not come. */
  barrier(options?: WaitOptions): Promise<void> {
    return this.#host.barrier(options);
  }

  /**
   * Collective: NVSHMEM's barrier of all PEs on each rank's stream, behind what was put there before. Nobody enters it until all ranks have come here, which ends as `barrier` does. Resolves when the
   * stream has passed it; a rank that dies between ends the wait (`EP_PEER_LOST`), but NVSHMEM's never: that stream, and the transport, are lost then.
   */
  barrierOn(queue: GpuQueue, options?: WaitOptions): Promise<void> {
    return this.guard('barrierOn', async () => {
      checkLimits(options, 'barrierOn', this.worldSize);
      const where = 'barrierOn';
      if (queue?.device?.kind !== 'cuda' || queue.device.index !== this.deviceIndex) {
        throw new EpError('EP_INVALID_ARGUMENT', `${where}: expected a stream of GPU ${this.deviceIndex}`);
      }
      await this.#host.barrier(options);
      const { nvshmem, context, config, liveness } = this.#init;
      const stream = queue.nativeStream(where);
      const limit = nativeTimeout(options, config.timeoutMs, where);
      const wait = () => nvshmem.barrier(stream, context, limit);
      const outcome = await runWait(native().operations, wait, this.closing, options?.signal);
      if (outcome.status === 0) return;
      // HAZARD: it stays on the stream for ever; whoever waited for the stream would, too.
      stream.abandon();
      const awaited = Array.from({ length: this.worldSize }, (_, peer) => peer).filter((peer) => peer !== this.rank);
      const progress = 'NVSHMEM waits on the stream for ranks that had come before';
      const error = waitError(where, outcome, { awaited, timeoutMs: limit, progress });
      liveness.fail(error);
      throw liveness.notice(error);
    });
  }

  readonly allocate = (options: AllocateOptions): Promise<RankMemory | DeviceMemory> => {
    if (options?.space !== 'device') return this.#host.allocate(options);
    return this.guard('allocate', async () => {
      const where = 'allocate';
      checkLimits(options, where, this.worldSize);
      const byteLength = checkInteger(options.byteLength, 'byteLength', where);
      const signalSlots = checkInteger(options.signalSlots, 'signalSlots', where, 0, this.capabilities.maxSignalSlots);
      refuseOver(options, this.name, 'NVSHMEM reaches its own symmetric heap');
      const { rank, worldSize, context, liveness, world, library, nvshmem, config } = this.#init;
      return withClosing(options, this.closing, async (limits) => {
        // What this rank put into memory that it has closed since must have landed: its peers may get the same bytes anew.
        await this.#drain(limits);
        const part = await takeAlike(nvshmem, world, { byteLength, signalSlots }, config.heapBytes, limits);
        try {
          const made: DeviceMemory = await allocateDeviceMemory(
            {
              ...{ rank, worldSize, context, liveness, world, library },
              timeoutMs: config.timeoutMs,
              device: config.device,
              copier: this.#copier,
              reach: reachByNvshmem(nvshmem, context, part),
              onRelease: () => this.children.remove(made),
            },
            { byteLength, signalSlots },
            limits,
          );
          return this.children.add(made);
        } catch (error) {
          part.release();
          throw error;
        }
      });
    });
  };

  /** Device memory of others, all of it on this rank's GPU, for `read`, `write` and as the source or target of puts and gets. HAZARD: its owner keeps it until this is closed. */
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

  readonly connect = async (peer: Rank): Promise<NvshmemEndpoint> => {
    this.checkOpen('connect');
    const host = await this.#host.connect(peer);
    let endpoint = this.#endpoints.get(peer);
    if (endpoint === undefined || endpoint.closed) {
      const { context, liveness, nvshmem: world, config } = this.#init;
      const init = { peer, host, world, stream: this.#stream, context, liveness, timeoutMs: config.timeoutMs };
      endpoint = this.children.add(new NvshmemEndpoint(init as ConstructorParameters<typeof NvshmemEndpoint>[0]));
      this.#endpoints.set(peer, endpoint);
    }
    return endpoint;
  };

  /** For kernels of ours; those of NVSHMEM take the addresses themselves (`DeviceMemory.address`). */
  readonly device = (memory: SymmetricMemory): DeviceHandle<NvshmemNeeds> => {
    if (!(memory instanceof DeviceMemory)) return this.#host.device(memory);
    this.checkOpen('device');
    const { context, nvshmem } = this.#init;
    if (memory.context !== context) {
      throw new EpError('EP_INVALID_ARGUMENT', 'device: the memory belongs to another transport');
    }
    if (!nvshmem.facts().mapped) {
      throw new EpError(
        'EP_UNSUPPORTED',
        'device: NVSHMEM has not mapped the heaps of all ranks here, it reaches some by a network: kernels that store to peers need nvshmem.cuda, or NVSHMEM with peer access (NVSHMEM_DISABLE_P2P unset)',
      );
    }
    const bytes = memory.nativeMemory('device').deviceHandle();
    return { kind: 'memory:load-store', abi: native().binding.abi, bytes };
  };

  /** Waits until all that was put on this transport's stream has landed. */
  async #drain(limits?: WaitOptions): Promise<void> {
    if (this.#stuck) return;
    const { nvshmem, config } = this.#init;
    const limit = nativeTimeout(limits, config.timeoutMs, 'flush');
    const outcome = await native().operations.run(() => nvshmem.quiet(this.#stream, limit), limits?.signal);
    if (outcome.status === 0) return;
    this.#stuck = true;
    throw waitError('flush', outcome, { timeoutMs: limit, progress: 'requests are under way' });
  }

  protected override async release(): Promise<void> {
    // A world that has failed takes nothing any more, and its requests end with the stream.
    if (this.#init.nvshmem.failed() === undefined) await this.#drain().catch(() => {});
    if (this.#stuck) this.#stream.abandon();
    this.#stream.close();
    await this.#copier.close();
  }
}
