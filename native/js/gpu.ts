/** The typed surface of the addon's classes for GPUs: one-to-one with `native/napi/bind_gpu*.cpp`. */
import type { Device } from '@ep/core';
import type {
  AttentionProblem,
  CompatPlan,
  DispatchPart,
  DispatchSum,
  NativeRankContext,
  OperationId,
  Outcome,
} from './binding.js';

export interface GpuFacts {
  readonly name: string;
  /** PCI address, "0000:84:00.0". */
  readonly pci: string;
  /** `cuda`, or what else executes the kernels: tests run them on host threads. */
  readonly runsOn: string;
  /** Compute capability, "9.0". */
  readonly compute: string;
  readonly memoryBytes: number;
  readonly l2Bytes: number;
  readonly multiprocessors: number;
  readonly clockKhz: number;
  readonly copyEngines: number;
  /** CUDA version that the driver knows, and that of the runtime under the kernels. */
  readonly driver: string;
  readonly runtime: string;
  /** Grids whose blocks all run at once: without them no dispatch runs. */
  readonly cooperative: boolean;
  /** Device memory can be shared with other processes (CUDA IPC). */
  readonly ipc: boolean;
  readonly gpudirect: boolean;
  /** Atomics of kernels on host memory. */
  readonly hostAtomics: boolean;
  /** Compute mode: one process at a time. */
  readonly exclusive: boolean;
  /** Ordinals of other GPUs whose memory its kernels reach (peer access). */
  readonly peers: readonly number[];
  /** Why the GPU cannot be used; then it has none of the facts above. */
  readonly unusable?: string;
}

/** What the driver says of itself and of its GPUs, in its order; asking makes no context on them. */
export interface GpuDriverFacts {
  /** The newest CUDA that it knows, "13.0". */
  readonly version: string;
  readonly gpus: readonly {
    /** PCI address; empty where the driver does not say it. */
    readonly pci: string;
    /** Its memory can be exported as a DMA-BUF, which network cards take. */
    readonly dmabuf: boolean;
    /** Network cards can reach its memory by address, given nvidia-peermem. */
    readonly gpudirect: boolean;
  }[];
}

export interface NativeGpuLibrary {
  devices(): readonly GpuFacts[];
  /** How far memory of a device goes from an address on, in bytes; or why it is none. */
  find(device: number, address: bigint): { readonly bytes?: number; readonly why?: string };
  /** Blocks of device memory, one's own or mapped from others, that this process has yet to free. */
  held(): number;
}

/** Zeroed device memory, or another process's as it is. */
export interface NativeGpuMemory {
  address(): bigint;
  byteLength(): number;
  /** It is another process's, and this one has yet to unmap it. */
  mapped(): boolean;
  release(): void;
}

/** Zeroed, page-locked host memory; one address for the host and for kernels. */
export interface NativeGpuPinned {
  address(): bigint;
  window(): ArrayBuffer;
}

export interface NativeGpuEvent {
  reached(): boolean;
  /** Between timed events that were reached. */
  elapsedMs(from: NativeGpuEvent): number;
}

export interface NativeGpuSymmetricMemory {
  /** `ep_gpu_memory_handle` bytes. */
  handle(): Uint8Array<ArrayBuffer>;
  /** One handle for each rank, concatenated. */
  connect(handles: Uint8Array): void;
  /** `ep_memory_handle` bytes, for kernels of this device. */
  deviceHandle(): Uint8Array<ArrayBuffer>;
  address(peer: number): bigint;
  /** Of this rank's signal words. */
  signalAddress(): bigint;
  /** Waits for a copy of some microseconds. */
  peek(slot: number): bigint;
  release(): void;
}

/** What a dispatcher keeps on its device: the counts of its leases, and its share of the device. */
export interface NativeGpuCalls {
  shape(): { readonly blocks: number; readonly lanes: number; readonly resident: number };
  /** Takes the counters as they stand for the new zero. No kernel of any rank's calls may run. */
  rebase(): void;
  release(): void;
}

export interface NativeGpuDispatch {
  readonly __brand?: 'GpuDispatch';
}

