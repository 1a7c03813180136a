/** Symmetric memory of a GPU: every rank's part, allocated together. Kernels reach all parts; JS reads and writes its own. */
import {
  checkAttached,
  checkInteger,
  type DType,
  EpError,
  formatRanks,
  invalid,
  type Rank,
  type Region,
  type RemoteRegion,
  Resource,
  type SignalPad,
  type SlotId,
  type Storage,
  type SymmetricMemory,
  type WaitOptions,
} from '@ep/core';
import { EP_LIFE_CLOSED, gpuMemoryHandleLayout } from '../abi.gen.js';
import type { NativeRankContext } from '../binding.js';
import type { NativeGpuLibrary, NativeGpuOperand, NativeGpuSymmetricMemory } from '../gpu.js';
import type { GpuCopier } from '../gpu-copier.js';
import { native } from '../native.js';
import { AdoptedDeviceMemory } from './adopted-device.js';
import type { Liveness } from './liveness.js';
import { comparisonCode } from './memory.js';
import { checkLimits, withClosing } from './outcome.js';
import { checkAgreement, type Gathering } from './team.js';

const HANDLE_BYTES = gpuMemoryHandleLayout.byteLength;

export interface DeviceAllocator {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly world: Gathering;
  readonly timeoutMs: number;
  readonly library: NativeGpuLibrary;
  /** Ordinal of the GPU of this rank. */
  readonly device: number;
  readonly copier: GpuCopier;
  /** By a NIC; peers map the parts unless given. */
  readonly reach?: DeviceReach;
  readonly onRelease: () => void;
}

/** How a NIC makes and reaches the parts of device memory. */
export interface DeviceReach {
  /** Bytes of a description. */
  readonly byteLength: number;
  /** This rank's part. */
  readonly make: (byteLength: number, signalSlots: number) => NativeGpuSymmetricMemory;
  /** What peers must know of it besides its handle. */
  readonly describe: (memory: NativeGpuSymmetricMemory) => Uint8Array;
  /** Given what all ranks said, by rank. */
  readonly connect: (
    memory: NativeGpuSymmetricMemory,
    handles: Uint8Array,
    descriptions: readonly Uint8Array[],
  ) => void;
  /** It goes away. */
  readonly release: (memory: NativeGpuSymmetricMemory) => void;
}

/** Between looks of `until` at a word of the device, in milliseconds. */
const LOOK_MS = 1;

const HOLDS: readonly ((found: bigint, value: bigint) => boolean)[] = [
  (found, value) => found === value,
  (found, value) => found !== value,
  (found, value) => found < value,
  (found, value) => found <= value,
  (found, value) => found > value,
  (found, value) => found >= value,
];

class DeviceSignalPad implements SignalPad {
  readonly slots: number;
  readonly #memory: NativeGpuSymmetricMemory;
  readonly #init: DeviceAllocator;
  readonly #closing: () => AbortSignal;

  constructor(slots: number, memory: NativeGpuSymmetricMemory, init: DeviceAllocator, closing: () => AbortSignal) {
    this.slots = slots;
    this.#memory = memory;
    this.#init = init;
    this.#closing = closing;
  }

  /** Waits for a copy of some microseconds: for set-up and repair, not for every step. */
  peek(slot: SlotId): bigint {
    checkInteger(slot, 'slot', 'peek', 0, this.slots - 1);
    return this.#memory.peek(slot);
  }

