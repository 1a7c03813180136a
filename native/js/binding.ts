/** The typed surface of the addon: one-to-one with `native/napi`. Values in, values out; waits come in a `try` and a `watch` form. */
import type { NativeCollectiveGroup } from './collective.js';
import type { NativeEfaGin, NativeEfaNic, NativeEfaOptions, NativePutCounts } from './efa.js';
import type {
  FabricOffer,
  FabricQuery,
  NativeFabricCarrier,
  NativeFabricLink,
  NativeFabricNic,
  NativeFabricOptions,
  NativeFabricRounds,
  NativeRoundsSize,
} from './fabric.js';
import type { GpuBinding, GpuDriverFacts } from './gpu.js';
import type {
  NativeIbgdaNic,
  NativeIbgdaOptions,
  NativeNicProbe,
  NativeNicSpeed,
  NativePostWay,
  NicTopology,
} from './ibgda.js';
import type { StreamMeasurements } from './measurements.js';
import type {
  GpuMoeDescription,
  MoeDescription,
  NativeGpuMoeBuffer,
  NativeGpuMoeUnion,
  NativeMoeBuffer,
  NativeMoeRouting,
} from './moe.js';

/** `EP_STATUS_*` of an operation that ended, and what it saw. */
export interface Outcome {
  readonly status: number;
  /** Who was awaited or lost; -1: nobody in particular. */
  readonly rank: number;
  /** `EP_STAGE_*` of a kernel, 0 otherwise. */
  readonly stage: number;
  readonly expected: bigint;
  readonly found: bigint;
  readonly message?: string;
}

/** An operation that the addon will complete; see `Operations`. */
export type OperationId = number;

export interface NativeHostMemory {
  address(): bigint;
  /** A window of at most 4 GiB: one byte more aborts the process, so the addon refuses it. */
  window(byteOffset: number, byteLength: number): ArrayBuffer;
}

export interface NativeRankContext {
  /** `ep_segment_handle` bytes of the control segment. */
  handle(): Uint8Array<ArrayBuffer>;
  /** Maps the peers' control segments. One handle per rank, concatenated; zeroes for a place in which nobody is (`EP_LIFE_ABSENT`). Nothing of the ranks of `elsewhere`, on other hosts, is mapped: they are absent, too, until `inform`. */
  connect(handles: Uint8Array, elsewhere?: Int32Array): void;
  /** What is known here of ranks that are on other hosts for that context, of another transport of this rank, ends its waits, too. */
  inform(other: NativeRankContext): void;
  /** Has the control segment of another rank in the place of that of a dead one. */
  replace(rank: number, handle: Uint8Array): void;
  /** From here on nobody is in this place. */
  vacate(rank: number): void;
  /** Dead, closed or never there, and no longer held in this process: `replace` may come. */
  gone(rank: number): boolean;
  /** Not alive, and nothing of its process runs any more; also of one on another host. */
  ended(rank: number): boolean;
  /** `EP_LIFE_*` of a rank. */
  life(rank: number): number;
  /** Makes the segment of a team whose first member is this rank; resolves to its handle. */
  createTeamSegment(size: number): Uint8Array<ArrayBuffer>;
  close(): void;
}

export interface NativeTeam {
  /** Enters, or goes on with, the next barrier; true when it was passed within some tens of microseconds. */
  barrierTry(): boolean;
  barrierWatch(timeoutMs: number): OperationId;
  /** Must be called when a watched barrier has succeeded. */
  barrierLeave(): void;
  /** World ranks that have not entered the barrier under way. */
  missing(): Int32Array;
  exchangePut(bytes: Uint8Array): void;
  exchangeGet(position: number, byteLength: number): Uint8Array<ArrayBuffer>;
  /** Drops the team's segment. A watched barrier keeps it until it has ended. */
  release(): void;
}

export type NativeOperand = NativeHostMemory | NativeSymmetricMemory;