/** What per-token calls of a rank share: the memory that they send through, and their part of the device. */
export interface NativeGpuCompat {
  /** Blocks: at most, one for each row. */
  shape(): { readonly blocks: number; readonly lanes: number; readonly resident: number };
  release(): void;
}

export interface NativeGpuCompatDispatch {
  readonly __brand?: 'GpuCompatDispatch';
}

/** What the process groups of a rank share on its device. Their calls go on one stream, where one runs at a time. */
export interface NativeGpuGroupArena {
  /** Of the same memory and sections, for groups whose calls go on another stream; blocks as of this one's description. */
  beside(blocks: number): NativeGpuGroupArena;
  shape(): { readonly blocks: number; readonly lanes: number; readonly resident: number };
  release(): void;
}

/** What a process group keeps on its device. */
export interface NativeGpuGroup {
  /** The blocks that all members have; once, before the first call. Returns the bytes of a slot (`ep_group_args.slot_bytes`). */
  layOut(blocks: number): number;
  release(): void;
}

/** A collective call; numbers of `ep/abi/group.h`. */
export interface GpuGroupCall {
  readonly mode: number;
  readonly element: number;
  readonly fold: number;
  readonly factor: number;
  /** The same on all ranks, or all of them fail. */
  readonly signature: bigint;
  /** All ranks know how many bytes the longest pair of any of them has: `longest`. */
  readonly even: boolean;
  readonly longest: number;
  /** Negative: no limit. */
  readonly timeoutMs: number;
}

/** One replay of a graph, as somebody with calls in it sees it. */
export interface GraphReplay {
  /** End the replay's waits. */
  readonly cuts: readonly AbortSignal[];
  /** The device is through with it. A failure leaves in doubt where ranks are. */
  end(failure: { readonly reason: unknown } | undefined): void;
}

/** Somebody with calls in a graph. */
export interface GraphMember {
  /** Throws as a call would. `queue`: that of the replay. */
  beginReplay(operation: string, queue: object): GraphReplay;
  /** The capture that it was joined to has ended; a failed one leaves no graph. */
  endCapture?(failed: boolean): void;
}

/** NVIDIA's NCCL, opened by name. */
export interface NativeNcclLibrary {
  /** "2.28.9". */
  version(): string;
  /** Made on one rank, and the same on all ranks of a communicator. */
  uniqueId(): Uint8Array<ArrayBuffer>;
}

export interface NativeNcclCommunicator {
  /** Ends when all ranks have come; once. */
  open(timeoutMs: number): OperationId;
  /** Why it is of no use any more. */
  failed(): string | undefined;
  /** Waits so long for what is under way, then gives all back: ends when NCCL holds nothing any more. Once, after `open`. */
  end(timeoutMs: number): OperationId;
  /** Gives up what is under way, and waits for that. */
  release(): void;
}

/** NVIDIA's NVSHMEM, opened by name; `native/napi/bind_gpu_nvshmem.cpp`. */
export interface NativeNvshmemLibrary {
  /** "3.4.5". */
  version(): string;
  /** Made on one PE, and the same on all PEs of a world. */
  uniqueId(): Uint8Array<ArrayBuffer>;
  /** The world that this process is in, of whichever of its threads. */
  here(): NvshmemPlace | undefined;
}

export interface NvshmemPlace {
  readonly id: Uint8Array;
  readonly pe: number;
  readonly pes: number;
  readonly device: number;
  readonly heapBytes: number;
  /** Why it is of no use any more; empty: it is. */
  readonly failed: string;
}

/** Bytes of the symmetric heap. */
export interface NativeNvshmemPart {
  offset(): number;
  /** Memory that was made in it keeps it. */
  release(): void;
}

