/** The handle of an operation under way. */
import type { AbortOptions } from './scope.js';

export type WorkStatus = 'pending' | 'done' | 'failed' | 'aborted';

/**
 * Awaitable: `await group.allReduce(x)` waits for the result, and keeping the Work is how one overlaps.
 *
 * The promise behind it is made at the first `then`, `catch`, `finally` or `wait`: an operation that nobody looks at never becomes an unhandled
 * rejection. Its failure is kept by the owner instead and thrown, with `cause`, by the owner's next call and by its `close()`.
 */
export interface Work<T = void> extends PromiseLike<T> {
  readonly op: string;
  readonly sequence: bigint;
  readonly status: WorkStatus;
  /** `timeoutMs` bounds this wait only, not the operation. */
  wait(options?: AbortOptions & { readonly timeoutMs?: number }): Promise<T>;
  catch<R = never>(onRejected?: (reason: unknown) => R | PromiseLike<R>): Promise<T | R>;
  finally(onFinally?: () => void): Promise<T>;
}