/** Signal arguments: op 0 none, 1 add, 2 set. Comparisons: eq 0, ne 1, lt 2, le 3, gt 4, ge 5. */
export interface NativeSymmetricMemory {
  handle(): Uint8Array<ArrayBuffer>;
  /** One handle per rank, concatenated; zeroes for a rank that is not here: what is written to it is lost. */
  connect(handles: Uint8Array): void;
  /** Has the part of another rank in the place of that of a dead one, at its addresses, which nothing may be using. */
  replace(rank: number, handle: Uint8Array): void;
  /** `ep_memory_handle` bytes. */
  deviceHandle(): Uint8Array<ArrayBuffer>;
  address(peer: number): bigint;
  /** Of this rank's signal words. */
  signalAddress(): bigint;
  window(peer: number, byteOffset: number, byteLength: number): ArrayBuffer;
  peek(slot: number): bigint;
  put(
    peer: number,
    dstOffset: number,
    source: NativeOperand,
    srcOffset: number,
    byteLength: number,
    op?: number,
    slot?: number,
    value?: bigint,
  ): void;
  /** A put within this memory, and a signal, whose arguments lie in the frame: see `CallFrame`. */
  putFrame(): void;
  signalFrame(): void;
  putBytes(peer: number, dstOffset: number, bytes: ArrayBufferView, op?: number, slot?: number, value?: bigint): void;
  putValue(
    peer: number,
    dstOffset: number,
    width: number,
    value: bigint,
    op?: number,
    slot?: number,
    signalValue?: bigint,
  ): void;
  get(peer: number, srcOffset: number, destination: NativeOperand, dstOffset: number, byteLength: number): void;
  getBytes(peer: number, srcOffset: number, into: ArrayBufferView): void;
  signal(peer: number, op: number, slot: number, value: bigint): void;
  /** The signal is the 8-byte word at `signalOffset` of the peer's data; op as of a signal. */
  putSignal(
    peer: number,
    dstOffset: number,
    bytes: ArrayBufferView,
    signalOffset: number,
    op: number,
    value: bigint | number,
  ): void;
  /** Orders earlier stores, also those made through windows, before later ones, and wakes whoever waits for them. */
  fence(): void;
  /** op: fetch 0, set 1, add 2, and 3, or 4, xor 5, swap 6, compare-swap 7. The value before, unsigned: a number for width 4, a bigint for width 8. */
  atomic(
    peer: number,
    byteOffset: number,
    width: number,
    op: number,
    operand: bigint | number,
    expected: bigint | number,
  ): bigint | number;
  /** `patiently`: looks for some tens of microseconds, as `wait_inline` in native/core/waiting.hpp says; otherwise once. */
  waitTry(slot: number, cmp: number, value: bigint, patiently: boolean): bigint | undefined;
  waitWatch(slot: number, cmp: number, value: bigint, timeoutMs: number, ranks?: Int32Array): OperationId;
  /** Whether one of the words is not its value: now, or soon, as `waitTry` waits patiently. */
  changedTry(slots: Float64Array, values: BigUint64Array): boolean;
  /** `words`: five entries each: byteOffset, width, signed (0 or 1), cmp, value. */
  wordsTry(words: readonly (number | bigint)[], atLeast: number, patiently: boolean): boolean;
  /** The outcome has the value found and expected where there is one word, else how many hold. */
  wordsWatch(words: readonly (number | bigint)[], atLeast: number, timeoutMs: number, ranks?: Int32Array): OperationId;
  /** Drops this object's reference; windows keep their own until they are detached or collected. */
  release(): void;
}

export interface NativeDispatchProgram {
  readonly __brand?: 'DispatchProgram';
}
export interface NativeReplicaSumProgram {
  readonly __brand?: 'ReplicaSumProgram';
}
/** A dispatch with everything but its sources. Holds no memory open. */
export interface NativeDispatch {
  readonly __brand?: 'Dispatch';
}
export interface NativeStreamEvent {
  done(): boolean;
}

export interface DispatchPart {
  readonly rowBytes: number;
  /** Bytes of row 0 of the receive tensor in every rank's memory, and how many rows it holds. */
  readonly dstOffset: number;
  readonly dstRows: number;
  readonly program: NativeDispatchProgram;
  /** Send and receive buffers (bytes into the memory) of the staged variant; absent: rows go straight from tensor to tensor. */
  readonly staging?: {
    readonly sendOffset: number;
    readonly recvOffset: number;
    readonly sendRows: number;
    readonly recvRows: number;
  };
}