/** Signals: op 0 none, 1 add, 2 set. Operations end when their stream has come behind them: their source may be used again. */
export interface NativeNvshmemWorld {
  /** Ends when all PEs have come; one at a time. */
  meet(timeoutMs: number): OperationId;
  failed(): string | undefined;
  /** Once all have met. */
  facts(): {
    /** Every PE's heap is mapped here. */
    readonly mapped: boolean;
    /** PEs share a GPU, and their kernels never run at the same time. */
    readonly byTurns: boolean;
    readonly bytesFree: number;
  };
  /** The first that is free here from an offset on. */
  take(byteLength: number, signalSlots: number, from: number): NativeNvshmemPart;
  /** This PE's memory in the part, zeroed. */
  memory(
    rank: NativeRankContext,
    part: NativeNvshmemPart,
    byteLength: number,
    signalSlots: number,
  ): NativeGpuSymmetricMemory;
  /** One handle for each rank, concatenated; all have taken the same part. */
  connect(memory: NativeGpuSymmetricMemory, handles: Uint8Array, part: NativeNvshmemPart): void;
  /** This PE's bytes, where what stands in for a GPU has them on the host. */
  window(memory: NativeGpuSymmetricMemory): ArrayBuffer;
  put(
    stream: NativeGpuStream,
    memory: NativeGpuSymmetricMemory,
    peer: number,
    dstOffset: number,
    source: NativeGpuOperand,
    srcOffset: number,
    byteLength: number,
    op: number,
    slot: number,
    value: bigint,
  ): OperationId;
  putValue(
    stream: NativeGpuStream,
    memory: NativeGpuSymmetricMemory,
    peer: number,
    dstOffset: number,
    width: number,
    word: bigint,
    op: number,
    slot: number,
    value: bigint,
  ): OperationId;
  signal(
    stream: NativeGpuStream,
    memory: NativeGpuSymmetricMemory,
    peer: number,
    op: number,
    slot: number,
    value: bigint,
  ): OperationId;
  get(
    stream: NativeGpuStream,
    memory: NativeGpuSymmetricMemory,
    peer: number,
    srcOffset: number,
    target: NativeGpuOperand,
    dstOffset: number,
    byteLength: number,
  ): OperationId;
  /** Ends when all that was put on the stream before has landed at its peers. */
  quiet(stream: NativeGpuStream, timeoutMs: number): OperationId;
  /** HAZARD: the stream waits for all PEs for ever. The operation ends in time, or with a death. */
  barrier(stream: NativeGpuStream, rank: NativeRankContext, timeoutMs: number): OperationId;
}

/** Elements and fold as native/core/collective/reduce.hpp numbers them. */
export interface NcclCall {
  readonly element: number;
  readonly fold: number;
  readonly factor: number;
  /** Negative: no limit. */
  readonly timeoutMs: number;
}

/** A stream of a GPU as other packages use it: its owner keeps it open while they do. */
export interface GpuQueue {
  readonly device: Device;
  /** What is put on it becomes part of a graph instead of being run. */
  readonly capturing: boolean;
  /** The addon's object, for what is put into a graph. */
  nativeStream(operation: string): NativeGpuStream;
  /** The graph that is being captured has something of this member. Does nothing at other times. */
  join(member: GraphMember): void;
  /** Starts an operation behind everything put on the stream so far, and resolves with its end. An abort ends its waits; then it rejects with `signal.reason`. */
  follow(start: (stream: NativeGpuStream) => OperationId, signal?: AbortSignal): Promise<Outcome>;
}

/** Core attention of a GPU with everything but its tensors. */
export interface NativeGpuAttention {
  release(): void;
}

/** Rows of a tensor on the device. */
export interface NativeGpuRows {
  /** Absent of a tensor without rows. */
  readonly operand?: NativeGpuOperand;
  readonly byteOffset: number;
  readonly strideBytes: number;
}

/** SwiGLU experts over rows of their blocks: native/include/ep/device/expert_layer.h. */
export interface GpuExpertsDescription {
  /** f32 [experts, intermediate, hidden], [experts, intermediate, hidden], [experts, hidden, intermediate], packed. */
  readonly gate: NativeGpuOperand;
  readonly gateOffset: number;
  readonly up: NativeGpuOperand;
  readonly upOffset: number;
  readonly down: NativeGpuOperand;
  readonly downOffset: number;
  /** At most 256. */
  readonly experts: number;
  readonly hidden: number;
  readonly intermediate: number;
  /** `EP_MOE_*`, of x (f32, f16, bf16, e4m3 with f32 or ue8m0 scales) and of y (f32, f16, bf16). */
  readonly payload: number;
  readonly dtype: number;
  /** That x and y have. */
  readonly rows: number;
  readonly x: NativeGpuRows;
  readonly y: NativeGpuRows;
  /** Of e4m3: [ceil(hidden / 128), scaleRoom], f32 or ue8m0; channel h of row r has scale [h / 128, r]. */
  readonly scales?: NativeGpuOperand;
  readonly scalesOffset?: number;
  readonly scaleRoom?: number;
  /** By expert: rows blockStart .. blockStart + count of x and y. The first `experts` elements are read. */
  readonly counts?: Int32Array;
  readonly blockStart?: Int32Array;
  /** In a capture: i32 on the device in place of those, read at each replay. */
  readonly countsAt?: NativeGpuOperand;
  readonly countsOffset?: number;
  readonly startsAt?: NativeGpuOperand;
  readonly startsOffset?: number;
}

