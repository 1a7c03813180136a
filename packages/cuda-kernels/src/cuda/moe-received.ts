/** What calls of a buffer for experts on a GPU take and hand out. */
import type { DeviceTensor } from '@ep/core';
import type { MoeBufferOptions, MoeCallOptions, MoeDispatchOptions } from '../moe/options.js';
import type { MoeHandle, MoeReceived } from '../moe/received.js';
import type { CudaStream } from './stream.js';

export interface DeviceMoeOptions extends Omit<MoeBufferOptions, 'stream' | 'executor' | 'blocks'> {
  /** The stream that calls are put on. The caller's, which outlives the buffer. */
  readonly stream: CudaStream;
  /** Thread blocks of a call, as in `DeviceDispatcherOptions`. */
  readonly blocks?: number;
  /** Threads of a block, whole warps of 32, at most 512. 256 unless given. */
  readonly lanes?: number;
  /** 'high-throughput': layouts that may be kept at one time (`keepLayout`), each with memory of its own. 0 unless given, at most 64. */
  readonly layouts?: number;
}

/** As `MoeLayout`; of one call at a time: `EP_BUSY` for a second one. */
export interface DeviceMoeLayout {
  readonly tokens: number;
  /** Another may be kept in its place, once no call goes by it. */
  release(): void;
}

export interface DeviceMoeDispatchOptions extends MoeCallOptions, Pick<MoeDispatchOptions, 'activeRanks'> {
  /** 'high-throughput': also hand out a `layout` for later dispatches of the same choices. `EP_CAPACITY` where as many are kept as `layouts` of the buffer says. */
  readonly keepLayout?: boolean;
}

export interface DeviceMoeCombineOptions extends MoeCallOptions {
  /** Where the result goes: [tokens, hidden], packed. */
  readonly out: DeviceTensor;
  /** Of each choice, token-major: tokens * topK. Without them rows are summed as they are. */
  readonly weights?: Float32Array;
  /** At most two tensors like the result, packed, added to it. */
  readonly bias?: readonly DeviceTensor[];
  /** Where some of a token's experts are gone, scale what is left so that its weights keep their sum. */
  readonly renormalise?: boolean;
}

/** As `MoeReceived`, of tensors on the device. Counts and numbers of tokens are in memory of the host. */
export interface DeviceMoeReceived
  extends Pick<
    MoeReceived,
    'counts' | 'blockStart' | 'layoutRange' | 'sourceToken' | 'sourceChoice' | 'lostRanks' | 'waitNs'
  > {
  /** 'low-latency': [localExperts, ranks * maxTokens, hidden]; 'high-throughput': [rows, hidden], rows may lie apart. */
  readonly x: DeviceTensor;
  /** As `MoeReceived.combineBuffer`: shaped as x, in the buffer's dtype, its rows possibly apart. */
  readonly combineBuffer?: DeviceTensor;
  /** Of f8e4m3: one scale for each 128 channels, f32 or ue8m0: [ceil(hidden / 128), rows that x has room for]. */
  readonly scales?: DeviceTensor;
  readonly handle: MoeHandle;
  /** Present if asked for by `keepLayout`. */
  readonly layout?: DeviceMoeLayout;
}

export interface DeviceMoeCombined {
  /** `out`. */
  readonly y: DeviceTensor;
  /** Whose results were left out, as a mask. */
  readonly lostRanks: Uint8Array;
  readonly waitNs: BigUint64Array;
}

export interface DeviceMoeCaptureOptions {
  /** How long the call, or this half of it, waits for ranks in each replay before it goes on without them, in milliseconds, as in `MoeCallOptions`. */
  readonly timeoutMs?: number;
}

export interface DeviceMoeCaptureCombineOptions extends DeviceMoeCaptureOptions {
  readonly out: DeviceTensor;
  /** f32 [tokens, topK] on the device, packed, read at each replay. */
  readonly weights?: DeviceTensor;
  readonly bias?: readonly DeviceTensor[];
  readonly renormalise?: boolean;
}

/** A call of which the first half was captured: `receive`, once and in the same capture, captures the second. In between the stream may be given anything else. */
export interface DeviceMoeCaptureHook<T> {
  receive(options?: DeviceMoeCaptureOptions): T;
}

/** As `DeviceMoeReceived`, of tensors that each replay writes anew, counts and numbers of tokens among them. */
export interface DeviceMoeCaptured extends Pick<DeviceMoeReceived, 'x' | 'scales' | 'combineBuffer'> {
  /** i32, by local expert. */
  readonly counts: DeviceTensor;
  /** i32, by local expert; 'high-throughput': then the rows of x. */
  readonly blockStart: DeviceTensor;
  /** i64, as in `MoeReceived`. */
  readonly layoutRange: DeviceTensor;
  /** i32, by row. */
  readonly sourceToken: DeviceTensor;
  readonly sourceChoice: DeviceTensor;
  /** For `captureCombine`, in the same graph. */
  readonly handle: MoeHandle;
}