export interface DispatchSum {
  readonly source: NativeOperand;
  readonly srcOffset: number;
  readonly target: NativeOperand;
  readonly dstOffset: number;
  readonly strideBytes: number;
  readonly rowElements: number;
  /** `EP_DTYPE_*`. */
  readonly dtype: number;
  readonly program: NativeReplicaSumProgram;
}

export interface DispatchDescription {
  /** `ep_memory_handle` bytes of the memory that holds the receive tensors and counters. */
  readonly handle: Uint8Array;
  readonly parts: readonly DispatchPart[];
  readonly sums: readonly DispatchSum[];
  readonly arrivalSlot: number;
  readonly creditSlot: number;
  readonly nonTemporal: boolean;
  readonly blocks: number;
  /** Runs on the `simt` executor (fibers under a seeded interleaver) instead of one lane per block. */
  readonly simt?: { readonly lanes: number; readonly warpLanes: number; readonly seed: number };
}

/** Where the kernel reads a part's rows: the operand, bytes of row 0 into it, bytes from row to row. */
export type DispatchSource = readonly [source: NativeOperand, srcOffset: number, strideBytes: number];

/** How one tensor of a `compat` call travels. Rows are packed. Ranks of -1 in `dstRank` are not sent to. */
export interface CompatRoute {
  readonly rowBytes: number;
  /** Send and receive buffers in every rank's memory, and the rows of the latter. */
  readonly sendOffset: number;
  readonly recvOffset: number;
  readonly recvRows: number;
  /** Of rank 0's counter; + source rank. */
  readonly signalSlot: number;
  readonly replicas: number;
  /** [shards][replicas]. */
  readonly dstRank: Int32Array;
  readonly dstRow: Uint32Array;
  /** Rows from each rank, then all. */
  readonly counts: BigUint64Array;
}

/** What a `compat` call does, whatever its tensors. */
export interface CompatPlan {
  /** Rows of each shard that this rank sends; their sum is the rows of its tensors. */
  readonly seqLen: Uint32Array;
  readonly query: CompatRoute;
  readonly keyValue?: CompatRoute;
  /** Present: `query` is a key-value gradient, received replica-major. Rows of replicas that `mask` [shards][replicas] denies are not written. */
  readonly gradient?: { readonly mask: Uint32Array; readonly seqLen: Uint32Array; readonly replicas: number };
}

export interface CompatTensor extends CompatRoute {
  readonly source: NativeOperand;
  readonly srcOffset: number;
  readonly target: NativeOperand;
  readonly dstOffset: number;
}

/** A call of the per-token kernel: native/include/ep/device/compat_dispatch.h. All ranks have passed a barrier since their last one. */
export interface CompatDescription extends CompatPlan {
  /** `ep_memory_handle` bytes. */
  readonly handle: Uint8Array;
  readonly query: CompatTensor;
  readonly keyValue?: CompatTensor;
  readonly blocks: number;
  readonly simt?: DispatchDescription['simt'];
  /** Negative: no deadline. */
  readonly timeoutMs: number;
}

/** Rows in an operand: row i starts `byteOffset + i * strideBytes` bytes into it. Only a tensor without rows has none. */
export interface NativeRows {
  readonly operand?: NativeOperand;
  readonly byteOffset: number;
  readonly strideBytes: number;
}

/** Core attention of one server; rules and shapes in native/core/attention/core_attention.hpp. */
export interface AttentionProblem {
  /** `EP_DTYPE_F32` or `EP_DTYPE_BF16`, of everything but `lse`, which is f32. */
  readonly dtype: number;
  readonly qRows: number;
  readonly kvRows: number;
  readonly qHeads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly scale: number;
  readonly threads: number;
  /** Four entries each: first query row, query rows, first piece, pieces. */
  readonly shards: BigInt64Array;
  /** Two entries each: first key-value row, rows. */
  readonly pieces: BigInt64Array;
}

export interface AttentionForwardDescription extends AttentionProblem {
  readonly q: NativeRows;
  readonly k: NativeRows;
  readonly v: NativeRows;
  readonly o: NativeRows;
  readonly lse: NativeRows;
}