export interface NativeGpuGraph {
  release(): void;
}

/** Device memory; pinned memory for copies only; a BigInt is an address of device memory whose owner keeps it. */
export type NativeGpuOperand = NativeGpuMemory | NativeGpuSymmetricMemory | NativeGpuPinned | bigint;

export interface NativeGpuStream {
  copy(to: NativeGpuOperand, toOffset: number, from: NativeGpuOperand, fromOffset: number, byteLength: number): void;
  fill(at: NativeGpuOperand, byteOffset: number, value: number, byteLength: number): void;
  record(event: NativeGpuEvent): void;
  wait(event: NativeGpuEvent): void;
  /** Ends when everything put on the stream so far has run. */
  follow(timeoutMs: number): OperationId;
  /** Three arguments for each part: operand, byteOffset, strideBytes. 0 while the stream is being captured. */
  dispatch(
    dispatch: NativeGpuDispatch,
    lease: number,
    timeoutMs: number,
    ...sources: readonly (NativeGpuOperand | number)[]
  ): OperationId;
  /** Releases a lease to all who send to it, once the stream comes here. */
  grant(calls: NativeGpuCalls, lease: number): void;
  /** Throws what `compatDispatch` would, of the same arguments. Four for each tensor: source, srcOffset, target, dstOffset; rows are packed. Never while the stream is being captured. */
  compatCheck(dispatch: NativeGpuCompatDispatch, ...tensors: readonly (NativeGpuOperand | number)[]): void;
  /** All ranks have passed a barrier since the end of their last one. */
  compatDispatch(
    dispatch: NativeGpuCompatDispatch,
    timeoutMs: number,
    ...tensors: readonly (NativeGpuOperand | number)[]
  ): OperationId;
  /**
   * Three arguments for the output, then for each member's send, then for each member's take: operand, byteOffset, byteLength; of nothing, three zeros. Its outcome
   * names ranks of the world. 0 while the stream is being captured.
   */
  groupCall(group: NativeGpuGroup, call: GpuGroupCall, ...pieces: readonly (NativeGpuOperand | number)[]): OperationId;
  /**
   * Eight arguments for each step, which NCCL carries out together: verb (`nccl_verb` of native/core/gpu/nccl.hpp), root or peer (-1: none), and operand, byteOffset, byteLength of what
   * this rank gives and of what it takes; of nothing, three zeros. What comes later on the stream waits for it.
   */
  ncclCall(
    communicator: NativeNcclCommunicator,
    call: NcclCall,
    ...steps: readonly (NativeGpuOperand | number)[]
  ): OperationId;
  /** By name: q, k, v, o, lse; of the backward pass also dO, dQ, dK, dV. 0 while the stream is being captured. */
  attentionForward(attention: NativeGpuAttention, tensors: Readonly<Record<string, NativeGpuRows>>): OperationId;
  attentionBackward(attention: NativeGpuAttention, tensors: Readonly<Record<string, NativeGpuRows>>): OperationId;
  expertsForward(description: GpuExpertsDescription): OperationId;
  captureBegin(): void;
  captureEnd(): NativeGpuGraph;
  launchGraph(graph: NativeGpuGraph, timeoutMs: number): OperationId;
  depth(): number;
  /** What is on it will never end: it stays until the process ends, and `close` waits for nothing. */
  abandon(): void;
  close(): void;
}

