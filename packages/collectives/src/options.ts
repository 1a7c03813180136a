/** What callers pass to a process group. */
import type { AbortOptions, DeviceTensor, Environment, PlainArray, Rank, Store, Tensor } from '@ep/core';
import type { GpuQueue } from '@ep/native';
import type { EngineFactory, GroupTransport } from './backends.js';
import type { ReduceOp } from './reduce-op.js';

/**
 * A contiguous tensor, or a typed array whose dtype is plain (`asTensor` of @ep/core). Used in place, never copied by the group. Of a group with a `device`
 * also a tensor on its GPU; all tensors of a call lie there, or none does.
 */
export type Operand = Tensor | PlainArray | DeviceTensor;

/** Limits of one call. An aborted call leaves ranks that no longer agree where they are: the group is then poisoned. */
export interface CallOptions extends AbortOptions {
  /** Counted from the moment at which the call is this rank's oldest one; that of the group unless given. `Infinity`: no limit. */
  readonly timeoutMs?: number;
}

/** `op` is `sum` unless given. */
export interface ReduceOptions extends CallOptions {
  readonly op?: ReduceOp;
}

export interface RootOptions extends CallOptions {
  readonly root: Rank;
}

export interface ReduceToRootOptions extends ReduceOptions, RootOptions {}

export interface GatherOptions extends RootOptions {
  /** On the root, and only there: one for each rank. */
  readonly outputs?: readonly Operand[];
}

export interface ScatterOptions extends RootOptions {
  /** On the root, and only there: one for each rank. */
  readonly inputs?: readonly Operand[];
}

/** Rows (extents of axis 0; elements of a typed array) for each rank; equal parts unless given. */
export interface SplitOptions extends CallOptions {
  readonly outputSplits?: readonly number[];
  readonly inputSplits?: readonly number[];
}

export interface MessageOptions extends CallOptions {
  /** Messages of one sender meet receives of the same tag, in the order in which each side posted them. 0 unless given. */
  readonly tag?: number;
}

/** One message of a batch. `recv` without a peer takes from any. */
export type MessageOp =
  | { readonly op: 'send'; readonly tensor: Operand; readonly peer: Rank; readonly tag?: number }
  | { readonly op: 'recv'; readonly tensor: Operand; readonly peer?: Rank; readonly tag?: number };

/** `timeoutMs` is for making the group, and then for every call of it that gives none. */
export interface SplitGroupOptions extends CallOptions {
  /**
   * Of a group with a `device`: the stream of its GPU that calls on tensors there go on, this group's unless given. Groups on different streams run beside each other, each stream with
   * `blocks` of its own.
   */
  readonly stream?: GpuQueue;
}

/** As `SplitGroupOptions`. */
export interface NewGroupOptions extends SplitGroupOptions {
  /** Appended to the name of the parent and the number of the call. The same on all ranks of the parent. */
  readonly name?: string;
}

/**
 * Collectives and messages on tensors of a GPU, over a transport with device memory (`nvshmem.cuda`). A call runs on `stream`: behind what was put there before it, and before
 * what is put there later; its Work resolves when it has run. Its time counts from its launch. Calls of groups that were made from this one go on the same stream, unless they get another: members of two
 * groups of one stream make the calls of both in one order. A message goes behind what was put there before it, and beside what is put there later.
 */
export interface DeviceOptions {
  /** A `CudaStream` of the transport's GPU; with NCCL, of this rank's. The group does not close it. */
  readonly stream: GpuQueue;
  /** Calls on the device go by NVIDIA's NCCL: true, or the path of libnccl.so.2. Always so with the backend `nccl`. */
  readonly nccl?: true | string;
  /** Device memory that calls of a group travel through, the same on all ranks; 32 MiB unless given. Messages have a quarter of that besides. */
  readonly stagingBytes?: number;
  /** Groups that a rank can be in at one time, this one and those that are made from it, each with so much device memory; the same on all ranks, 4 unless given. */
  readonly maxGroups?: number;
  /** Thread blocks of a call; half of this rank's share of the GPU, or what the rank with the fewest has. */
  readonly blocks?: number;
  /** Threads of a block, whole warps of 32; 512 unless given, and no more. */
  readonly lanes?: number;
}

/**
 * `shm`: ranks of this host. `nccl`: the same, each with a `device` of its own, whose tensors go by NVIDIA's NCCL. A transport: all of its ranks; the group does not close it.
 */
export type Backend = 'shm' | 'nccl' | GroupTransport | EngineFactory;

export interface InitOptions extends AbortOptions {
  /** `shm` unless given. */
  readonly backend?: Backend;
  /** All ranks, or none. Groups made from this one have it, too. */
  readonly device?: DeviceOptions;
  /** Where the ranks meet: `env://`, `tcp://…` or `file://…`, see `openRendezvous` of @ep/core. `env://` where there is no `store` either. */
  readonly initMethod?: string;
  /**
   * Instead of `initMethod`, with `rank` and `worldSize`, which a transport tells by itself. Stays the caller's, and is needed for as long as the group
   * makes other groups.
   */
  readonly store?: Store;
  readonly rank?: Rank;
  readonly worldSize?: number;
  /** For every call that gives none; EP_TIMEOUT_MS unless given. */
  readonly timeoutMs?: number;
  /** `world` unless given. Groups of one store with one name need not be closed before the next is opened, but all ranks open them in one order. */
  readonly name?: string;
  /**
   * Who takes part at first, the same on all; all ranks unless given. The others may be taken in later: `isExtension`. Where the ranks meet must then be
   * a place that does not wait for all, nor end with rank 0: a `store`, `file://` or the store of a launcher.
   */
  readonly activeRanks?: readonly Rank[];
  /**
   * This rank is not there from the beginning: it is a new one, or takes the place of one that died. It is alone in its group until `joinGroup()` has
   * brought it to the others. Its rank may be beyond the `worldSize` with which the others began.
   */
  readonly isExtension?: boolean;
  /** Ranks that the group may grow to, the same on all; `worldSize` unless given, and for `isExtension` what the others have. */
  readonly maxGroupSize?: number;
  /**
   * When a call's time is up: `poison`, it ends with `EP_TIMEOUT` on all, and the group is of no use until `deactivate()`; or `evict`, those that have not
   * come are taken out of the group, as if they had died (over a transport: those that do not answer either). The same on all; `poison` unless given,
   * and for `isExtension` what the others have.
   */
  readonly onTimeout?: 'poison' | 'evict';
  /**
   * Over a transport: for each of its ranks a number that the ranks of its host have, and no other, the same on all; as the transport knows it unless given. Ranks of one host
   * have to be able to share memory. Large calls then go through that first (docs/fabric.md), and reductions are folded by host.
   */
  readonly hosts?: readonly number[];
  /** Of all groups of this host together, where they are more than this group's: engines spin less when cores are fewer than ranks. */
  readonly ranksOnHost?: number;
  readonly env?: Environment;
}
