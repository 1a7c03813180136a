/** Devices, the order of work on them, and tensors that lie there. */
import type { DType } from './dtype.js';
import type { Closeable } from './scope.js';
import type { WaitOptions } from './transport.js';

/** `host` runs kernels on threads of this process; `cuda` on the GPU with this index. */
export interface Device {
  readonly kind: 'host' | 'cuda';
  readonly index: number;
}

/** A point in a stream. */
export interface Event extends Closeable {
  /** True if everything before the point has run. Never blocks. */
  readonly reached: boolean;
  /** Resolves when everything before the point has run; rejects with its failure, `EP_TIMEOUT`, or the caller's `signal.reason`. */
  synchronize(options?: WaitOptions): Promise<void>;
}

/** A queue of kernels that run in order. Two streams run independently unless one waits for an event of the other. */
export interface Stream extends Closeable {
  readonly device: Device;
  /** Marks the point behind everything queued so far. */
  record(): Event;
  /** What is queued after this call runs only after the event was reached. Returns at once: the stream waits, not the caller. */
  wait(event: Event): void;
  /** Resolves when everything queued so far has run; rejects with the first failure, `EP_TIMEOUT`, or the caller's `signal.reason`. */
  synchronize(options?: WaitOptions): Promise<void>;
}

/** A tensor by address: `shape` and `strides` count elements, as in `Tensor`; `address` is that of the first element. */
export interface DeviceTensor<D extends DType = DType> {
  readonly dtype: D;
  readonly shape: readonly number[];
  readonly strides?: readonly number[];
  readonly address: bigint;
  readonly device: Device;
}