/** Writes dQ, dK and dV; everything else is read. */
export interface AttentionBackwardDescription extends AttentionForwardDescription {
  readonly dO: NativeRows;
  readonly dQ: NativeRows;
  readonly dK: NativeRows;
  readonly dV: NativeRows;
}

/** The engine of the hostile transport: see native/core/hostile/engine.hpp. `slot` -1: no signal. Operations end when they have landed. */
export interface NativeHostileEngine {
  /** Kernels that use this memory post into this engine's ring from here on. */
  attach(memory: NativeSymmetricMemory): void;
  put(
    memory: NativeSymmetricMemory,
    peer: number,
    dstOffset: number,
    source: NativeOperand,
    srcOffset: number,
    byteLength: number,
    slot: number,
    add: bigint,
  ): OperationId;
  putValue(
    memory: NativeSymmetricMemory,
    peer: number,
    dstOffset: number,
    width: number,
    value: bigint,
    slot: number,
    add: bigint,
  ): OperationId;
  signal(memory: NativeSymmetricMemory, peer: number, slot: number, add: bigint): OperationId;
  /** Ends when everything posted before, by JS or by kernels, to this peer has landed. */
  flush(peer: number, timeoutMs: number): OperationId;
  /** After an operation was cancelled: look at once. */
  nudge(): void;
  counts(): { readonly landed: number; readonly overtakes: number; readonly pieces: number };
  /** What a kernel's request did wrong first; empty if none did. */
  violation(): string;
  /** Ends what is under way as closed. */
  close(): void;
}

export interface NativeHostStream extends StreamMeasurements {
  record(event: NativeStreamEvent): OperationId;
  waitEvent(event: NativeStreamEvent): OperationId;
  copy(
    source: NativeOperand,
    srcOffset: number,
    target: NativeOperand,
    dstOffset: number,
    byteLength: number,
    nonTemporal: boolean,
  ): OperationId;
  /** 0: it has ended, and well, before the call returned. */
  /**
   * `counters`, by rank: the counter value to wait for from each source, then the value needed before the first write to each destination; 0: nothing.
   * `inline`: a small call, tried on the calling thread before the stream takes over what is left; operation 0 has ended already, and well.
   * `timeoutMs`: negative: no deadline. `sources`: a `DispatchSource` for each part, flattened.
   */
  dispatch(
    dispatch: NativeDispatch,
    counters: Float64Array,
    timeoutMs: number,
    inline: boolean,
    ...sources: readonly (NativeOperand | number)[]
  ): OperationId;
  compatDispatch(description: CompatDescription): OperationId;
  /** A range or an overlap that is wrong throws; a list that is wrong ends the operation as invalid, before anything is written. */
  attentionForward(description: AttentionForwardDescription): OperationId;
  attentionBackward(description: AttentionBackwardDescription): OperationId;
  /**
   * The pull request's test of values, by both ranks of a world of two, in a context that nothing was signalled in and a memory of zeros. `found` of the outcome
   * says in how many rounds this rank saw the burst's last value before another one.
   */
  ginPutvalue(description: {
    readonly gin: NativeEfaGin;
    readonly memory: NativeSymmetricMemory;
    readonly rounds: number;
    readonly timeoutMs: number;
  }): OperationId;
  /** Launched but not ended. */
  depth(): number;
  /** Cancels what still runs and joins the thread. */
  close(): void;
}

export interface HostFacts {
  readonly onlineCores: number;
  readonly affinityCores: number;
  readonly quotaCores: number | null;
  /** min(affinity, cgroup quota): what decides between spinning and sleeping. */
  readonly usableCores: number;
  readonly memoryTotal: number | null;
  readonly memoryAvailable: number | null;
  readonly cgroupLimit: number | null;
  readonly cgroupUsed: number | null;
  readonly addressSpaceLimit: number | null;
  readonly memlockLimit: number | null;
  readonly openFilesLimit: number | null;
  readonly mapCountLimit: number | null;
  /** Bytes that may still be allocated by the tightest limit, and which limit that is. */
  readonly allocatable: number | null;
  readonly allocatableSource: string;
  /** Bytes that a driver may still pin for this process; null: no limit. */
  readonly pinnable: number | null;
  readonly kernel: string;
  readonly cpuModel: string;
}