export interface GpuDispatchDescription {
  readonly calls: NativeGpuCalls;
  /** Bytes of a lease that parts and sums use; their offsets are those of lease 0. */
  readonly leaseBytes: number;
  readonly parts: readonly Omit<DispatchPart, 'staging'>[];
  readonly sums: readonly Omit<DispatchSum, 'source' | 'target'>[];
  /** Chunks that each rank owes. */
  readonly chunks: Float64Array;
  /** First byte of each lease, and runs of bytes that no one sends: offset and length in turn. */
  readonly leases: readonly { readonly offset: number; readonly gaps: Float64Array }[];
}

export interface GpuBinding {
  readonly GpuLibrary: new (path: string) => NativeGpuLibrary;
  /** Of so many bytes, or what a handle for CUDA IPC (64 bytes) of another process names. */
  readonly GpuMemory: new (
    library: NativeGpuLibrary,
    device: number,
    byteLengthOrHandle: number | Uint8Array,
  ) => NativeGpuMemory;
  readonly GpuPinned: new (library: NativeGpuLibrary, device: number, byteLength: number) => NativeGpuPinned;
  readonly GpuEvent: new (library: NativeGpuLibrary, device: number, timed: boolean) => NativeGpuEvent;
  readonly GpuStream: new (library: NativeGpuLibrary, device: number, highPriority: boolean) => NativeGpuStream;
  readonly GpuSymmetricMemory: new (
    rank: NativeRankContext,
    library: NativeGpuLibrary,
    device: number,
    byteLength: number,
    signalSlots: number,
  ) => NativeGpuSymmetricMemory;
  readonly GpuCalls: new (description: {
    readonly memory: NativeGpuSymmetricMemory;
    readonly firstSlot: number;
    readonly leases: number;
    readonly blocks: number;
    readonly lanes: number;
  }) => NativeGpuCalls;
  readonly GpuGroupArena: new (description: {
    readonly memory: NativeGpuSymmetricMemory;
    /** Each has `EP_GROUP_MOST_BLOCKS` signal slots for each rank of the world. */
    readonly sections: number;
    /** 0: half of this rank's share of the device. */
    readonly blocks: number;
    readonly lanes: number;
  }) => NativeGpuGroupArena;
  /** HAZARD: zeroes this rank's words of the section. Nobody may write there for the group that had it before, nor yet for this one. */
  readonly GpuGroup: new (description: {
    readonly arena: NativeGpuGroupArena;
    readonly section: number;
    /** Of the slots, in everybody's part. */
    readonly byteOffset: number;
    readonly byteLength: number;
    /** World rank of each member. */
    readonly ranks: Int32Array;
  }) => NativeGpuGroup;
  readonly NcclLibrary: new (path: string) => NativeNcclLibrary;
  readonly NcclCommunicator: new (
    nccl: NativeNcclLibrary,
    library: NativeGpuLibrary,
    device: number,
    rank: number,
    size: number,
    id: Uint8Array,
  ) => NativeNcclCommunicator;
  readonly NvshmemLibrary: new (path: string) => NativeNvshmemLibrary;
  /** The place that this process has in this world already, if it has one. */
  readonly NvshmemWorld: new (
    nvshmem: NativeNvshmemLibrary,
    library: NativeGpuLibrary,
    device: number,
    pe: number,
    pes: number,
    id: Uint8Array,
    heapBytes: number,
  ) => NativeNvshmemWorld;
  readonly GpuDispatch: new (description: GpuDispatchDescription) => NativeGpuDispatch;
  readonly GpuCompat: new (description: {
    /** That kernels of all ranks reach by loads and stores. */
    readonly memory: NativeGpuSymmetricMemory;
    /** 0: half of this rank's share of the device. */
    readonly blocks: number;
  }) => NativeGpuCompat;
  /** Its lists are copied to the device. */
  readonly GpuCompatDispatch: new (
    description: CompatPlan & { readonly compat: NativeGpuCompat },
  ) => NativeGpuCompatDispatch;
  /** One piece for each shard. */
  readonly GpuAttention: new (
    library: NativeGpuLibrary,
    device: number,
    problem: AttentionProblem,
  ) => NativeGpuAttention;
}
