/** The OpenSHMEM-like library: what a program calls first and last, and everything in between on one object. */
import { checkInteger, type Member, Resource, type WaitOptions } from '@ep/core';
import type { ShmConfig } from '../config.js';
import type { ShmMemory } from '../memory.js';
import { nvshmem } from '../provider.js';
import type { ShmTransport } from '../transport.js';
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

export interface InitOptions extends HeapOptions, ShmConfig {
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

function createLibrary(transport: ShmTransport, memory: ShmMemory, ownsTransport: boolean): Shmem {
  const space: Space = {
    memory,
    native: memory.nativeMemory('shmem'),
    rank: transport.rank,
    worldSize: transport.worldSize,
    liveness: memory.liveness,
    timeoutMs: transport.timeoutMs,
    // Native code refuses a PE that is not in the world.
    pe: (pe) => pe,
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

/** Collective over the transport's world: the library over a transport that stays the caller's. */
export async function shmemOn(transport: ShmTransport, options: HeapOptions & WaitOptions): Promise<Shmem> {
  const { heapBytes, ...limits } = options;
  checkInteger(heapBytes, 'heapBytes', 'shmem init');
  const memory = await transport.allocate({ ...limits, byteLength: heapBytes, signalSlots: 0 });
  return createLibrary(transport, memory, false);
}

/**
 * Collective: opens `nvshmem.shm` among the ranks of `member.store` and allocates the symmetric heap. Throws as `nvshmem.shm.open` and
 * `allocate` do: `EP_RENDEZVOUS`, `EP_MISMATCH`, `EP_MEMORY_LIMIT`, `EP_TIMEOUT`.
 */
export async function shmemInit(member: Member, options: InitOptions): Promise<Shmem> {
  const { heapBytes, signal, ...config } = options;
  checkInteger(heapBytes, 'heapBytes', 'shmem init');
  const transport = await nvshmem.shm.open(member, { signal: signal ?? new AbortController().signal, config });
  try {
    const memory = await transport.allocate({ byteLength: heapBytes, signalSlots: 0, ...(signal && { signal }) });
    return createLibrary(transport, memory, true);
  } catch (error) {
    await transport.close();
    throw error;
  }
}
