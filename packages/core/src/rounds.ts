/** Short exchanges among a group's ranks on several hosts, each in one call that may hold its thread for a moment. */
import type { Closeable } from './scope.js';
import type { AllocateOptions, Rank, SymmetricMemory } from './transport.js';

export interface RoundsOptions {
  /** Of `RoundMaker.size`. */
  readonly memory: SymmetricMemory;
  /** Its number among those that the memory is for. */
  readonly group: number;
  /** 64 bits, the same on all members, and unlike those of every group that has had this number in this memory; rounds are counted from it. */
  readonly token: bigint;
  /** Of the transport, in group order: at most `mostMembers`. */
  readonly ranks: readonly Rank[];
  /** For each of them a number that those of its host have, and no other. */
  readonly hosts: readonly number[];
  /** What `part` said on the first rank of this host. */
  readonly leader: Uint8Array;
}

/**
 * The rounds of a group, on one rank. Rounds have numbers that grow; a rank begins one only when it has, from here or from elsewhere, what all said in the one before the last: places
 * are used again.
 */
export interface Rounds extends Closeable {
  /**
   * Says `said`, of at most `mostBytes`, in this round, and holds the thread for at most `mostMs` milliseconds (0 to 10) until all have. What each has said, in group order, in memory that the next
   * call uses again; undefined where some have not, or their words are on the way. What one rank gets all others get, too, unless ranks die or their processes stand still.
   * Throws `EP_INVALID_ARGUMENT`, or `EP_CLOSED` after `close()`.
   */
  enter(round: number, said: Uint8Array, mostMs: number): readonly Uint8Array[] | undefined;
  /** The same of a round that this rank has entered, at once. */
  look(round: number): readonly Uint8Array[] | undefined;
}

/** Makes rounds over memory of a transport. Nothing of it is collective. */
export interface RoundMaker {
  readonly mostMembers: number;
  /** That a rank says in a round. */
  readonly mostBytes: number;
  /** Of a memory for the rounds of so many groups: all ranks allocate it, on the host. */
  size(groups: number): Pick<AllocateOptions, 'byteLength' | 'signalSlots'>;
  /** Where ranks of this host find this rank's part. */
  part(memory: SymmetricMemory): Uint8Array;
  /** Throws `EP_INVALID_ARGUMENT`, and what mapping the leader's part throws where this rank does not share its host's memory. */
  open(options: RoundsOptions): Rounds;
}
