/** Collective allocation of symmetric memory. What one rank finds wrong, all ranks hear of, and nobody keeps anything. */
import { EpError, formatRanks, type PartAddresses, type Rank, type WaitOptions } from '@ep/core';
import type { NativeRankContext, NativeSymmetricMemory } from '../binding.js';
import { native } from '../native.js';
import { reportStep } from './gather.js';
import type { Liveness } from './liveness.js';
import { RankMemory } from './memory.js';
import { checkAgreement, type RankTeam } from './team.js';

export interface Allocator {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly world: RankTeam;
  readonly timeoutMs: number;
  readonly reach: Reach;
  readonly onRelease: () => void;
}

/** How peers come to reach each other's parts. */
export interface Reach {
  /** Bytes of a description of a memory with so many signal slots. */
  readonly byteLength: (signalSlots: number) => number;
  /** What peers must know of this rank's part. May prepare it. */
  readonly describe: (memory: NativeSymmetricMemory) => Uint8Array;
  /** Given what all ranks said, by rank. */
  readonly connect: (memory: NativeSymmetricMemory, descriptions: readonly Uint8Array[]) => void;
  /** What connect() failed to do, for the ranks where it went well. */
  readonly failure: string;
  /** Where this rank's part lies, if other transports may register it. */
  readonly addresses?: (memory: NativeSymmetricMemory) => PartAddresses;
  /** This rank's part goes away. */
  readonly release: (memory: NativeSymmetricMemory) => void;
}

interface Size {
  readonly byteLength: number;
  readonly signalSlots: number;
}

/**
 * Before anybody allocates: do the sizes agree, and do all parts together fit what every rank may still use? Each rank alone would see memory that the
 * others are about to take.
 */
async function agree({ world, worldSize }: Allocator, size: Size, options: WaitOptions): Promise<void> {
  const { allocatable, allocatableSource } = native().binding.hostFacts();
  const asked = new Float64Array([size.byteLength, size.signalSlots, allocatable ?? Number.POSITIVE_INFINITY]);
  const source = new TextEncoder().encode(allocatableSource).subarray(0, 64);
  const blob = new Uint8Array(asked.byteLength + 64);
  blob.set(new Uint8Array(asked.buffer));
  blob.set(source, asked.byteLength);
  const blobs = await world.allGather(blob, options);
  const numbers = blobs.map((bytes) => new Float64Array(bytes.buffer, 0, 3));
  checkAgreement('allocate', world, blobs, (bytes) => {
    const [length, slots] = new Float64Array(bytes.buffer, 0, 2);
    return `${length} bytes and ${slots} signal slots`;
  });
  const total = worldSize * (size.byteLength + 8 * size.signalSlots);
  const tightest = numbers.reduce((least, { 2: left }, rank) => (left! < numbers[least]![2]! ? rank : least), 0);
  const left = numbers[tightest]![2]!;
  if (total <= left) return;
  const why = new TextDecoder().decode(blobs[tightest]!.subarray(asked.byteLength)).replace(/\0+$/, '');
  throw new EpError(
    'EP_MEMORY_LIMIT',
    `allocate: ${worldSize} ranks with ${size.byteLength} bytes and ${size.signalSlots} signal slots each do not fit: ${why} leaves ${left} bytes on ${formatRanks([tightest])}`,
    { context: { ...size, worldSize, limit: why, left, ranks: [tightest] } },
  );
}

/** Collective over the world. */
export async function allocateMemory(allocator: Allocator, size: Size, options: WaitOptions): Promise<RankMemory> {
  const { binding } = native();
  const { rank, worldSize, context, world, timeoutMs, liveness, reach, onRelease } = allocator;
  await agree(allocator, size, options);
  // From here on a rank that fails still takes part: the others must hear of it instead of waiting for it.
  let memory: NativeSymmetricMemory | undefined;
  let description = new Uint8Array(reach.byteLength(size.signalSlots));
  let failure: unknown;
  try {
    memory = new binding.SymmetricMemory(context, size.byteLength, size.signalSlots);
    description = Uint8Array.from(reach.describe(memory));
  } catch (error) {
    failure = error;
  }
  try {
    const step = (what: string) => ({ where: 'allocate', what, code: 'EP_MEMORY_LIMIT' }) as const;
    const first = step(`allocate ${size.byteLength} bytes`);
    const blobs = await reportStep(world, first, description, failure, options);
    try {
      reach.connect(memory!, blobs);
    } catch (error) {
      failure = error;
    }
    // Also the barrier before which nobody may close its part: all have mapped it now.
    await reportStep(world, step(reach.failure), Uint8Array.of(failure === undefined ? 1 : 0), failure, options);
  } catch (error) {
    if (memory !== undefined) {
      reach.release(memory);
      memory.release();
    }
    throw error;
  }
  return new RankMemory({
    rank,
    worldSize,
    context,
    liveness,
    memory: memory!,
    ...size,
    timeoutMs,
    ...(reach.addresses === undefined ? {} : { addresses: reach.addresses(memory!) }),
    onRelease: (native) => {
      reach.release(native);
      onRelease();
    },
  });
}
