/** Parts that another transport of this rank allocated, for a NIC to register, too. */
import { type AllocateOptions, checkInteger, EpError, invalid, type Rank } from '@ep/core';
import type { NativeRankContext, NativeSymmetricMemory } from '../binding.js';
import { RankMemory } from './memory.js';
import type { Size } from './memory-limits.js';
import type { Gathering } from './team.js';

export interface Over {
  readonly memory: NativeSymmetricMemory;
  /** Of the transport that the memory is of. */
  readonly context: NativeRankContext;
  /** Ranks that kernels store to. */
  readonly near: readonly Rank[];
}

/** Instead, where this rank has come to no memory that could be registered: why. */
export interface NothingOver {
  readonly failure: unknown;
}

/** The transport that is to register it. */
interface Registrar {
  readonly name: string;
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
}

/** `EP_INVALID_ARGUMENT` for near ranks without a memory, or a failure beside one; `EP_UNSUPPORTED` for a memory, if `why` says why the transport cannot. */
export function refuseOver({ over, overFailure, near }: AllocateOptions, name: string, why: string | undefined): void {
  if (over === undefined && near !== undefined) {
    throw invalid('near', { where: 'allocate', expected: 'absent without over', found: near });
  }
  if (over !== undefined && overFailure !== undefined) {
    throw invalid('overFailure', { where: 'allocate', expected: 'absent beside over', found: overFailure });
  }
  if ((over === undefined && overFailure === undefined) || why === undefined) return;
  throw new EpError('EP_UNSUPPORTED', `allocate: ${name} cannot register memory of another transport: ${why}`);
}

/**
 * What `allocate` is to register, if anything, refused on this rank before others hear of it: `EP_UNSUPPORTED` for memory of another kind, `EP_CLOSED`, and `EP_INVALID_ARGUMENT` for
 * one of another world or size, for this transport's own, and for near ranks that it does not map.
 */
export function checkOver({ over, near }: AllocateOptions, size: Size, registrar: Registrar): Over | undefined {
  const where = 'allocate';
  const { name, rank, worldSize, context } = registrar;
  if (over === undefined) return undefined;
  if (typeof over !== 'object' || over === null) {
    throw invalid('over', { where, expected: 'a memory of another transport', found: over });
  }
  if (!(over instanceof RankMemory) || over.space !== 'host') {
    const kind = `${over.space} memory (${over.constructor.name})`;
    throw new EpError(
      'EP_UNSUPPORTED',
      `allocate: ${name} registers memory of ranks that share a host, and no ${kind}`,
    );
  }
  if (over.context === context) {
    throw invalid('over', { where, expected: 'a memory of another transport', found: `one of ${name} itself` });
  }
  if (over.rank !== rank || over.worldSize !== worldSize) {
    const found = `memory of rank ${over.rank} of ${over.worldSize}`;
    throw invalid('over', { where, expected: `memory of rank ${rank} of ${worldSize}, as ${name}`, found });
  }
  const memory = over.nativeMemory(where);
  const { byteLength, signals } = over;
  if (byteLength !== size.byteLength || signals.slots !== size.signalSlots) {
    const found = `${byteLength} bytes and ${signals.slots} signal slots`;
    const expected = `a memory of ${size.byteLength} bytes and ${size.signalSlots} signal slots`;
    throw invalid('over', { where, expected, found });
  }
  if (near !== undefined && !Array.isArray(near))
    throw invalid('near', { where, expected: 'a list of ranks', found: near });
  for (const peer of near ?? []) {
    checkInteger(peer, 'near', where, 0, worldSize - 1);
    // Throws where that peer's part is not mapped.
    memory.address(peer);
  }
  return { memory, context: over.context, near: near ?? [] };
}

/** The same of `allocate`, where this rank may have come to no such memory. */
export function overOrFailure(
  options: AllocateOptions,
  size: Size,
  registrar: Registrar,
): Over | NothingOver | undefined {
  const { overFailure } = options;
  return overFailure === undefined ? checkOver(options, size, registrar) : { failure: overFailure };
}

/** A byte for each rank: 1 where this rank stores to it. */
export function formatNear(near: readonly Rank[], worldSize: number): Uint8Array<ArrayBuffer> {
  const flags = new Uint8Array(worldSize);
  for (const peer of near) flags[peer] = 1;
  return flags;
}

/** Throws `EP_MISMATCH`, on all ranks, naming a pair of which one rank stores to the other and is not stored to. */
export function checkNear(world: Gathering, flags: readonly Uint8Array[]): void {
  for (const [i, one] of world.ranks.entries()) {
    for (const [j, other] of world.ranks.entries()) {
      if (flags[i]![other] === flags[j]![one]) continue;
      const [storing, reaching] = flags[i]![other] === 1 ? [one, other] : [other, one];
      throw new EpError(
        'EP_MISMATCH',
        `allocate: rank ${storing} stores to rank ${reaching}, which reaches it in another way: both ends choose alike`,
        { context: { odd: [storing, reaching] } },
      );
    }
  }
}
