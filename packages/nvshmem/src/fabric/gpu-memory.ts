/** Symmetric memory whose bytes lie in a GPU, as the provider has registered them, and whose signal words lie on the host. JS puts and gets; kernels of the host and of the GPU post nothing to it. */
import { type DType, EpError, isEpError, type Region, type Storage, type WaitOptions } from '@ep/core';
import { type NativeFabricNic, type NativeSymmetricMemory, native } from '@ep/native';
import { type Allocator, agreeOnSize, byRank, RankMemory, type RankMemoryInit, reportStep } from '@ep/native/ranks';

const EOPNOTSUPP = 95;

/** What the addon could not do for want of hardware or of a provider: `EP_UNSUPPORTED`, with what to do instead. */
export function gpuError(where: string, error: unknown): unknown {
  if (!isEpError(error) || Number(error.context.errno) !== EOPNOTSUPP) return error;
  const instead = 'allocate memory of the host and copy through it, or choose another `provider`';
  return new EpError('EP_UNSUPPORTED', `${where}: ${error.message}: ${instead}`, { cause: error });
}

export class GpuRankMemory extends RankMemory {
  override readonly space = 'device' as const;
  readonly #nic: NativeFabricNic;
  readonly #bytes: number;

  constructor(init: RankMemoryInit, nic: NativeFabricNic, bytes: number) {
    super(init);
    this.#nic = nic;
    this.#bytes = bytes;
  }

  /** Of this rank's first byte, for its GPU. */
  get address(): bigint {
    this.checkOpen('address');
    return this.#nic.gpuAddress(this.#bytes);
  }

  override localOperand(operation: string): number {
    this.checkOpen(operation);
    return this.#bytes;
  }

  override view<D extends DType>(): Storage[D] {
    throw new EpError('EP_UNSUPPORTED', 'view: JS cannot look into memory of a GPU; read() copies out of it');
  }

  override peerView<D extends DType>(): Storage[D] {
    return this.view<D>();
  }

  /** Holds the thread until the copy has ended. */
  override async read(from: Region, into: Uint8Array): Promise<void> {
    this.checkOpen('read');
    this.checkOwn('read', from, into);
    this.#nic.gpuRead(this.#bytes, from.byteOffset, into);
  }

  override async write(from: Uint8Array, into: Region): Promise<void> {
    this.checkOpen('write');
    this.checkOwn('write', into, from);
    this.#nic.gpuWrite(this.#bytes, into.byteOffset, from);
  }
}

export interface GpuAllocator extends Omit<Allocator, 'reach'> {
  readonly nic: NativeFabricNic;
}

/** Collective over the world. Rejects with `EP_UNSUPPORTED` on a rank that cannot, and with `EP_MEMORY_LIMIT`, which names it, on the others. */
export async function allocateGpuMemory(
  allocator: GpuAllocator,
  size: { readonly byteLength: number; readonly signalSlots: number },
  options: WaitOptions,
): Promise<GpuRankMemory> {
  const { rank, worldSize, context, world, nic, liveness, timeoutMs, onRelease } = allocator;
  await agreeOnSize(world, size, { pins: false, makes: false }, options);
  let made: { readonly memory: NativeSymmetricMemory; readonly bytes: number } | undefined;
  let range: number | undefined; // held from before the signal words are, which may be too many
  let failure: unknown;
  // HAZARD: longer than what ranks say of memory on the host: who asks for that meanwhile is told that the calls differ.
  const description = new Uint8Array(worldSize + 8 + nic.partBytes());
  const give = ({ memory, bytes }: NonNullable<typeof made>): void => {
    nic.removeMemory(memory);
    nic.disown(bytes);
  };
  try {
    const bytes = nic.gpuMemory(size.byteLength);
    range = bytes;
    const memory = new (native().binding.SymmetricMemory)(context, 0, size.signalSlots);
    made = { memory, bytes };
    description[0] = 1;
    description.set(nic.addMemory(memory, bytes), worldSize + 8);
  } catch (error) {
    failure = gpuError('allocate', error);
    description.fill(0);
    if (made === undefined && range !== undefined) nic.disown(range);
  }
  try {
    const step = (what: string) => ({ where: 'allocate', what, code: 'EP_MEMORY_LIMIT' }) as const;
    const first = step(`allocate ${size.byteLength} bytes of its GPU`);
    const blobs = await reportStep(world, first, description, failure, options);
    try {
      const parts = blobs.map((blob) => blob.slice(worldSize + 8));
      nic.route(made!.memory, byRank(world, worldSize, parts));
    } catch (error) {
      failure = error;
    }
    const second = step('route to the parts of the others');
    await reportStep(world, second, Uint8Array.of(failure === undefined ? 1 : 0), failure, options);
  } catch (error) {
    if (made !== undefined) {
      give(made);
      made.memory.release();
    }
    throw error;
  }
  const { memory, bytes } = made!;
  const init = { rank, worldSize, context, liveness, memory, ...size, timeoutMs };
  const release = (): void => {
    give({ memory, bytes });
    onRelease();
  };
  return new GpuRankMemory({ ...init, onRelease: release }, nic, bytes);
}
