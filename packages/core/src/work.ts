/** The handle of an operation under way. */
import { publish } from './diagnostics.js';
import { EpError, isEpError } from './errors.js';
import { loopIsDue } from './loop.js';
import type { AbortOptions } from './scope.js';
import { interruptible } from './waiting.js';

export type WorkStatus = 'pending' | 'done' | 'failed' | 'aborted';

/**
 * Awaitable: `await group.allReduce(x)` waits for the result, and keeping the Work is how one overlaps.
 *
 * The promise behind it is made at the first `then`, `catch`, `finally` or `wait`: an operation that nobody looks at never becomes an unhandled
 * rejection. Its failure is kept by the owner instead and thrown, with `cause`, by the owner's next call and by its `close()`.
 */
export interface Work<T = void> extends PromiseLike<T> {
  readonly op: string;
  /** Number of the operation within its owner. Not a bigint: counting in those would allocate one for every call. */
  readonly sequence: number;
  readonly status: WorkStatus;
  /** `timeoutMs` bounds this wait only, not the operation. */
  wait(options?: AbortOptions & { readonly timeoutMs?: number }): Promise<T>;
  catch<R = never>(onRejected?: (reason: unknown) => R | PromiseLike<R>): Promise<T | R>;
  finally(onFinally?: () => void): Promise<T>;
}

/** The end of a Work that its maker holds. Only the first of `resolve`, `reject` and `abort` counts; the others return false. */
export interface WorkControl<T = void> {
  readonly work: Work<T>;
  resolve(value: T): boolean;
  /** The operation failed. If nobody looks, the owner keeps `reason` and reports it. */
  reject(reason: unknown): boolean;
  /** The operation was cut off on purpose. Rejects who waits; never reported by the owner, because a cut is a consequence, not a cause. */
  abort(reason: unknown): boolean;
}

interface Observer<T> {
  readonly fulfilled: (value: T) => void;
  readonly rejected: (reason: unknown) => void;
}

/** What an owner needs of a Work. */
interface Owned {
  readonly op: string;
  readonly sequence: number;
  abort(reason: unknown): boolean;
}

class WorkState<T> implements Work<T>, WorkControl<T> {
  readonly op: string;
  readonly sequence: number;
  readonly #owner: WorkOwner;
  readonly #hurry: (() => void) | undefined;
  /** Made when somebody looks: most Works of a busy endpoint are never looked at. */
  #observers: Set<Observer<T>> | undefined;
  #status: WorkStatus = 'pending';
  /** The value when done, the reason when failed or aborted. */
  #outcome: unknown;

  constructor(op: string, sequence: number, owner: WorkOwner, hurry: (() => void) | undefined) {
    this.op = op;
    this.sequence = sequence;
    this.#owner = owner;
    this.#hurry = hurry;
  }

  get work(): Work<T> {
    return this;
  }

  get status(): WorkStatus {
    return this.#status;
  }

  resolve(value: T): boolean {
    return this.#settle('done', value, (observer) => observer.fulfilled(value));
  }

