/** What calls of a buffer for experts on a GPU take and hand out. */
import type { DeviceTensor } from '@ep/core';
import type { MoeBufferOptions, MoeCallOptions, MoeDispatchOptions } from '../moe/options.js';
import type { MoeHandle, MoeReceived } from '../moe/received.js';
import type { CudaStream } from './stream.js';

export interface DeviceMoeOptions extends Omit<MoeBufferOptions, 'stream' | 'executor' | 'blocks' | 'zeroCopyCombine'> {
  /** The stream that calls are put on. The caller's, which outlives the buffer. */
  readonly stream: CudaStream;
  /** Thread blocks of a call, as in `DeviceDispatcherOptions`. */
  readonly blocks?: number;
  /** Threads of a block, whole warps of 32, at most 512. 256 unless given. */
  readonly lanes?: number;
}

export interface DeviceMoeDispatchOptions extends MoeCallOptions, Pick<MoeDispatchOptions, 'activeRanks'> {}

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
  /** Of f8e4m3: one scale for each 128 channels, f32 or ue8m0: [ceil(hidden / 128), rows that x has room for]. */
  readonly scales?: DeviceTensor;
  readonly handle: MoeHandle;
}

export interface DeviceMoeCombined {
  /** `out`. */
  readonly y: DeviceTensor;
  /** Whose results were left out, as a mask. */
  readonly lostRanks: Uint8Array;
  readonly waitNs: BigUint64Array;
}
