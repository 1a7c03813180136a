/** Lifetimes: what is opened is closed, children before parents, and closing twice is fine. */
import { EpError } from './errors.js';
import { watchForLeak } from './leaks.js';
import { interruptibleOn } from './waiting.js';

export interface AbortOptions {
  /** Ends the operation: it rejects with `signal.reason`, untouched. */
  readonly signal?: AbortSignal;
}

/** `close()` drains (or says what it cut off) and releases; idempotent; the same as `[Symbol.asyncDispose]`. */
export interface Closeable extends AsyncDisposable {
  readonly closed: boolean;
  close(options?: AbortOptions): Promise<void>;
}

/** Waits for a close that is under way. The signal ends the wait, never the release: half-released objects help nobody. */
function waitForClose(closing: Promise<void>, options: AbortOptions): Promise<void> {
  if (options.signal === undefined) return closing;
  return interruptibleOn({ signals: [options.signal], where: 'close', timedOut: () => undefined }, closing);
}

type Disposer = () => unknown;

/** Things to close together, newest first. One failure is thrown as it is, several as an AggregateError; none stops the rest. */
export class CloseScope implements Closeable {
  readonly #entries = new Map<object, Disposer>();
  #closing: Promise<void> | undefined;
  #pruneAt = 32;

  get closed(): boolean {
    return this.#closing !== undefined;
  }

  /** Returns `resource`. Throws `EP_CLOSED` after `close()`; the caller then still owns the resource. */
  add<T extends AsyncDisposable | Disposable>(resource: T): T {
    const dispose =
      (resource as Partial<AsyncDisposable>)[Symbol.asyncDispose] ?? (resource as Disposable)[Symbol.dispose];
    this.#insert(resource, () => dispose.call(resource));
    return resource;
  }

  /** Runs `action` at its turn among what was added. */
  defer(action: Disposer): void {
    this.#insert({}, action);
  }

  /** Takes `resource` out, unclosed. True if it was there. */
  remove(resource: AsyncDisposable | Disposable): boolean {
    return this.#entries.delete(resource);
  }

  close(options: AbortOptions = {}): Promise<void> {
    if (this.#closing === undefined) {
      this.#closing = this.#closeAll();
      // Its callers get the failure; a caller that stopped waiting must not make it an unhandled rejection.
      this.#closing.catch(() => {});
    }
    return waitForClose(this.#closing, options);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #insert(key: object, dispose: Disposer): void {
    if (this.closed) throw new EpError('EP_CLOSED', 'scope: something was added after close()');
    if (this.#entries.size >= this.#pruneAt) {
      // Children that were closed on their own would otherwise pile up in a long-lived parent.
      for (const entry of this.#entries.keys())
        if ((entry as Partial<Closeable>).closed === true) this.#entries.delete(entry);
      this.#pruneAt = Math.max(32, 2 * this.#entries.size);
    }
    this.#entries.set(key, dispose);
  }

  async #closeAll(): Promise<void> {
    const errors: unknown[] = [];
    const newestFirst = [...this.#entries.values()].reverse();
    this.#entries.clear();
    for (const dispose of newestFirst) {
      try {
        await dispose();
      } catch (error) {
        errors.push(error);
      }
    }
    if (errors.length === 1) throw errors[0];
    if (errors.length > 1) throw new AggregateError(errors, `${errors.length} of ${newestFirst.length} closes failed`);
  }
}

/**
 * Base of everything that is opened. `close()` runs once, in this order: `closing` fires (waits inside end with `EP_ABORTED`), guarded operations
 * finish, children close newest first, `release()` runs.
 *
 * HAZARD: awaiting `this.close()` inside a guarded operation waits for itself.
 */
export abstract class Resource implements Closeable {
  readonly #label: string;
  readonly #forgetLeak: () => void;
  #closing: Promise<void> | undefined;
  #controller: AbortController | undefined;
  #children: CloseScope | undefined;
  #inFlight = 0;
  #drained: (() => void) | undefined;

  /** `label` names the object in messages, for example `file store`. */
  protected constructor(label: string) {
    this.#label = label;
    this.#forgetLeak = watchForLeak(this, label);
  }

  /** True from the moment that `close()` was called. */
  get closed(): boolean {
    return this.#closing !== undefined;
  }

  close(options: AbortOptions = {}): Promise<void> {
    if (this.#closing === undefined) {
      this.#forgetLeak();
      // Assigned before anything is called back, so that whoever is called sees `closed`.
      this.#closing = Promise.resolve().then(() => this.#closeAll());
      this.#closing.catch(() => {});
      this.#controller?.abort(this.#cutOff());
    }
    return waitForClose(this.#closing, options);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** Frees what this object holds; nothing is in flight any more and the children are closed. Called once. */
  protected abstract release(): void | Promise<void>;

  /** Fires when `close()` begins, with an `EP_ABORTED` error as its reason. */
  protected get closing(): AbortSignal {
    if (this.#controller === undefined) {
      this.#controller = new AbortController();
      if (this.closed) this.#controller.abort(this.#cutOff());
    }
    return this.#controller.signal;
  }

  /** Closed before this object is. */
  protected get children(): CloseScope {
    this.#children ??= new CloseScope();
    return this.#children;
  }

  /** Throws `EP_CLOSED` after `close()`. */
  protected checkOpen(operation: string): void {
    if (this.closed) {
      throw new EpError('EP_CLOSED', `${this.#label}: ${operation} was called after close()`, {
        context: { object: this.#label, operation },
      });
    }
  }

  /** Checks that this is open and delays `close()` until the returned function was called. */
  protected hold(operation: string): () => void {
    this.checkOpen(operation);
    this.#inFlight++;
    let held = true;
    return () => {
      if (!held) return;
      held = false;
      this.#inFlight--;
      if (this.#inFlight === 0) this.#drained?.();
    };
  }

  /** Runs `body` while holding this object open. */
  protected async guard<T>(operation: string, body: () => T | Promise<T>): Promise<T> {
    const letGo = this.hold(operation);
    try {
      return await body();
    } finally {
      letGo();
    }
  }

  #cutOff(): EpError {
    return new EpError('EP_ABORTED', `${this.#label} was closed`, { context: { object: this.#label } });
  }

  async #closeAll(): Promise<void> {
    if (this.#inFlight > 0) {
      await new Promise<void>((resolve) => {
        this.#drained = resolve;
      });
    }
    const errors: unknown[] = [];
    for (const step of [() => this.#children?.close(), () => this.release()]) {
      try {
        await step();
      } catch (error) {
        errors.push(error);
      }
    }
    if (errors.length === 1) throw errors[0];
    if (errors.length > 1) throw new AggregateError(errors, `${this.#label}: closing failed in more than one place`);
  }
}
