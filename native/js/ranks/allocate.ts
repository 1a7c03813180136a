/** Collective allocation of symmetric memory. What one rank finds wrong, all ranks hear of, and nobody keeps anything. */
import { EpError, formatRanks, type PartAddresses, type Rank, type WaitOptions } from '@ep/core';
import type { NativeRankContext, NativeSymmetricMemory } from '../binding.js';
import { native } from '../native.js';
import type { Liveness } from './liveness.js';
import { RankMemory } from './memory.js';
import { checkAgreement, GATHER_BYTES, type Gathering } from './team.js';

export interface Allocator {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly world: Gathering;
  /** Ranks that share the memory of this host; all unless given. */
  readonly ranksOnHost?: number;
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

/** Positions of the members that reported nothing but zeros: each step reports its failure so. */
const failedRanks = (world: Gathering, blobs: readonly Uint8Array[]): Rank[] =>
  blobs.flatMap((blob, position) => (blob.every((byte) => byte === 0) ? [world.ranks[position]!] : []));

/**
 * Before anybody allocates: do the sizes agree, and do all parts together fit what every rank may still use? Each rank alone would see memory that the
 * others are about to take.
 */
async function agree(
  { world, worldSize, ranksOnHost = worldSize }: Allocator,
  size: Size,
  options: WaitOptions,
): Promise<void> {
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
  const total = ranksOnHost * (size.byteLength + 8 * size.signalSlots);
  const tightest = numbers.reduce((least, { 2: left }, rank) => (left! < numbers[least]![2]! ? rank : least), 0);
  const left = numbers[tightest]![2]!;
  if (total <= left) return;
  const why = new TextDecoder().decode(blobs[tightest]!.subarray(asked.byteLength)).replace(/\0+$/, '');
  throw new EpError(
    'EP_MEMORY_LIMIT',
    `allocate: ${ranksOnHost} ranks with ${size.byteLength} bytes and ${size.signalSlots} signal slots each do not fit: ${why} leaves ${left} bytes on ${formatRanks([tightest])}`,
    { context: { ...size, worldSize, limit: why, left, ranks: [tightest] } },
  );
}

/** Every member's bytes, as many as a description has. */
async function gather(world: Gathering, blob: Uint8Array, options: WaitOptions): Promise<Uint8Array<ArrayBuffer>[]> {
  const parts: Uint8Array<ArrayBuffer>[][] = [];
  for (let at = 0; at === 0 || at < blob.byteLength; at += GATHER_BYTES) {
    parts.push(await world.allGather(blob.subarray(at, at + GATHER_BYTES), options));
  }
  if (parts.length === 1) return parts[0]!;
  return Array.from(world.ranks, (_, position) => {
    const whole = new Uint8Array(blob.byteLength);
    for (const [i, part] of parts.entries()) whole.set(part[position]!, i * GATHER_BYTES);
    return whole;
  });
}

/** Reports how a step of this rank went; throws this rank's failure, or one that names the ranks where it failed. */
async function report(world: Gathering, what: string, blob: Uint8Array, failure: unknown, options: WaitOptions) {
  const blobs = await gather(world, blob, options);
  if (failure !== undefined) throw failure;
  const ranks = failedRanks(world, blobs);
  if (ranks.length === 0) return blobs;
  throw new EpError('EP_MEMORY_LIMIT', `allocate: ${formatRanks(ranks)} could not ${what}`, { context: { ranks } });
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
    const what = `allocate ${size.byteLength} bytes`;
    const blobs = await report(world, what, description, failure, options);
    try {
      reach.connect(memory!, blobs);
    } catch (error) {
      failure = error;
    }
    // Also the barrier before which nobody may close its part: all have mapped it now.
    await report(world, reach.failure, Uint8Array.of(failure === undefined ? 1 : 0), failure, options);
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
