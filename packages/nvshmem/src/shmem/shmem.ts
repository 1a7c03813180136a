/** The OpenSHMEM-like library: what a program calls first and last, and everything in between on one object. */
import { checkInteger, EpError, formatRanks, invalid, type Member, Resource, type WaitOptions } from '@ep/core';
import type { RankMemory } from '@ep/native/ranks';
import type { ShmConfig } from '../config.js';
import { nvshmem } from '../provider.js';
import { ShmTransport } from '../transport.js';
import { collectives } from './collectives.js';
import { type Context, createContext } from './context.js';
import { symmetricHeap } from './heap.js';
import type { Space } from './space.js';
import { Team } from './teams.js';
import { waiting } from './wait.js';

export interface HeapOptions {
  /** Bytes of the symmetric heap on every PE; the same on all. */
  readonly heapBytes: number;
}

/** PEs are all ranks of a world. */
export interface InitOptions extends HeapOptions, Omit<ShmConfig, 'activeRanks'> {
  readonly signal?: AbortSignal;
}

class Library extends Resource {
  /** All PEs. */
  readonly teamWorld: Team;
  /** The PEs whose memory `ptr()` reaches: all, with shared memory. */
  readonly teamShared: Team;
  readonly transport: ShmTransport;
  readonly #space: Space;
  readonly #ownsTransport: boolean;

  constructor(transport: ShmTransport, space: Space, ownsTransport: boolean) {
    super('shmem library');
    this.transport = transport;
    this.#space = space;
    this.#ownsTransport = ownsTransport;
    this.teamWorld = new Team({ transport, space }, transport.world, true);
    this.teamShared = this.teamWorld;
  }

  /** This PE's number in the world. */
  myPe(): number {
    return this.#space.rank;
  }

  nPes(): number {
    return this.#space.worldSize;
  }

  /** The version of the OpenSHMEM specification whose names and meanings this follows. */
  infoGetVersion(): readonly [major: number, minor: number] {
    return [1, 5];
  }

  infoGetName(): string {
    return '@ep/nvshmem:shm';
  }

  /**
   * Collective: waits until all PEs have come, then closes. Closes also when that fails, and rejects with what failed (`EP_PEER_LOST`, `EP_TIMEOUT`).
   * `close()` is the same without waiting for the others.
   */
  async finalize(options?: WaitOptions): Promise<void> {
    if (this.closed) return this.close();
    try {
      this.#space.native.fence();
      await this.transport.barrier(options);
    } finally {
      await this.close();
    }
  }

  protected override async release(): Promise<void> {
    if (this.#ownsTransport) await this.transport.close();
    else await this.#space.memory.close();
  }
}

export type Shmem = Library &
  Context &
  ReturnType<typeof symmetricHeap> &
  ReturnType<typeof waiting> &
  ReturnType<typeof collectives>;

function refusePe(pe: unknown, worldSize: number, where: string): never {
  throw invalid('pe', { where, expected: `an integer from 0 to ${worldSize - 1}`, found: pe });
}

/** PEs are numbered without gaps. */
function checkFull({ world, worldSize }: ShmTransport): void {
  if (world.size === worldSize) return;
  const away = Array.from({ length: worldSize }, (_, rank) => rank).filter((rank) => !world.ranks.includes(rank));
  throw new EpError(
    'EP_NOT_READY',
    `shmem init: nobody is in the place of ${formatRanks(away)}: PEs are all ranks of a world`,
    {
      context: { ranks: away },
    },
  );
}

function createLibrary(transport: ShmTransport, memory: RankMemory, ownsTransport: boolean): Shmem {
  const { worldSize } = transport;
  const space: Space = {
    memory,
    native: memory.nativeMemory('shmem'),
    rank: transport.rank,
    worldSize,
    liveness: memory.liveness,
    timeoutMs: transport.timeoutMs,
    pe: (pe, where) => (Number.isInteger(pe) && pe >= 0 && pe < worldSize ? pe : refusePe(pe, worldSize, where)),
  };
  const library = new Library(transport, space, ownsTransport);
  return Object.assign(
    library,
    createContext(space),
    symmetricHeap(memory, transport.world),
    waiting(space),
    collectives(space, library.teamWorld),
  );
}

function checkHeapOptions<O extends HeapOptions>(options: O): O {
  const where = 'shmem init';
  if (typeof options !== 'object' || options === null) {
    throw invalid('options', { where, expected: 'an object with heapBytes', found: options });
  }
  checkInteger(options.heapBytes, 'heapBytes', where);
  return options;
}

/** Collective over the transport's world: the library over a transport that stays the caller's. */
export async function shmemOn(transport: ShmTransport, options: HeapOptions & WaitOptions): Promise<Shmem> {
  if (!(transport instanceof ShmTransport)) {
    throw invalid('transport', { where: 'shmem init', expected: 'a transport of nvshmem.shm', found: transport });
  }
  checkFull(transport);
  const { heapBytes, ...limits } = checkHeapOptions(options);
  const memory = await transport.allocate({ ...limits, byteLength: heapBytes, signalSlots: 0 });
  return createLibrary(transport, memory, false);
}

/**
 * Collective: opens `nvshmem.shm` among the ranks of `member.store` and allocates the symmetric heap. Throws as `nvshmem.shm.open` and
 * `allocate` do: `EP_RENDEZVOUS`, `EP_MISMATCH`, `EP_MEMORY_LIMIT`, `EP_TIMEOUT`.
 */
export async function shmemInit(member: Member, options: InitOptions): Promise<Shmem> {
  const { heapBytes, signal, ...config } = checkHeapOptions(options);
  const transport = await nvshmem.shm.open(member, { signal: signal ?? new AbortController().signal, config });
  try {
    checkFull(transport);
    const memory = await transport.allocate({ byteLength: heapBytes, signalSlots: 0, ...(signal && { signal }) });
    return createLibrary(transport, memory, true);
  } catch (error) {
    await transport.close();
    throw error;
  }
}
