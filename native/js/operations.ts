/** Native operations as promises: one batched wake-up per environment completes them. */
import { checkSignal, type EpCode, EpError } from '@ep/core';
import type { Binding, OperationId, Outcome } from './binding.js';

/** `EP_STATUS_*` of native/include/ep/abi/status.h as error codes; 0 and 1 are not errors. */
const CODE_OF_STATUS: readonly (EpCode | undefined)[] = [
  undefined,
  undefined,
  'EP_TIMEOUT',
  'EP_ABORTED',
  'EP_PEER_LOST',
  'EP_CLOSED',
  'EP_INVALID_ARGUMENT',
  'EP_MEMORY_LIMIT',
  'EP_SYSTEM',
  'EP_ABI_MISMATCH',
  'EP_PEER_LOST',
  'EP_BUSY',
  'EP_MISMATCH',
  'EP_EVICTED',
  'EP_CAPACITY',
];
const STATUS_NAMES =
  'ok pending timeout aborted peer-lost closed invalid memory-limit system abi-mismatch stale-handle busy mismatch evicted capacity'.split(
    ' ',
  );

const ABORTED = STATUS_NAMES.indexOf('aborted');

export function codeOfStatus(status: number): EpCode {
  return CODE_OF_STATUS[status] ?? 'EP_SYSTEM';
}

export function nativeError(status: number, errno: number, message: string): EpError {
  return new EpError(codeOfStatus(status), message, {
    native: { status, name: STATUS_NAMES[status] ?? 'unknown', ...(errno !== 0 ? { errno } : {}) },
    ...(errno !== 0 ? { context: { errno } } : {}),
  });
}

type Settle = (outcome: Outcome) => void;

/** The operations pending in this environment (main thread or worker). */
export class Operations {
  readonly #binding: Binding;
  readonly #pending = new Map<OperationId, Settle>();

  constructor(binding: Binding) {
    this.#binding = binding;
    binding.configure((ids, words, messages) => this.#complete(ids, words, messages), nativeError);
  }

  get pending(): number {
    return this.#pending.size;
  }

  /** `settle` runs once, on this thread, when the operation has ended in whatever way. */
  track(id: OperationId, settle: Settle): void {
    this.#pending.set(id, settle);
  }

  /**
   * Resolves with the outcome, whatever its status: the caller knows best how to name what went wrong. An abort by `signal` cancels the operation,
   * and the promise rejects with `signal.reason` once the operation has really ended by it, so that its buffers are free again; what has ended otherwise before is told as it has ended.
   */
  run(start: () => OperationId, signal?: AbortSignal): Promise<Outcome> {
    if (signal?.aborted) return Promise.reject(signal.reason);
    return new Promise<Outcome>((resolve, reject) => {
      // HAZARD: before the operation starts, or nobody would await it.
      checkSignal(signal, 'operation');
      const id = start();
      const onAbort = (): void => this.#binding.cancel(id);
      signal?.addEventListener('abort', onAbort, { once: true });
      this.track(id, (outcome) => {
        signal?.removeEventListener('abort', onAbort);
        // HAZARD: it may have ended before the cancellation reached it: well, or by what its caller must hear of, as the loss of a peer.
        if (outcome.status === ABORTED && signal?.aborted) reject(signal.reason);
        else resolve(outcome);
      });
    });
  }

  #complete(ids: Float64Array, words: BigUint64Array, messages: Record<number, string>): void {
    for (let i = 0; i * 4 < ids.length; ++i) {
      const id = ids[i * 4]!;
      const settle = this.#pending.get(id);
      this.#pending.delete(id);
      const message = messages[i];
      settle?.({
        status: ids[i * 4 + 1]!,
        rank: ids[i * 4 + 2]!,
        stage: ids[i * 4 + 3]!,
        expected: words[i * 2]!,
        found: words[i * 2 + 1]!,
        ...(message === undefined ? {} : { message }),
      });
    }
  }
}
