/** The handle of a collective call. */
import {
  type AbortOptions,
  doneWork,
  EpError,
  formatRanks,
  isEpError,
  type Work,
  type WorkControl,
  type WorkStatus,
} from '@ep/core';

export interface CollectiveWork extends Work {
  /** Ranks of the group whose data is in the result, ascending, the same on all of them. None before the end, and none if it failed. */
  readonly contributors: readonly number[];
  /** Ranks of the group that are missing: not among the contributors, or those that the failure names as lost or as not having come. */
  readonly failedRanks: readonly number[];
}

type WaitLimits = AbortOptions & { readonly timeoutMs?: number };

const NOBODY: readonly number[] = [];

function ranksIn(value: unknown): readonly number[] {
  return Array.isArray(value) ? value.filter((rank) => typeof rank === 'number') : NOBODY;
}

/** What an error says about who is missing. */
function ranksMissing(error: unknown): readonly number[] {
  if (!isEpError(error)) return NOBODY;
  const ranks = [...new Set([...ranksIn(error.context.lost), ...ranksIn(error.context.awaited)])];
  return ranks.sort((a, b) => a - b);
}

/** An `EP_TIMEOUT` that says who did not come before anything else; other errors as they are. */
export function sayWhoIsMissing(error: unknown, op: string, size: number): unknown {
  if (!isEpError(error) || error.code !== 'EP_TIMEOUT') return error;
  const missing = ranksIn(error.context.awaited);
  if (missing.length === 0) return error;
  return new EpError('EP_TIMEOUT', `${op}: ${formatRanks(missing)} of ${size} did not come: ${error.message}`, {
    context: error.context,
    cause: error,
  });
}

function othersThan(contributors: readonly number[], size: number): readonly number[] {
  if (contributors.length === size) return NOBODY;
  return Array.from({ length: size }, (_, rank) => rank).filter((rank) => !contributors.includes(rank));
}

/** A thenable by its `wait`. */
abstract class Awaitable<T> {
  abstract wait(options?: WaitLimits): Promise<T>;

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

/** Ended when the call returned. No promise is made unless somebody waits. */
export class DoneCollective extends Awaitable<void> implements CollectiveWork {
  readonly op: string;
  readonly sequence: number;
  readonly contributors: readonly number[];
  readonly #size: number;

  constructor(op: string, sequence: number, contributors: readonly number[], size: number) {
    super();
    this.op = op;
    this.sequence = sequence;
    this.contributors = contributors;
    this.#size = size;
  }

  get status(): WorkStatus {
    return 'done';
  }

  get failedRanks(): readonly number[] {
    return othersThan(this.contributors, this.#size);
  }

  wait(options?: WaitLimits): Promise<void> {
    return doneWork(this.op, this.sequence).wait(options);
  }
}

/** Under way when the call returned. */
export class PendingCollective extends Awaitable<void> implements CollectiveWork {
  readonly #control: WorkControl;
  readonly #size: number;
  #contributors = NOBODY;
  #missing = NOBODY;

  constructor(control: WorkControl, size: number) {
    super();
    this.#control = control;
    this.#size = size;
  }

  get op(): string {
    return this.#control.work.op;
  }

  get sequence(): number {
    return this.#control.work.sequence;
  }

  get status(): WorkStatus {
    return this.#control.work.status;
  }

  get contributors(): readonly number[] {
    return this.#contributors;
  }

  get failedRanks(): readonly number[] {
    return this.#missing;
  }

  /** These three are for the one who made it, and do what those of WorkControl do. */
  resolve(contributors: readonly number[]): boolean {
    this.#contributors = contributors;
    this.#missing = othersThan(contributors, this.#size);
    return this.#control.resolve();
  }

  reject(reason: unknown): boolean {
    this.#missing = ranksMissing(reason);
    return this.#control.reject(reason);
  }

  abort(reason: unknown): boolean {
    this.#missing = ranksMissing(reason);
    return this.#control.abort(reason);
  }

  wait(options?: WaitLimits): Promise<void> {
    return this.#control.work.wait(options);
  }
}