  /** Looks every millisecond: what waits for signals of a device at its speed is a kernel. */
  async until(
    slot: SlotId,
    test: { readonly cmp: 'eq' | 'ne' | 'lt' | 'le' | 'gt' | 'ge'; readonly value: bigint },
    options?: WaitOptions,
  ): Promise<bigint> {
    const { worldSize, timeoutMs: fallback, rank, liveness } = this.#init;
    if (options !== undefined) checkLimits(options, 'until', worldSize);
    options?.signal?.throwIfAborted();
    if (typeof test?.value !== 'bigint') {
      throw invalid('test', { where: 'until', expected: '{cmp, value} with a bigint value', found: test });
    }
    const holds = HOLDS[comparisonCode(test.cmp)]!;
    this.peek(slot); // refuses what is no slot, and what was closed
    const timeoutMs = options?.timeoutMs ?? fallback;
    const deadline = performance.now() + timeoutMs;
    const where = `signal slot ${slot} of rank ${rank}`;
    const awaited = (options?.peers ?? [...Array(worldSize).keys()]).filter((peer) => peer !== rank);
    return withClosing(options, this.#closing(), async ({ signal }) => {
      for (;;) {
        signal?.throwIfAborted();
        const gone = this.#goneOf(awaited);
        // After the look at the peers: what one of them sent before it went is there by now.
        const found = this.peek(slot);
        if (holds(found, test.value)) return found;
        const progress = `awaited a value ${test.cmp} ${test.value}, found ${found}`;
        const context = { awaited, expected: test.value, found };
        if (gone.length > 0) {
          throw liveness.notice(
            new EpError('EP_PEER_LOST', `${where}: ${formatRanks(gone)} died or closed; ${progress}`, {
              context: { ...context, lost: gone },
            }),
          );
        }
        if (performance.now() >= deadline) {
          const who = awaited.length > 0 ? `; awaited ${formatRanks(awaited)}` : '';
          throw new EpError('EP_TIMEOUT', `${where}: timed out after ${timeoutMs} ms; ${progress}${who}`, {
            context: { ...context, timeoutMs },
          });
        }
        await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
      }
    });
  }

  /** Those that are dead; or all, once all have closed in order. */
  #goneOf(awaited: readonly Rank[]): readonly Rank[] {
    const { context, liveness } = this.#init;
    const lost = awaited.filter((peer) => liveness.isDead(peer));
    if (lost.length > 0) return lost;
    return awaited.every((peer) => context.life(peer) === EP_LIFE_CLOSED) ? awaited : [];
  }
}

export class DeviceMemory extends Resource implements SymmetricMemory {
  readonly byteLength: number;
  readonly space = 'device' as const;
  readonly signals: SignalPad;
  readonly #init: DeviceAllocator;
  readonly #memory: NativeGpuSymmetricMemory;

  constructor(init: DeviceAllocator, memory: NativeGpuSymmetricMemory, byteLength: number, signalSlots: number) {
    super('symmetric device memory');
    this.#init = init;
    this.#memory = memory;
    this.byteLength = byteLength;
    this.signals = new DeviceSignalPad(signalSlots, memory, init, () => this.closing);
  }

  /** Names the transport that this memory belongs to. */
  get context(): NativeRankContext {
    return this.#init.context;
  }

  get rank(): Rank {
    return this.#init.rank;
  }

  get library(): NativeGpuLibrary {
    return this.#init.library;
  }

  /** Ordinal of the GPU. */
  get device(): number {
    return this.#init.device;
  }

  get copier(): GpuCopier {
    return this.#init.copier;
  }

  /** The addon's object; throws `EP_CLOSED` after close(). */
  nativeMemory(operation: string): NativeGpuSymmetricMemory {
    this.checkOpen(operation);
    return this.#memory;
  }