export interface Binding extends GpuBinding {
  readonly abi: string;
  configure(
    complete: (ids: Float64Array, words: BigUint64Array, messages: Record<number, string>) => void,
    fail: (status: number, errno: number, message: string) => Error,
  ): void;
  /** See `CallFrame`. */
  readonly frame: ArrayBuffer;
  cancel(operation: OperationId): void;
  hostFacts(): HostFacts;
  /** `EP_LIFE_*` of the rank whose control segment a handle names. */
  lifeBehind(handle: Uint8Array): number;
  /** Objects alive: segments mapped in this process, operations pending in this environment. */
  leaks(): { readonly segments: number; readonly pending: number };
  detach(buffer: ArrayBuffer): void;
  /**
   * `target[i]` = fold of `sources[0][i]`, `sources[1][i]`, …, in this order; all as long as `target`, which may be one of them but overlaps none otherwise. Dtype and reduction as
   * native/core/collective/reduce.hpp numbers them. On this thread.
   */
  reduceElements(
    target: ArrayBufferView,
    sources: readonly ArrayBufferView[],
    dtype: number,
    reduction: number,
    factor: number,
  ): void;
  readonly HostMemory: new (byteLength: number) => NativeHostMemory;
  readonly RankContext: new (rank: number, worldSize: number, ranksOnHost: number) => NativeRankContext;
  readonly Team: new (rank: NativeRankContext, handle: Uint8Array, ranks: Int32Array) => NativeTeam;
  readonly SymmetricMemory: {
    new (rank: NativeRankContext, byteLength: number, signalSlots: number): NativeSymmetricMemory;
    /** The part of `over` once more, for a NIC to reach, too; kernels store to the ranks of `near`. */
    new (over: NativeSymmetricMemory, near: Int32Array): NativeSymmetricMemory;
  };
  readonly Dispatch: new (description: DispatchDescription) => NativeDispatch;
  readonly DispatchProgram: new (
    srcRow: Int32Array | BigUint64Array,
    dstRow: Int32Array | BigUint64Array,
    rows: Int32Array | BigUint64Array,
    dstRank: Int32Array,
    chunkRows: number,
  ) => NativeDispatchProgram;
  readonly ReplicaSumProgram: new (
    shardRow: Int32Array | BigUint64Array,
    shardRows: Int32Array | BigUint64Array,
    replicaBegin: Int32Array | BigUint64Array,
    replicaRow: Int32Array | BigUint64Array,
  ) => NativeReplicaSumProgram;
  readonly StreamEvent: new () => NativeStreamEvent;
  /** `ringCapacity`: a power of two. A request begins at a random moment within `maxDelayUs`, or at a flush. */
  readonly HostileEngine: new (
    rank: NativeRankContext,
    seed: bigint,
    maxDelayUs: number,
    ringCapacity: number,
  ) => NativeHostileEngine;
  readonly HostStream: new (spinNs: number) => NativeHostStream;
  readonly MoeBuffer: new (description: MoeDescription) => NativeMoeBuffer;
  readonly GpuMoeBuffer: new (description: GpuMoeDescription) => NativeGpuMoeBuffer;
  readonly GpuMoeUnion: new (buffers: readonly NativeGpuMoeBuffer[]) => NativeGpuMoeUnion;
  /** Room for the routing of one call of a buffer. */
  readonly MoeRouting: new (
    buffer: NativeMoeBuffer | NativeGpuMoeBuffer,
  ) => NativeMoeRouting;
  /** Loads the driver by that name, `libcuda.so.1`; throws what it lacks. */
  gpuDriver(library: string): GpuDriverFacts;
  /** Read from sysfs, which lies at `root`. */
  nicTopology(root: string): NicTopology;
  readonly EfaNic: new (rank: NativeRankContext, options: NativeEfaOptions) => NativeEfaNic;
  readonly EfaGin: new (
    nic: NativeEfaNic,
    spec: {
      readonly signals: number;
      readonly counters: number;
      /** EP_EFA_SHARE_* */
      readonly sharing: number;
    },
  ) => NativeEfaGin;
  /** Connects the rank: its peers may be on other hosts, and live for as long as they are heard. */
  readonly FabricNic: new (
    rank: NativeRankContext,
    options: NativeFabricOptions,
  ) => NativeFabricNic;
  /** `hosts`: the first member of each host; members of a host are next to each other. `leader`: what `fabricRoundsPart` said on this host's first member. `folded`: members in the order
   * in which what they give is folded, those of a host next to each other; `foldedHosts`: the first of each host there. */
  readonly FabricRounds: new (
    nic: NativeFabricNic,
    memory: NativeSymmetricMemory,
    group: number,
    token: bigint,
    ranks: Int32Array,
    hosts: Uint32Array,
    self: number,
    leader: Uint8Array,
    folded: Uint32Array,
    foldedHosts: Uint32Array,
  ) => NativeFabricRounds;
  readonly FabricCarrier: new (
    nic: NativeFabricNic,
    memory: NativeSymmetricMemory,
    group: number,
    ranks: Int32Array,
    hosts: Uint32Array,
    self: number,
    parts: Uint8Array,
  ) => NativeFabricCarrier;
  /** Of a memory for the carriers of so many groups. */
  fabricCarrierSize(worldSize: number, groups: number): { readonly byteLength: number; readonly signalSlots: number };
  fabricCarrierClear(memory: NativeSymmetricMemory, group: number): void;
  fabricCarries(type: number, reduction: number): boolean;
  /** In a world of so many ranks. */
  fabricRoundsSize(worldSize: number, groups: number): NativeRoundsSize;
  fabricRoundsPart(memory: NativeSymmetricMemory): Uint8Array<ArrayBuffer>;
  /** What `FabricNic` would choose. */
  probeFabric(query: FabricQuery): FabricOffer;
  /** What `IbgdaNic` would find; leaves nothing open. */
  probeNic(options: NativeIbgdaOptions): NativeNicProbe;
  /**
   * For tests of the hardware's path: makes the shim at `path`, which looks like libibverbs and libmlx5, forward to a software NIC as `options` has it, until
   * the process ends.
   */
  attachVerbsShim(path: string, options: NativeIbgdaOptions): void;
  /** The same for what looks like libfabric. */
  attachFabricShim(path: string, options: NativeEfaOptions): void;
  /** Measurements; they hold the calling thread. The lock is the first way. */
  postWays(): readonly NativePostWay[];
  /** `way`: its place in `postWays()`. `executed`: by a software NIC; otherwise nobody executes them, and the ring is only drained. Throws where counts or bytes are wrong. */
  postsPerSecond(way: number, posters: number, batch: number, posts: number, executed: boolean): number;
  /** `batch`: WQEs a doorbell. `region`: bytes that large writes go through, a multiple of 2 MiB. */
  softwareNicSpeed(batch: number, requests: number, region: number): NativeNicSpeed;
  /** The same of puts over EFA's GIN facade, where nobody executes what is posted. `run`: puts of which all but the last are aggregated. */
  efaPutWays(): readonly NativePostWay[];
  efaPutsPerSecond(way: number, posters: number, run: number, puts: number): number;
  efaPutCounts(way: number, run: number, puts: number): NativePutCounts;
  /** Two ranks over libfabric alone; `byteLength`: of what is written from and of what is written to. */
  readonly FabricLink: new (
    query: FabricQuery,
    byteLength: number,
  ) => NativeFabricLink;
  readonly IbgdaNic: new (rank: NativeRankContext, options: NativeIbgdaOptions) => NativeIbgdaNic;
  /**
   * `capacity`: ranks that it may grow to. `nonce`: equal on all members, unlike that of any other group. `active`: who takes part at first, empty for all.
   * `joins`: begins alone, and asks the others to take it in. `incarnation`: 1, 2, … of the processes that have had the rank. `evicts`: a call whose
   * deadline passes goes on without those that have not come. `previous`: of the same rank, whose group memory it keeps. `beside`: a group that knows the cores of ranks of this
   * host that are not in this one.
   */
  readonly CollectiveGroup: new (
    rank: number,
    size: number,
    capacity: number,
    nonce: bigint,
    ranksOnHost: number,
    active: Int32Array,
    joins: boolean,
    incarnation: number,
    evicts: boolean,
    previous?: NativeCollectiveGroup,
    beside?: NativeCollectiveGroup,
  ) => NativeCollectiveGroup;
}
