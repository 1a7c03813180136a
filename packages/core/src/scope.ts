/** Lifetimes: what is opened is closed, children before parents, and closing twice is fine. */

export interface AbortOptions {
  /** Ends the operation: it rejects with `signal.reason`, untouched. */
  readonly signal?: AbortSignal;
}

/** `close()` drains (or says what it cut off) and releases; idempotent; the same as `[Symbol.asyncDispose]`. */
export interface Closeable extends AsyncDisposable {
  readonly closed: boolean;
  close(options?: AbortOptions): Promise<void>;
}
