/** Calls of a buffer for experts on a GPU that were looked at and not launched yet. */
import type { Work } from '@ep/core';
import type { NativeGpuMoeBuffer, OperationId } from '@ep/native';
import type { MoeCallOptions } from '../moe/options.js';
import type { DeviceMoeCaptureOptions } from './moe-received.js';
import type { CapturedCall } from './moe-replays.js';
import type { CudaStream } from './stream.js';

export const SEND = 1;
export const RECEIVE = 2;
export const BOTH_HALVES = SEND | RECEIVE;

export type DispatchHalf = Parameters<NativeGpuMoeBuffer['dispatch']>[1];
export type CombineHalf = Parameters<NativeGpuMoeBuffer['combine']>[1];

/** A call of which all has been looked at that can be refused before the addon sees it. */
export interface BegunMoeCall<Half, Value> {
  /** What the addon is given. Throws `EP_INVALID_ARGUMENT` for limits that are none. */
  readonly half: (halves: number, limits: MoeCallOptions) => Half;
  /** From here on the call counts. */
  readonly launched: () => void;
  /** The addon has refused it: what it holds on to is given back. Absent: nothing. */
  readonly dropped?: () => void;
  /** Follows what was launched, on the buffer's stream unless `on` says where. */
  readonly follow: (name: string, operation: OperationId, limits: MoeCallOptions, on?: CudaStream) => Work<Value>;
}

/** The same of a call that becomes a part of a graph. */
export interface BegunMoeCapture<Half, Value> {
  readonly captured: CapturedCall;
  /** As of `BegunMoeCall`; `where` is what errors say, unless it is that of the begin. */
  readonly half: (halves: number, limits: DeviceMoeCaptureOptions, where?: string) => Half;
  /** The addon has taken the first half, or both. */
  readonly begun: () => void;
  /** And the second. */
  readonly ended: () => Value;
}

export function launchBegun<Half>(
  { half, launched, dropped }: BegunMoeCall<Half, unknown>,
  halves: number,
  limits: MoeCallOptions,
  launch: (half: Half) => OperationId,
): OperationId {
  let operation: OperationId;
  try {
    operation = launch(half(halves, limits));
  } catch (error) {
    dropped?.();
    throw error;
  }
  launched();
  return operation;
}
