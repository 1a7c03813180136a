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
import { checkNear, formatNear, type NothingOver, type Over, refuseOver } from './over.js';
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

/** Where other processes come in the place of dead ranks. */
export interface RenewableReach extends Reach {
  /** What `describe` has told of this rank's part. */
  readonly described: (memory: NativeSymmetricMemory) => Uint8Array;
  /** A peer's part is another one from now on. */
  readonly replace: (memory: NativeSymmetricMemory, peer: Rank, description: Uint8Array) => void;
}

/** The same where every rank's part has another description after each time that ranks came: queue pairs and keys are made anew on all ranks. */
export interface ReconnectedReach extends RenewableReach {
  /** As `connect`, of memory that was connected before. */
  readonly reconnect: (memory: NativeSymmetricMemory, descriptions: readonly Uint8Array[]) => void;
}

export const isReconnected = (reach: RenewableReach): reach is ReconnectedReach => 'reconnect' in reach;

/** The transport that is asked for memory. */
interface Asked {
  readonly name: string;
  readonly worldSize: number;
  readonly capabilities: Capabilities;
}

export interface HostAllocationRules {
  /** What has memory of a GPU instead. */
  readonly instead?: string;
  /** Why it registers no memory of other transports; undefined: it does (`checkOver`). */
  readonly refusesOver?: string | undefined;
}

/**
 * What a transport of host memory was asked for, refused on this rank before others hear of it: `EP_INVALID_ARGUMENT` for what is no size, `EP_UNSUPPORTED`
 * for memory of a GPU or, by those that cannot register it, of another transport.
 */
export function checkHostAllocation(
  options: AllocateOptions,
  { name, worldSize, capabilities }: Asked,
  { instead = '', refusesOver }: HostAllocationRules,
): Size {
  const where = 'allocate';
  if (typeof options !== 'object' || options === null) {
    throw invalid('options', { where, expected: 'an object with byteLength and signalSlots', found: options });
  }
  checkLimits(options, where, worldSize);
  const byteLength = checkInteger(options.byteLength, 'byteLength', where);
  const signalSlots = checkInteger(options.signalSlots, 'signalSlots', where, 0, capabilities.maxSignalSlots);
  const { space }: { readonly space?: unknown } = options;
  if (space !== undefined && space !== 'host' && space !== 'device') {
    throw invalid('space', { where, expected: 'host or device', found: space });
  }
  if (space === 'device') throw new EpError('EP_UNSUPPORTED', `allocate: ${name} has host memory only${instead}`);
  refuseOver(options, name, refusesOver);
  return { byteLength, signalSlots };
}

/** Collective over the world. With `over` the part is that memory's; ranks may differ in that. */
export async function allocateMemory(
  allocator: Allocator,
  size: Size,
  options: WaitOptions,
  over?: Over | NothingOver,
): Promise<RankMemory> {
  const { binding } = native();
  const { worldSize, context, world, reach, ranksOnHost } = allocator;
  await agreeOnSize(world, size, { pins: reach.pins, ranksOnHost, makes: over === undefined }, options);
  // From here on a rank that fails still takes part: the others must hear of it instead of waiting for it.
  let memory: NativeSymmetricMemory | undefined;
  const description = new Uint8Array(worldSize + reach.byteLength(size.signalSlots));
  let failure: unknown;
  try {
    if (over === undefined) {
      memory = new binding.SymmetricMemory(context, size.byteLength, size.signalSlots);
    } else if ('failure' in over) {
      throw over.failure;
    } else {
      memory = new binding.SymmetricMemory(over.memory, Int32Array.from(over.near));
      // Waits on it are that transport's, which hears nothing of ranks of other hosts.
      context.inform(over.context);
      description.set(formatNear(over.near, worldSize));
    }
    description.set(reach.describe(memory), worldSize);
  } catch (error) {
    failure = error;
    description.fill(0);
  }
  try {
    const step = (what: string) => ({ where: 'allocate', what, code: 'EP_MEMORY_LIMIT' }) as const;
    const first = step(`${over === undefined ? 'allocate' : 'register'} ${size.byteLength} bytes`);
    const blobs = await reportStep(world, first, description, failure, options);
    checkNear(world, blobs);
    try {
      const parts = blobs.map((blob) => blob.slice(worldSize));
      reach.connect(memory!, byRank(world, worldSize, parts));
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
  return rankMemoryOf(allocator, size, memory!, over !== undefined);
}

export function rankMemoryOf(
  allocator: Allocator,
  size: Size,
  memory: NativeSymmetricMemory,
  isOver = false,
): RankMemory {
  const { rank, worldSize, context, timeoutMs, liveness, reach, onRelease } = allocator;
  return new RankMemory({
    rank,
    worldSize,
    context,
    liveness,
    memory,
    ...size,
    timeoutMs,
    isOver,
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