  /** Where a rank's bytes lie for kernels of this GPU. */
  address(peer: Rank): bigint {
    checkInteger(peer, 'peer', 'address', 0, this.#init.worldSize - 1);
    return this.nativeMemory('address').address(peer);
  }

  local(byteOffset: number, byteLength: number): Region {
    this.checkOpen('local');
    this.#checkBytes('local region', byteOffset, byteLength);
    return Object.freeze({ memory: this, byteOffset, byteLength });
  }

  remote(peer: Rank, byteOffset: number, byteLength: number): RemoteRegion {
    this.checkOpen('remote');
    checkInteger(peer, 'peer', 'remote region', 0, this.#init.worldSize - 1);
    this.#checkBytes('remote region', byteOffset, byteLength);
    return Object.freeze({ memory: this, peer, byteOffset, byteLength });
  }

  view<D extends DType>(): Storage[D] {
    throw new EpError('EP_UNSUPPORTED', 'view: JS cannot look into device memory; read() copies out of it');
  }

  async read(from: Region, into: Uint8Array): Promise<void> {
    this.checkOpen('read');
    await this.#init.copier.read(this.#reached('read', from, into), from.byteOffset, into);
  }

  async write(from: Uint8Array, into: Region): Promise<void> {
    this.checkOpen('write');
    await this.#init.copier.write(from, this.#reached('write', into, from), into.byteOffset);
  }

  protected override release(): void {
    this.#init.onRelease();
    this.#init.reach?.release(this.#memory);
    this.#memory.release();
  }

  /** This rank's part, or adopted memory of its GPU. */
  #reached(where: string, region: Region, bytes: Uint8Array): NativeGpuOperand {
    const memory = region?.memory;
    const adopted = memory instanceof AdoptedDeviceMemory && memory.device === this.device ? memory : undefined;
    if (memory !== this && adopted === undefined) {
      throw new EpError('EP_INVALID_ARGUMENT', `${where}: the region belongs to another memory`);
    }
    if (adopted?.closed) throw new EpError('EP_CLOSED', `${where}: the adopted memory was closed`);
    if (!(bytes instanceof Uint8Array)) throw invalid('bytes', { where, expected: 'a Uint8Array', found: bytes });
    checkAttached(bytes, where);
    if (bytes.byteLength !== region.byteLength) {
      throw invalid('bytes', {
        where,
        expected: `${region.byteLength} bytes, as the region has`,
        found: bytes.byteLength,
      });
    }
    if (adopted === undefined) return this.#memory;
    // Once more: the driver, which is asked from here on, knows of whole allocations only.
    adopted.region(region.byteOffset, region.byteLength);
    return adopted.address;
  }

  #checkBytes(where: string, byteOffset: number, byteLength: number): void {
    checkInteger(byteOffset, 'byteOffset', where, 0, this.byteLength);
    checkInteger(byteLength, 'byteLength', where, 0, this.byteLength - byteOffset);
  }
}

/** Collective over the world. What one rank finds wrong, all ranks hear of, and nobody keeps anything. */
export async function allocateDeviceMemory(
  allocator: DeviceAllocator,
  size: { readonly byteLength: number; readonly signalSlots: number },
  options: WaitOptions,
): Promise<DeviceMemory> {
  const { binding } = native();
  const { world, context, library, device, reach } = allocator;
  const asked = new Float64Array([size.byteLength, size.signalSlots]);
  checkAgreement('allocate', world, await world.allGather(new Uint8Array(asked.buffer), options), (bytes) => {
    const [length, slots] = new Float64Array(bytes.slice().buffer);
    return `${length} bytes and ${slots} signal slots of device memory`;
  });
  // From here on a rank that fails still takes part: the others must hear of it instead of waiting for it.
  let memory: NativeGpuSymmetricMemory | undefined;
  const told = HANDLE_BYTES + (reach?.byteLength ?? 0);
  const attempt = async (what: string, act: () => readonly Uint8Array[]): Promise<readonly Uint8Array[]> => {
    let failure: { readonly reason: unknown } | undefined;
    let blob: Uint8Array<ArrayBuffer> = new Uint8Array(told);
    try {
      blob = new Uint8Array(Buffer.concat(act()));
    } catch (reason) {
      failure = { reason };
    }
    const blobs = await world.allGather(blob, options);
    if (failure !== undefined) throw failure.reason;
    const ranks = blobs.flatMap((bytes, rank) => (bytes.every((byte) => byte === 0) ? [rank] : []));
    if (ranks.length === 0) return blobs;
    throw new EpError('EP_MEMORY_LIMIT', `allocate: ${formatRanks(ranks)} could not ${what}`, { context: { ranks } });
  };
  try {
    const blobs = await attempt(`allocate ${size.byteLength} bytes of device memory`, () => {
      memory =
        reach?.make(size.byteLength, size.signalSlots) ??
        new binding.GpuSymmetricMemory(context, library, device, size.byteLength, size.signalSlots);
      return reach === undefined ? [memory.handle()] : [memory.handle(), reach.describe(memory)];
    });
    await attempt("reach the others' device memory", () => {
      const handles = Buffer.concat(blobs.map((blob) => blob.subarray(0, HANDLE_BYTES)));
      if (reach === undefined) memory!.connect(handles);
      else {
        const parts = blobs.map((blob) => blob.slice(HANDLE_BYTES));
        reach.connect(memory!, handles, parts);
      }
      return [new Uint8Array(told).fill(1)];
    });
  } catch (error) {
    if (memory !== undefined) {
      reach?.release(memory);
      memory.release();
    }
    throw error;
  }
  return new DeviceMemory(allocator, memory!, size.byteLength, size.signalSlots);
}
