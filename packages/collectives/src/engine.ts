/**
 * What stands between a process group and the bytes. The group checks arguments, converts ranks, keeps Works and records; an engine moves and
 * reduces. All ranks here are ranks of the group: 0 .. size - 1.
 */
import type { Closeable, DType, Storage } from '@ep/core';
import type { DeviceElements } from './device/elements.js';
import type { ReduceOp } from './reduce-op.js';

export type OpKind =
  | 'barrier'
  | 'broadcast'
  | 'all-reduce'
  | 'reduce'
  | 'all-gather'
  | 'gather'
  | 'scatter'
  | 'reduce-scatter'
  | 'all-to-all';

/**
 * What all members agree that a rank is: not there; there, and alone; waiting in `joinGroup()` to be taken in; taking part.
 */
export type PeerState = 'absent' | 'connected' | 'joining' | 'active';

/** A call that changes who takes part, in this order, or only asks. All members ask for the same. */
export interface MembershipCall {
  /** As of a collective call: it has its place among them. */
  readonly sequence: number;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
  /** Leave the group, whether or not they come to this call. */
  readonly evicted: readonly number[];
  /** Are taken in if all of them wait for it; otherwise nothing changes but for `evicted`. */
  readonly admitted: readonly number[];
  /** Ranks of the group from then on; never less than before. */
  readonly size: number;
  /** Lets ranks that failed differently agree anew: all go on from this call, whatever became of those before. */
  readonly repairs: boolean;
}

export interface MembershipEnd extends EngineEnd {
  /** The number under which all made the call: of one that repairs, the highest of them. */
  readonly sequence: number;
  readonly admitted: boolean;
  /** By rank, of all that there may be. */
  readonly states: readonly PeerState[];
}

/** Contiguous elements: a typed array, of the caller or of group memory (`GroupEngine.allocate`). */
export type Elements = Storage[DType];

/** What a call may be of: all of it in host memory, or all of it on the group's device. */
export type Data = Elements | DeviceElements;

/**
 * One collective call, checked. Which arrays there are, W = size, n = elements of the call:
 *
 * | kind | inputs | outputs |
 * |------|--------|---------|
 * | barrier | none | none |
 * | broadcast | [n] on the root, else none | [n] but on the root none |
 * | all-reduce | [n] | [n], may be the input itself |
 * | reduce | [n] | [n] on the root, may be the input itself; else none |
 * | all-gather | [n] | W of n |
 * | gather | [n] | W of n on the root, else none |
 * | scatter | W of n on the root, else none | [n] |
 * | reduce-scatter | W of n | [n] |
 * | all-to-all | W, of any lengths | W, of any lengths: what rank a sends to b is as long as what b takes from a |
 *
 * But for an output that is the input itself, arrays of one call do not overlap. Arrays of length 0 are as good as any other.
 */
