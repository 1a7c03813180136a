/** A buffer for experts, one-to-one with native/napi/bind_moe.cpp; layouts and numbers in native/include/ep/abi/moe.h. */
import type { DispatchDescription, NativeHostStream, NativeOperand, OperationId } from './binding.js';
import type { NativeGpuMemory, NativeGpuOperand, NativeGpuStream, NativeGpuSymmetricMemory } from './gpu.js';

export interface MoeDescription {
  /** `ep_memory_handle` bytes of the memory that holds the buffer and its counters. */
  readonly handle: Uint8Array;
  /** `EP_MOE_LOW_LATENCY` or `EP_MOE_HIGH_THROUGHPUT`. */
  readonly mode: number;
  /** `EP_MOE_*`, of rows to experts and of results. */
  readonly payload: number;
  readonly resultPayload: number;
  readonly hidden: number;
  readonly maxTokens: number;
  readonly topK: number;
  readonly calls: number;
  readonly alignment: number;
  readonly recvRows: number;
  /** Rows are cast before they travel: the staged parts have room for them. */
  readonly staged: boolean;
  /** `EP_MOE_ZERO_COPY`: the part of staged results has room for what experts write there. */
  readonly zeroCopy: boolean;
  /** Offset and bytes of a slot of: received, returned, staged tokens, staged results, counts, starts, refusals. */
  readonly parts: Float64Array;
  readonly firstSignal: number;
  readonly experts: number;
  /** Rank and expert of each replica, and where each rank's replicas begin. */
  readonly replicaRank: Int32Array;
  readonly replicaExpert: Int32Array;
  readonly rankBegin: Int32Array;
  readonly blocks: number;
  readonly simt?: DispatchDescription['simt'];
}

/** What every half of a call has. `timeoutMs` negative: no deadline. */
export interface MoeCall {
  readonly routing: NativeMoeRouting;
  /** Whose `ranks` and `waitNs` this call reads and writes. */
  readonly report: NativeMoeRouting;
  readonly slot: number;
  readonly epoch: number;
  readonly tokens: number;
  readonly timeoutMs: number;
  /** On a GPU: becomes a part of a graph. */
  readonly captured?: boolean;
  /** Of such a call, unless it is `EP_MOE_CACHED`: i32 [tokens, topK] on the device, read at each replay. */
  readonly choices?: NativeGpuOperand;
  readonly choicesOffset?: number;
}

/** `halves`: 1 send, 2 receive, 3 both. `flags`: `EP_MOE_NON_TEMPORAL` (set by the addon, too, where copies to peers are faster so), `EP_MOE_NON_TEMPORAL_OUT`, `EP_MOE_RENORMALISE`, `EP_MOE_CACHED`. */
export interface MoeDispatchHalf<Operand = NativeOperand> extends MoeCall {
  readonly halves: number;
  readonly flags: number;
  /** `EP_MOE_*`, of x. */
  readonly dtype: number;
  readonly x: Operand;
  readonly xOffset: number;
  readonly xStride: number;
  /** Low latency: the receive tensor. High throughput receives in place. */
  readonly out?: Operand;
  readonly outOffset?: number;
  /** Of a quantised payload: [blocks of 128 channels][rows of the receive tensor]. */
  readonly scales?: Operand;
  readonly scalesOffset?: number;
  /** u64 by local expert; added to. */
  readonly totals: Operand;
  readonly totalsOffset: number;
}

export interface MoeCombineHalf<Operand = NativeOperand> extends MoeCall {
  readonly halves: number;
  readonly flags: number;
  readonly dtype: number;
  readonly y: Operand;
  readonly yOffset: number;
  readonly yStride: number;
  readonly yRows: number;
  /** [tokens, hidden], packed. */
  readonly out: Operand;
  readonly outOffset: number;
  readonly weights?: Operand;
  readonly weightsOffset?: number;
  readonly bias0?: Operand;
  readonly bias0Offset?: number;
  readonly bias1?: Operand;
  readonly bias1Offset?: number;
}

export interface NativeMoeBuffer {
  /** Forgets all that this rank knows of another, between calls, and sets `signalSlot` of this rank's to 0. Nobody may write to this rank meanwhile. */
  forget(rank: number, signalSlot: number): void;
  /** Replicas that this rank may take of each expert: before the first call, and whenever ranks come or go. */
  setCandidates(begin: Int32Array, replicas: Int32Array): void;
  dispatch(stream: NativeHostStream, half: MoeDispatchHalf): OperationId;
  combine(stream: NativeHostStream, half: MoeCombineHalf): OperationId;
  /** High throughput: lets peers write into the slot again. */
  release(stream: NativeHostStream, call: MoeCall): OperationId;
  /**
   * Measures dispatch and combine, one step after the other: a duration in ns for each round, as f64, into `samples`. Of a buffer with one call slot, whose
   * last call went before with the same numbers of rows; epochs count on from those given. Rounds take `even` and `odd` in turn; one whose result is not the x
   * that it began with ends the loop.
   */
  steps(
    stream: NativeHostStream,
    even: MoeDispatchHalf,
    odd: MoeDispatchHalf,
    combine: MoeCombineHalf,
    rounds: number,
    samples: NativeOperand,
  ): OperationId;
}

/** The same over the memory of a GPU, whose kernels run on streams of it. Rows lie in memory of the device, weights and totals may lie in pinned memory. */
export interface NativeGpuMoeBuffer {
  shape(): { readonly blocks: number; readonly lanes: number; readonly resident: number };
  setCandidates(begin: Int32Array, replicas: Int32Array): void;
  /** For calls that are captured before any was made. Before any kernel runs. */
  placeCandidates(): void;
  /** `totalsSeen`: pinned memory that gets a copy of `totals`, which lies on the device. Captured calls return 0. */
  dispatch(
    stream: NativeGpuStream,
    half: MoeDispatchHalf<NativeGpuOperand> & {
      readonly totalsSeen: NativeGpuOperand;
      /** It goes by candidates of its own, which captured calls do not see. */
      readonly apart?: boolean;
    },
  ): OperationId;
  combine(stream: NativeGpuStream, half: MoeCombineHalf<NativeGpuOperand>): OperationId;
  release(stream: NativeGpuStream, call: MoeCall): OperationId;
  close(): void;
}

/** Buffers of ranks of one world that share this process and a GPU, in low-latency form: each call of all of them is one launch. */
export interface NativeGpuMoeUnion {
  /** One half for each buffer, in their order, and an operation for each; as many zeros where the stream is being captured. Throws before anything is launched. */
  dispatch(
    stream: NativeGpuStream,
    halves: readonly Parameters<NativeGpuMoeBuffer['dispatch']>[1][],
  ): readonly OperationId[];
  combine(
    stream: NativeGpuStream,
    halves: readonly Parameters<NativeGpuMoeBuffer['combine']>[1][],
  ): readonly OperationId[];
}

export interface GpuMoeDescription extends Omit<MoeDescription, 'handle' | 'simt'> {
  readonly memory: NativeGpuSymmetricMemory;
  /** `blocks` 0: half of this rank's share of the GPU. */
  readonly lanes: number;
}

export interface NativeMoeRouting {
  window(): ArrayBuffer;
  /**
   * Byte offset and elements of each array: topk, choiceReplica, choiceSlot, sendWords, sendHeaders, sendFirst, recvCount, blockStart, layoutRange, sourceToken,
   * sourceChoice, ranks, waitNs.
   */
  layout(): Float64Array;
  /** Of a buffer on a GPU: the same bytes on the device. */
  mirror(): NativeGpuMemory;
}
