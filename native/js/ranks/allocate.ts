/** Collective allocation of symmetric memory. What one rank finds wrong, all ranks hear of, and nobody keeps anything. */
import {
  type AllocateOptions,
  type Capabilities,
  checkInteger,
  EpError,
  invalid,
  type PartAddresses,
  type Rank,
  type WaitOptions,
} from '@ep/core';
import type { NativeRankContext, NativeSymmetricMemory } from '../binding.js';
import { native } from '../native.js';
import { reportStep } from './gather.js';
import type { Liveness } from './liveness.js';
import { RankMemory } from './memory.js';
import { agreeOnSize, type Size } from './memory-limits.js';
import { checkLimits } from './outcome.js';
import type { Gathering } from './team.js';

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
  /** A NIC pins every rank's part. */
  readonly pins: boolean;
  /** Bytes of a description of a memory with so many signal slots. */
  readonly byteLength: (signalSlots: number) => number;
  /** What peers must know of this rank's part. May prepare it. */
  readonly describe: (memory: NativeSymmetricMemory) => Uint8Array;
  /** Given what all ranks said, by rank; empty for ranks that are not here. */
  readonly connect: (memory: NativeSymmetricMemory, descriptions: readonly Uint8Array[]) => void;
  /** What connect() failed to do, for the ranks where it went well. */
  readonly failure: string;
  /** Where this rank's part lies, if other transports may register it. */
  readonly addresses?: (memory: NativeSymmetricMemory) => PartAddresses;
  /** This rank's part goes away. */
  readonly release: (memory: NativeSymmetricMemory) => void;
}

/** The transport that is asked for memory. */
interface Asked {
  readonly name: string;
  readonly worldSize: number;
  readonly capabilities: Capabilities;
}

/**
 * What a transport of host memory was asked for, refused on this rank before others hear of it: `EP_INVALID_ARGUMENT` for what is no size, `EP_UNSUPPORTED`
 * for memory of a GPU (`instead` says what has it) or of another transport.
 */
export function checkHostAllocation(
  options: AllocateOptions,
  { name, worldSize, capabilities }: Asked,
  instead = '',
): Size {
  const where = 'allocate';
  if (typeof options !== 'object' || options === null) {
    throw invalid('options', { where, expected: 'an object with byteLength and signalSlots', found: options });
  }
  checkLimits(options, where, worldSize);
  const byteLength = checkInteger(options.byteLength, 'byteLength', where);
  const signalSlots = checkInteger(options.signalSlots, 'signalSlots', where, 0, capabilities.maxSignalSlots);
  if (options.space === 'device')
    throw new EpError('EP_UNSUPPORTED', `allocate: ${name} has host memory only${instead}`);
  if (options.over !== undefined) {
    throw new EpError('EP_UNSUPPORTED', `allocate: ${name} cannot register memory of another transport`);
  }
  return { byteLength, signalSlots };
}

/** Collective over the world. */
export async function allocateMemory(allocator: Allocator, size: Size, options: WaitOptions): Promise<RankMemory> {
  const { binding } = native();
  const { worldSize, context, world, reach } = allocator;
  await agreeOnSize(world, size, { pins: reach.pins, ranksOnHost: allocator.ranksOnHost }, options);
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
      reach.connect(memory!, byRank(world, worldSize, blobs));
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
  return rankMemoryOf(allocator, size, memory!);
}

export function rankMemoryOf(allocator: Allocator, size: Size, memory: NativeSymmetricMemory): RankMemory {
  const { rank, worldSize, context, timeoutMs, liveness, reach, onRelease } = allocator;
  return new RankMemory({
    rank,
    worldSize,
    context,
    liveness,
    memory,
    ...size,
    timeoutMs,
    ...(reach.addresses === undefined ? {} : { addresses: reach.addresses(memory) }),
    onRelease: (native) => {
      reach.release(native);
      onRelease();
    },
  });
}

/** By rank, what the members of a team said; empty for ranks that are not here. */
export function byRank(
  world: Gathering,
  worldSize: number,
  blobs: readonly Uint8Array<ArrayBuffer>[],
): Uint8Array<ArrayBuffer>[] {
  const all: Uint8Array<ArrayBuffer>[] = Array.from({ length: worldSize }, () => new Uint8Array(0));
  for (const [position, blob] of blobs.entries()) all[world.ranks[position]!] = blob;
  return all;
}
