/** Collective allocation of symmetric memory. What one rank finds wrong, all ranks hear of, and nobody keeps anything. */
import { EpError, formatRanks, type Rank, type WaitOptions } from '@ep/core';
import { type NativeRankContext, type NativeSymmetricMemory, native, segmentHandleLayout } from '@ep/native';
import type { ResolvedShmConfig } from './config.js';
import type { Liveness } from './liveness.js';
import { ShmMemory } from './memory.js';
import { checkAgreement, type ShmTeam } from './team.js';

export interface Allocator {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly world: ShmTeam;
  readonly config: ResolvedShmConfig;
  readonly onRelease: () => void;
}

interface Size {
  readonly byteLength: number;
  readonly signalSlots: number;
}

/** Positions of the members that reported nothing but zeros: each step reports its failure so. */
const failedRanks = (world: ShmTeam, blobs: readonly Uint8Array[]): Rank[] =>
  blobs.flatMap((blob, position) => (blob.every((byte) => byte === 0) ? [world.ranks[position]!] : []));

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

/** Reports how a step of this rank went; throws this rank's failure, or one that names the ranks where it failed. */
async function report(world: ShmTeam, what: string, blob: Uint8Array, failure: unknown, options: WaitOptions) {
  const blobs = await world.allGather(blob, options);
  if (failure !== undefined) throw failure;
  const ranks = failedRanks(world, blobs);
  if (ranks.length === 0) return blobs;
  throw new EpError('EP_MEMORY_LIMIT', `allocate: ${formatRanks(ranks)} could not ${what}`, { context: { ranks } });
}

/** Collective over the world. */
export async function allocateMemory(allocator: Allocator, size: Size, options: WaitOptions): Promise<ShmMemory> {
  const { binding } = native();
  const { rank, worldSize, context, world, config, liveness, onRelease } = allocator;
  const handleBytes = segmentHandleLayout.byteLength;
  await agree(allocator, size, options);
  // From here on a rank that fails still takes part: the others must hear of it instead of waiting for it.
  let memory: NativeSymmetricMemory | undefined;
  let failure: unknown;
  try {
    memory = new binding.SymmetricMemory(context, size.byteLength, size.signalSlots);
  } catch (error) {
    failure = error;
  }
  try {
    const what = `allocate ${size.byteLength} bytes`;
    const blobs = await report(world, what, memory?.handle() ?? new Uint8Array(handleBytes), failure, options);
    const handles = new Uint8Array(worldSize * handleBytes);
    for (const [peer, bytes] of blobs.entries()) handles.set(bytes, peer * handleBytes);
    try {
      memory!.connect(handles);
    } catch (error) {
      failure = error;
    }
    // Also the barrier before which nobody may close its part: all have mapped it now.
    await report(world, "map the others' parts", Uint8Array.of(failure === undefined ? 1 : 0), failure, options);
  } catch (error) {
    memory?.release();
    throw error;
  }
  return new ShmMemory({
    rank,
    worldSize,
    context,
    liveness,
    memory: memory!,
    ...size,
    timeoutMs: config.timeoutMs,
    onRelease,
  });
}