export interface EngineCall {
  readonly kind: OpKind;
  /** 1, 2, 3, … of the collective calls of this group on this rank; the same call has the same number on every rank. */
  readonly sequence: number;
  /** Of all arrays; `u8` for a barrier. */
  readonly dtype: DType;
  readonly reduceOp?: ReduceOp | undefined;
  /** -1 where there is none. */
  readonly root: number;
  readonly inputs: readonly Elements[];
  readonly outputs: readonly Elements[];
  /** Counted from the moment at which the call is the oldest one. `Infinity`: no limit. */
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

/** The same of tensors on the group's device. */
export interface DeviceCall extends Omit<EngineCall, 'inputs' | 'outputs'> {
  readonly inputs: readonly DeviceElements[];
  readonly outputs: readonly DeviceElements[];
}

/** How a collective call ended well. */
export interface EngineEnd {
  /** Whose data is in the result, ascending; the same on all of them. */
  readonly contributors: readonly number[];
}

export interface SendCall<D extends Data = Elements> {
  readonly peer: number;
  readonly tag: number;
  readonly data: D;
  /** Counted from the moment at which the receiver may be awaited, not from waiting behind other messages. */
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

export interface RecvCall<D extends Data = Elements> {
  /** -1: any. */
  readonly peer: number;
  readonly tag: number;
  readonly data: D;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

export interface RecvEnd {
  readonly source: number;
  /** Bytes received; a message longer than the array ends both sides with EP_MISMATCH, as does another type of array. */
  readonly byteLength: number;
}

/** Who takes part, as agreed by those who do. */
export interface GroupView {
  /** Grows by one with every change. */
  readonly epoch: number;
  /** Ascending. */
  readonly active: readonly number[];
}

/** What this rank has written for calls of a kind, in all: the cost that tests compare with the formulas. In two levels what goes through the transport. */
export interface OpTrace {
  readonly calls: number;
  /** Bytes of payload that this rank wrote for others to read, or into others' memory. */
  readonly bytes: number;
  /** Writes of payload, one for each chunk and each peer (or for all peers at once). */
  readonly writes: number;
  /** Signals: words that say that something is there. */
  readonly signals: number;
}

/** How long a look in the store may take, `Infinity` unless given. */
export interface LookLimits {
  readonly timeoutMs?: number;
  readonly signal?: AbortSignal | undefined;
}

/** Of an engine whose members may change. */
export interface Elastic {
  /** Ranks that the group may grow to. */
  readonly capacity: number;
  /** Looks for ranks that have come, or come back, since. With what it has found by then where the limits end it: it never fails. */
  readonly refresh: (limits?: LookLimits) => Promise<void>;
  readonly change: (call: MembershipCall) => Promise<MembershipEnd>;
  /** Of a rank that takes no part, with no call under way: waits until it is taken in. The number of the call that did so. */
  readonly join: (limits: { readonly timeoutMs: number; readonly signal?: AbortSignal | undefined }) => Promise<number>;
}

/**
 * Calls are carried out in the order of `run`, each rank's alike; messages between two ranks in the order in which they were posted, independently of the
 * collectives. Ordinary arrays must not be touched before the call has ended.
 *
 * How a call ends badly, alike on all survivors where the loss of a rank is the reason:
 * - `EP_PEER_LOST`, context `lost`: a member died. The call has no result (outputs are undefined); the members without `lost` are the next view, and
 *   the next call works.
 *   One that had died before anybody could meet it in a call may instead be missing from the `contributors` of that call, which is then a good one.
 * - `EP_TIMEOUT`, context `arrived`, `awaited`: the ranks that had come to this call, and those that had not. The group is poisoned.
 * - `EP_ABORTED`/`signal.reason`: the caller gave up. The group is poisoned, like after a timeout; peers' calls end with `EP_ABORTED` naming the rank.
 * - `EP_MISMATCH`, context `ranks`, `sequence`, `expected`, `found`: these ranks made another call (kind, dtype, reduction, root or length). Poisoned. `sequence` is below that of
 *   the call that is told where an engine ended the one that differed without awaiting those ranks: that of a root which only gives may end when its data is where the others find it.
 * - `EP_POISONED`: an earlier call ended so that ranks no longer agree where they are. A membership call that repairs ends that.
 * - `EP_EVICTED`: the others went on without this rank. It may join them again.
 */
export interface GroupEngine extends Closeable {
  /** `shm`, or the name of the transport. */
  readonly name: string;
  readonly rank: number;
  /** Ranks of the group, whether or not they take part. */
  readonly size: number;
  /** Absent where the members are fixed, but for those that die. */
  readonly elastic?: Elastic;
  /**
   * Calls on tensors of a device, in the order of its stream. After a failure all of them end with `EP_POISONED`; calls in host memory go on, and so do messages of either
   * kind. A message begins behind what lies on the stream when it is posted, and goes beside what comes there later. While the stream is being captured, calls become part
   * of its graph and have ended at once.
   */
  readonly device?: {
    readonly run: (call: DeviceCall) => EngineEnd | Promise<EngineEnd>;
    readonly capturing: () => boolean;
    readonly send: (call: SendCall<DeviceElements>) => Promise<void>;
    readonly recv: (call: RecvCall<DeviceElements>) => Promise<RecvEnd>;
  };
  /** Posts the messages that `body` posts as one; absent where they need not be. */
  readonly grouped?: <T>(body: () => T) => T;
  /** What has ended when it returns costs no promise. */
  readonly run: (call: EngineCall) => EngineEnd | Promise<EngineEnd>;
  readonly send: (call: SendCall) => Promise<void>;
  readonly recv: (call: RecvCall) => Promise<RecvEnd>;
  readonly view: () => GroupView;
  /** Zeroed memory that peers read and write in place; lives as long as the engine. Engines without such memory return an ordinary array. */
  readonly allocate: <D extends DType>(dtype: D, length: number) => Storage[D];
  readonly trace: () => Readonly<Partial<Record<OpKind | 'send' | 'recv', OpTrace>>>;
  /** Members whose connection is up, and what keeps the others. */
  readonly connections: () => readonly {
    readonly rank: number;
    readonly state: 'self' | 'connecting' | 'connected' | 'lost';
    readonly detail?: string;
  }[];
}
