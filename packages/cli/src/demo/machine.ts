/** Where a rank's tensors lie and its kernels run: the four dispatches of a step, and core attention between them. Called in the order of this interface. */
import type { Storage, Tensor } from '@ep/core';
import type { AttentionDType } from '@ep/cuda-kernels';
import type { ComparedTensor } from './results.js';
import type { RowKind } from './rows.js';

export type HomeRows = Readonly<Record<RowKind, Tensor<AttentionDType>>>;

export interface Machine {
  /** Ordinal of this rank's GPU; absent on the host. */
  readonly gpu?: number;
  /** Sent by this rank, to itself included. */
  readonly bytesSent: { readonly forward: number; readonly backward: number };
  /** Takes the rows whose home is here. */
  place(rows: HomeRows): Promise<void>;
  /** Queries, keys and values to the ranks that serve them. */
  dispatch(): Promise<void>;
  attention(): Promise<void>;
  returnOutputs(): Promise<void>;
  outputs(): Promise<Storage[AttentionDType]>;
  dispatchGradient(): Promise<void>;
  attentionBackward(): Promise<void>;
  returnGradients(): Promise<void>;
  gradients(): Promise<Readonly<Record<Exclude<ComparedTensor, 'o'>, Storage[AttentionDType]>>>;
  /** Copied because a source was not where kernels read it. */
  readonly stagedBytes: number;
  /** After all ranks have verified. */
  close(): Promise<void>;
}
