/** Short exchanges among a group's ranks on several hosts, each in one call that may hold its thread for a moment. */
import type { DType, Storage } from './dtype.js';
import type { Closeable } from './scope.js';
import type { AllocateOptions, Rank, SymmetricMemory, WaitOptions } from './transport.js';

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
  /** In which order `exchange` folds: places in the group, those of each list one after the other, and then what the lists have come to. All in group order unless given. */
  readonly folds?: readonly (readonly number[])[];
}

/** Numbers of dtypes and reductions are the addon's. */
export interface RoundFold {
  readonly type: number;
  readonly reduction: number;
  readonly factor: number;
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
  /**
   * As `enter` of `head` and, behind it, the bytes of `given`; `alike` if all have said that head. With `fold`, whose reduction `CarrierMaker.carries`, what all gave is then folded into `output`, which is as long; a rank
   * that gave more or less is not alike. Otherwise nothing is folded.
   */
  exchange?(
    round: number,
    head: Uint8Array,
    given: ArrayBufferView | undefined,
    mostMs: number,
    fold?: RoundFold,
    output?: ArrayBufferView,
  ): 'late' | 'unlike' | 'alike';
  /** What each said in a round, in group order, in memory that the next round but one uses again; of others than the last two that came here, undefined. */
  kept?(round: number): readonly Uint8Array[] | undefined;
}

export interface CarrierOptions extends Pick<RoundsOptions, 'memory' | 'group' | 'ranks' | 'hosts'> {
  /** What `CarrierMaker.part` said of `memory` on each rank of this host, in group order. */
  readonly parts: readonly Uint8Array[];
}

/** A call that a carrier carries; numbers of dtypes and reductions are the addon's. */
export interface CarriedCall {
  /** Higher than that of every call before it, and the same on all. */
  readonly number: number;
  readonly kind:
    | 'all-reduce'
    | 'all-to-all'
    | 'all-gather'
    | 'broadcast'
    | 'reduce-scatter'
    | 'reduce'
    | 'gather'
    | 'scatter';
  readonly type: number;
  readonly reduction: number;
  readonly factor: number;
  /** Bytes of the longest array that any rank gives: the same on all. */
  readonly longest: number;
  /** Of a broadcast, a reduce, a gather and a scatter: its root in the group. */
  readonly root?: number;
}

/** What carries large calls of a group on several hosts, on one rank: one call after the other, the same ones on all. After one that has not come to its end it is of no use any more. */
export interface Carrier extends Closeable {
  /** Throws `EP_BUSY` where the call before has not come to its end, `EP_INVALID_ARGUMENT`, or `EP_CLOSED`. */
  begin(call: CarriedCall): void;
  /**
   * Goes on with the call, and holds the thread for at most `mostMs` milliseconds (0 to 10): `over` once all ranks have their data, and `stuck` where nothing has moved. The same arrays in every turn: one
   * each of an all-reduce, of `longest` bytes; of an all-to-all one for each rank, in group order, of at most as many; of an all-gather one to give and one of each rank, of a reduce-scatter one for each rank
   * and one to take, of a broadcast one; of a reduce, a gather and a scatter as of an all-reduce, an all-gather and a reduce-scatter, but none to take on others than the root, or of a scatter to give. Throws `EP_INVALID_ARGUMENT` where one has another length, or not the one that it had,
   * `EP_CLOSED`, and what the transport says where it takes nothing more; but not of a rank that is gone, which it tells otherwise.
   */
  carry(
    inputs: readonly Storage[DType][],
    outputs: readonly Storage[DType][],
    mostMs: number,
  ): 'over' | 'moved' | 'stuck';
  /**
   * Begins `call`, and says `head` of it in the round of its number, as `Rounds.exchange` does: of rounds of the same maker and group. What of the call needs no more than this rank's arrays is done while others have yet to
   * say theirs; once all have said the same it goes on as `carry`. Holds the thread for at most `roundMs` and then `mostMs` milliseconds. `alike`: all have, and it is not over yet.
   *
   * A call that not all make, or not all with these lengths, may be left for the next one, or lengthened, as long as nobody carries it. HAZARD: only once all have carried one, since all must carry whatever is not an all-to-all.
   * Throws as `begin` and `carry`.
   */
  join?(
    rounds: Rounds,
    head: Uint8Array,
    call: CarriedCall,
    inputs: readonly Storage[DType][],
    outputs: readonly Storage[DType][],
    roundMs: number,
    mostMs: number,
  ): 'late' | 'unlike' | 'alike' | 'over';
  /** Of an all-to-all that `join` has begun, before it is carried: what is the longest array of all, where some have longer ones than this rank. */
  lengthen?(longest: number): void;
  /** Bytes of this call that this rank has sent to other hosts. */
  readonly sent: number;
}

/** Makes carriers over memory of a transport. Nothing of it is collective. */
export interface CarrierMaker {
  /** Of a memory for the carriers of so many groups: all ranks allocate it, on the host. */
  size(groups: number): Pick<AllocateOptions, 'byteLength' | 'signalSlots'>;
  /** Whether carriers fold elements of this dtype so, both as the addon numbers them. */
  carries(type: number, reduction: number): boolean;
  /** Forgets what an earlier group has left in this rank's places: on all ranks, before any of them opens its carrier. */
  clear(memory: SymmetricMemory, group: number): void;
  /** Where ranks of this host find this rank's part. */
  part(memory: SymmetricMemory): Uint8Array;
  /** Throws as `RoundMaker.open`, and `EP_INVALID_ARGUMENT` for groups that are on one host. */
  open(options: CarrierOptions): Carrier;
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
  /** Resolves when all has landed on the peer that rounds and carriers of this rank have put there, which `Endpoint.flush` of a composed transport may know nothing of. Rejects as that does. */
  settle(peer: Rank, options?: WaitOptions): Promise<void>;
  readonly carriers?: CarrierMaker;
}