  reject(reason: unknown): boolean {
    const seen = (this.#observers?.size ?? 0) > 0;
    if (!this.#settle('failed', reason, (observer) => observer.rejected(reason))) return false;
    if (!seen) ownerKeep(this.#owner, this, reason);
    return true;
  }

  abort(reason: unknown): boolean {
    return this.#settle('aborted', reason, (observer) => observer.rejected(reason));
  }

  // biome-ignore lint/suspicious/noThenProperty: a Work is awaitable by design.
  then<R = T, E = never>(
    onFulfilled?: ((value: T) => R | PromiseLike<R>) | null,
    onRejected?: ((reason: unknown) => E | PromiseLike<E>) | null,
  ): Promise<R | E> {
    return this.wait().then(onFulfilled, onRejected);
  }

  catch<R = never>(onRejected?: (reason: unknown) => R | PromiseLike<R>): Promise<T | R> {
    return this.wait().catch(onRejected);
  }

  finally(onFinally?: () => void): Promise<T> {
    return this.wait().finally(onFinally);
  }

  wait(options: AbortOptions & { readonly timeoutMs?: number } = {}): Promise<T> {
    const { signal, timeoutMs } = options;
    if (signal === undefined && timeoutMs === undefined) {
      // `await work` of an operation that completed inline: nothing to listen for, nothing to clean up.
      return new Promise<T>((resolve, reject) => {
        this.#look(resolve, reject);
      });
    }
    const where = `wait for ${this.op} ${this.sequence}`;
    return interruptible<T>(
      {
        signals: [signal],
        timeoutMs,
        where,
        timedOut: () =>
          new EpError('EP_TIMEOUT', `${where}: still pending after ${timeoutMs} ms; the operation goes on`, {
            context: { op: this.op, sequence: this.sequence, timeoutMs },
          }),
      },
      (resolve, reject) => this.#look(resolve, reject),
    );
  }

  /** Settles now, or when this ends; returns how to stop looking. A wait that was cut off no longer counts as somebody who looks. */
  #look(fulfilled: (value: T) => void, rejected: (reason: unknown) => void): (() => void) | undefined {
    if (this.#status === 'done') fulfilled(this.#outcome as T);
    else if (this.#status !== 'pending') {
      ownerForget(this.#owner, this);
      rejected(this.#outcome);
    } else {
      const observer: Observer<T> = { fulfilled, rejected };
      this.#observers ??= new Set();
      const observers = this.#observers.add(observer);
      this.#hurry?.();
      return () => observers.delete(observer);
    }
    return undefined;
  }

  #settle(status: WorkStatus, outcome: unknown, tell: (observer: Observer<T>) => void): boolean {
    if (this.#status !== 'pending') return false;
    this.#status = status;
    this.#outcome = outcome;
    ownerSettled(this.#owner, this);
    if (this.#observers) for (const observer of [...this.#observers]) tell(observer);
    return true;
  }
}

// Set by WorkOwner's static block: a Work reports to its owner through what the owner's users cannot call.
let ownerStarted: (owner: WorkOwner, work: Owned) => void;
let ownerSettled: (owner: WorkOwner, work: Owned) => void;
let ownerKeep: (owner: WorkOwner, work: Owned, reason: unknown) => void;
let ownerForget: (owner: WorkOwner, work: Owned) => void;

/** Failures kept in full; beyond it they are counted, or a loop that never looks would fill the memory. */
const KEPT_FAILURES = 16;

/**
 * Keeps the Works of one object (an endpoint, a group, a dispatcher). Its calls begin with `check()`, its `close()` ends with `close()` of
 * this, so that a failure nobody looked at is reported exactly once.
 */
export class WorkOwner {
  readonly #label: string;
  readonly #pending = new Set<Owned>();
  readonly #kept = new Map<Owned, unknown>();
  readonly #idle = new Set<() => void>();
  #unkept = 0;

  static {
    ownerStarted = (owner, work) => {
      owner.#pending.add(work);
    };
    ownerSettled = (owner, work) => {
      owner.#pending.delete(work);
      if (owner.#pending.size === 0) for (const wake of [...owner.#idle]) wake();
    };
    ownerKeep = (owner, work, reason) => {
      if (owner.#kept.size < KEPT_FAILURES) owner.#kept.set(work, reason);
      else owner.#unkept++;
      publish('ep:work:unobserved', () => ({ owner: owner.#label, op: work.op, sequence: work.sequence, reason }));
    };
    ownerForget = (owner, work) => {
      owner.#kept.delete(work);
    };
  }

  /** `label` names the owner in messages, for example `endpoint to rank 3`. */
  constructor(label: string) {
    this.#label = label;
  }

  /** Works that have not ended. */
  get pending(): number {
    return this.#pending.size;
  }

  /** Throws the failures that nobody looked at, once: code and context of the first, all of them as `cause`. */
  check(): void {
    if (this.#kept.size === 0) return; // the usual case, on every call of an endpoint
    const kept = [...this.#kept];
    const total = kept.length + this.#unkept;
    this.#kept.clear();
    this.#unkept = 0;
    const [first, reason] = kept[0]!;
    const text = reason instanceof Error ? reason.message : String(reason);
    const more = total > 1 ? ` (and ${total - 1} later ones)` : '';
    // A foreign error has no code of ours; what is certain is that it cut the operation off.
    throw new EpError(
      isEpError(reason) ? reason.code : 'EP_ABORTED',
      `${this.#label}: ${first.op} ${first.sequence} failed earlier and nobody waited for it${more}: ${text}`,
      {
        context: {
          ...(isEpError(reason) ? reason.context : {}),
          op: first.op,
          sequence: first.sequence,
          failures: total,
        },
        cause:
          total > 1
            ? new AggregateError(
                kept.map(([, reason]) => reason),
                `${total} failures`,
              )
            : reason,
      },
    );
  }

  /** Ends all pending works with `reason`; returns how many there were. */
  abort(reason: unknown): number {
    const works = [...this.#pending];
    for (const work of works) work.abort(reason);
    return works.length;
  }

  /** Resolves when no work is pending. */
  idle(options: AbortOptions & { readonly timeoutMs?: number } = {}): Promise<void> {
    const where = `${this.#label}: drain`;
    return interruptible<void>(
      {
        signals: [options.signal],
        timeoutMs: options.timeoutMs,
        where,
        timedOut: () => {
          const ops = [...this.#pending].map((work) => `${work.op} ${work.sequence}`);
          const shown = `${ops.slice(0, 8).join(', ')}${ops.length > 8 ? ', …' : ''}`;
          return new EpError('EP_TIMEOUT', `${where}: ${ops.length} pending after ${options.timeoutMs} ms: ${shown}`, {
            context: { pending: ops, timeoutMs: options.timeoutMs },
          });
        },
      },
      (resolve) => {
        if (this.#pending.size === 0) {
          resolve();
          return undefined;
        }
        const wake = () => resolve();
        this.#idle.add(wake);
        return () => this.#idle.delete(wake);
      },
    );
  }

  /** Drains, then reports as `check()`. If the signal fires first, what is pending is aborted with its reason, which is also thrown. */
  async close(options: AbortOptions = {}): Promise<void> {
    try {
      await this.idle(options);
    } catch (error) {
      this.abort(error);
      throw error;
    }
    this.check();
  }
}

/** Starts a Work. `sequence` is the number of the operation within its owner, as messages and the flight recorder show it. */
export function createWork<T = void>(init: {
  readonly op: string;
  readonly sequence: number;
  readonly owner: WorkOwner;
  /** Called each time that somebody begins to wait for it while it is pending: may end it before it returns, and must not throw. */
  readonly hurry?: () => void;
}): WorkControl<T> {
  const state = new WorkState<T>(init.op, init.sequence, init.owner, init.hurry);
  ownerStarted(init.owner, state);
  return state;
}

/** An operation that had ended when its call returned: nothing to keep, nothing to drain. */
class DoneWork<T> implements Work<T> {
  readonly op: string;
  readonly sequence: number;
  readonly #value: T;

  constructor(op: string, sequence: number, value: T) {
    this.op = op;
    this.sequence = sequence;
    this.#value = value;
  }

  get status(): WorkStatus {
    return 'done';
  }

  wait(options: AbortOptions = {}): Promise<T> {
    if (options.signal?.aborted) return Promise.reject(options.signal.reason);
    // A chain of awaits of done works never leaves the microtasks: timers and aborts would starve.
    return loopIsDue() ? new Promise((resolve) => setImmediate(resolve, this.#value)) : Promise.resolve(this.#value);
  }

  // biome-ignore lint/suspicious/noThenProperty: a Work is awaitable by design.
  then<R = T, E = never>(
    onFulfilled?: ((value: T) => R | PromiseLike<R>) | null,
    onRejected?: ((reason: unknown) => E | PromiseLike<E>) | null,
  ): Promise<R | E> {
    return this.wait().then(onFulfilled, onRejected);
  }

  catch<R = never>(onRejected?: (reason: unknown) => R | PromiseLike<R>): Promise<T | R> {
    return this.wait().catch(onRejected);
  }

  finally(onFinally?: () => void): Promise<T> {
    return this.wait().finally(onFinally);
  }
}

/** A Work that is done from the start; costs an object, where `createWork` keeps books with its owner. */
export function doneWork(op: string, sequence: number): Work;
export function doneWork<T>(op: string, sequence: number, value: T): Work<T>;
export function doneWork<T>(op: string, sequence: number, value?: T): Work<T | undefined> {
  return new DoneWork(op, sequence, value);
}
