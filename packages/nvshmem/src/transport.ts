/** The shared-memory transport: every rank's memory is mapped by every other rank of this host. */
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
  Resource,
  type SymmetricMemory,
  type Transport,
  type WaitOptions,
} from '@ep/core';
import { type NativeRankContext, native } from '@ep/native';
import type { ResolvedShmConfig } from './config.js';
import { ShmEndpoint } from './endpoint.js';
import { ShmMemory } from './memory.js';
import { shmCapabilities } from './probe.js';
import { checkAgreement, SEGMENT_HANDLE_BYTES, ShmTeam } from './team.js';

/** `EP_LIFE_*` in native/include/ep/abi/rank.h. */
const LIFE_DEAD = 3;

export interface ShmTransportInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly world: ShmTeam;
  readonly config: ResolvedShmConfig;
}

export class ShmTransport extends Resource implements Transport<Need> {
  readonly name = 'nvshmem:shm';
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities = shmCapabilities();
  /** All ranks, in order. */
  readonly world: ShmTeam;
  readonly #init: ShmTransportInit;
  readonly #failed = new AbortController();
  readonly #endpoints = new Map<Rank, ShmEndpoint>();

  constructor(init: ShmTransportInit) {
    super('nvshmem:shm transport');
    this.rank = init.rank;
    this.worldSize = init.worldSize;
    this.world = init.world;
    this.#init = init;
  }

  get failed(): AbortSignal {
    return this.#failed.signal;
  }

  /** Ranks whose thread or process has died (not those that closed in order). Two loads per rank, no system call. */
  lostRanks(): Rank[] {
    this.checkOpen('lostRanks');
    const lost: Rank[] = [];
    for (let rank = 0; rank < this.worldSize; rank++) {
      if (rank !== this.rank && this.#init.context.life(rank) === LIFE_DEAD) lost.push(rank);
    }
    if (lost.length > 0 && !this.#failed.signal.aborted) {
      this.#failed.abort(new EpError('EP_PEER_LOST', `${formatRanks(lost)} died`, { context: { lost } }));
    }
    return lost;
  }

  /** Collective over the world. `EP_PEER_LOST` or `EP_TIMEOUT` names who has not come. */
  barrier(options?: WaitOptions): Promise<void> {
    return this.guard('barrier', () => this.#noticing(this.world.barrier(options)));
  }

  readonly allocate = (options: AllocateOptions): Promise<SymmetricMemory> =>
    this.guard('allocate', async () => {
      const where = 'allocate';
      const byteLength = checkInteger(options.byteLength, 'byteLength', where);
      const signalSlots = checkInteger(options.signalSlots, 'signalSlots', where, 0, this.capabilities.maxSignalSlots);
      if (options.space === 'device') {
        throw new EpError(
          'EP_UNSUPPORTED',
          'allocate: nvshmem:shm has host memory only; backing cuda has device memory',
        );
      }
      options.signal?.throwIfAborted();
      return this.#noticing(this.#allocate(byteLength, signalSlots, options));
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

  readonly connect = async (peer: Rank): Promise<Endpoint<Need>> => {
    this.checkOpen('connect');
    checkInteger(peer, 'peer', 'connect', 0, this.worldSize - 1);
    let endpoint = this.#endpoints.get(peer);
    if (endpoint === undefined || endpoint.closed) {
      endpoint = this.children.add(new ShmEndpoint(peer));
      this.#endpoints.set(peer, endpoint);
    }
    return endpoint;
  };

  readonly device = (memory: SymmetricMemory): DeviceHandle<Need> => {
    this.checkOpen('device');
    if (!(memory instanceof ShmMemory))
      throw new EpError('EP_INVALID_ARGUMENT', 'device: the memory belongs to another transport');
    return {
      kind: 'memory:load-store',
      abi: native().binding.abi,
      bytes: memory.nativeMemory('device').deviceHandle(),
    };
  };

  /** Collective over the members (world ranks in team order): a team of its own, with its own barrier. */
  createTeam(ranks: readonly Rank[], parent: ShmTeam, options?: WaitOptions): Promise<ShmTeam | undefined> {
    return this.guard('createTeam', () => this.#noticing(this.#createTeam(ranks, parent, options)));
  }

  protected override release(): void {
    this.#init.context.close();
  }

  async #allocate(byteLength: number, signalSlots: number, options: AllocateOptions): Promise<SymmetricMemory> {
    const { binding } = native();
    const { context, config } = this.#init;
    // A rank that cannot allocate still takes part: the others must hear why instead of waiting for it.
    let memory: InstanceType<typeof binding.SymmetricMemory> | undefined;
    let refusal: unknown;
    try {
      memory = new binding.SymmetricMemory(context, byteLength, signalSlots);
    } catch (error) {
      refusal = error;
    }
    const blob = new Uint8Array(16 + SEGMENT_HANDLE_BYTES);
    const fields = new Float64Array(blob.buffer, 0, 2);
    fields[0] = byteLength;
    fields[1] = signalSlots;
    if (memory) blob.set(memory.handle(), 16);
    const blobs = await this.world.allGather(blob, options);
    checkAgreement('allocate', this.world, blobs, (bytes) => {
      const [length, slots] = new Float64Array(bytes.buffer, bytes.byteOffset, 2);
      return `${length} bytes and ${slots} signal slots`;
    });
    const without = blobs.flatMap((bytes, rank) => (bytes.subarray(16).every((byte) => byte === 0) ? [rank] : []));
    if (refusal !== undefined) throw refusal;
    if (without.length > 0) {
      throw new EpError('EP_MEMORY_LIMIT', `allocate: ${formatRanks(without)} could not allocate ${byteLength} bytes`, {
        context: { ranks: without, byteLength },
      });
    }
    const handles = new Uint8Array(this.worldSize * SEGMENT_HANDLE_BYTES);
    for (const [rank, bytes] of blobs.entries()) handles.set(bytes.subarray(16), rank * SEGMENT_HANDLE_BYTES);
    memory!.connect(handles);
    // Nobody may close its part, or die of it, before all have mapped it.
    await this.world.barrier(options);
    const made: ShmMemory = new ShmMemory({
      rank: this.rank,
      worldSize: this.worldSize,
      context,
      memory: memory!,
      byteLength,
      signalSlots,
      timeoutMs: config.timeoutMs,
      onRelease: () => this.children.remove(made),
    });
    if (!this.closed) this.children.add(made);
    return made;
  }

  async #createTeam(ranks: readonly Rank[], parent: ShmTeam, options?: WaitOptions): Promise<ShmTeam | undefined> {
    const { context, config } = this.#init;
    const members = Int32Array.from(ranks);
    const own = members.indexOf(this.rank);
    const first = own === 0;
    const blob = new Uint8Array(SEGMENT_HANDLE_BYTES);
    if (first) blob.set(context.createTeamSegment(members.length));
    const blobs = await parent.allGather(blob, options);
    let team: ShmTeam | undefined;
    if (own >= 0) {
      const handle = blobs[parent.ranks.indexOf(members[0]!)]!;
      team = new ShmTeam(context, this.rank, handle, members, config.timeoutMs);
    }
    await parent.barrier(options);
    return team;
  }

  async #noticing<T>(work: Promise<T>): Promise<T> {
    try {
      return await work;
    } catch (error) {
      if (error instanceof EpError && error.code === 'EP_PEER_LOST' && !this.closed) this.lostRanks();
      throw error;
    }
  }
}
