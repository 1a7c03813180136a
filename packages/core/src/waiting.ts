/** Waits that always end: by their value, by an abort, or by a deadline. */
import { defaultMaxListeners, getMaxListeners, setMaxListeners } from 'node:events';
import { invalid } from './errors.js';

/** setTimeout fires at once when it is asked for more. */
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** `timeoutMs` as it will be used, `Infinity` if absent. Throws `EP_INVALID_ARGUMENT`. */
export function checkTimeout(timeoutMs: number | undefined, where: string): number {
  if (timeoutMs === undefined) return Number.POSITIVE_INFINITY;
  if (typeof timeoutMs === 'number' && timeoutMs >= 0) return timeoutMs;
  throw invalid('timeoutMs', {
    where,
    expected: 'a number of milliseconds of at least 0, or Infinity',
    found: timeoutMs,
  });
}

/** Throws `EP_INVALID_ARGUMENT` for a signal that is none; there need not be one. */
export function checkSignal(signal: unknown, where: string): void {
  if (signal === undefined || signal instanceof AbortSignal) return;
  throw invalid('signal', { where, expected: 'an AbortSignal', found: signal });
}

/** Calls `fire` once after `ms`; returns the cancellation. */
function startTimer(ms: number, fire: () => void): () => void {
  if (ms === Number.POSITIVE_INFINITY) return () => {};
  let timer: NodeJS.Timeout;
  const arm = (left: number): void => {
    timer = setTimeout(
      () => (left > LONGEST_TIMER_MS ? arm(left - LONGEST_TIMER_MS) : fire()),
      Math.min(left, LONGEST_TIMER_MS),
    );
  };
  arm(ms);
  return () => clearTimeout(timer);
}

function listenerLimit(signal: AbortSignal): number {
  try {
    return getMaxListeners(signal);
  } catch {
    // Node 20 throws where the limit was set to 0, which means none.
    return Number.POSITIVE_INFINITY;
  }
}

/**
 * Many operations wait on one signal at once, and each takes its listener away when it ends: Node's warning of a leak from the 11th on would be
 * false. A limit that somebody set stays.
 */
export function onAbortOf(signal: AbortSignal, listener: (event: Event) => void): void {
  if (listenerLimit(signal) === defaultMaxListeners) setMaxListeners(Number.POSITIVE_INFINITY, signal);
  signal.addEventListener('abort', listener);
}

export interface Limits {
  /** Any of these ends the wait with its `reason`, untouched. */
  readonly signals: readonly (AbortSignal | undefined)[];
  /** `undefined` and `Infinity` mean no deadline; 0 means: look once. */
  readonly timeoutMs?: number | undefined;
  /** Names the wait in the error for a bad `timeoutMs`. */
  readonly where: string;
  /** Made when the deadline passes, so that it can say what had arrived by then. */
  readonly timedOut: () => unknown;
}

/**
 * A promise that `start` settles, unless an abort or the deadline comes first. `start` may return a clean-up, which runs exactly once, however
 * the wait ends. Nothing is started if a signal was aborted before.
 */
export function interruptible<T>(
  limits: Limits,
  start: (resolve: (value: T) => void, reject: (reason: unknown) => void) => (() => void) | undefined,
): Promise<T> {
  return new Promise<T>((resolve, reject) => {
    const timeoutMs = checkTimeout(limits.timeoutMs, limits.where);
    const signals = limits.signals.filter((signal) => signal !== undefined);
    for (const signal of signals) checkSignal(signal, limits.where);
    const aborted = signals.find((signal) => signal.aborted);
    if (aborted !== undefined) {
      reject(aborted.reason);
      return;
    }
    let ended = false;
    let cleanUp: (() => void) | undefined;
    let stopTimer: (() => void) | undefined;
    const end = (): boolean => {
      if (ended) return false;
      ended = true;
      for (const signal of signals) signal.removeEventListener('abort', onAbort);
      stopTimer?.();
      cleanUp?.();
      return true;
    };
    const onAbort = (event: Event): void => {
      if (end()) reject((event.target as AbortSignal).reason);
    };
    for (const signal of signals) onAbortOf(signal, onAbort);
    try {
      cleanUp = start(
        (value) => {
          if (end()) resolve(value);
        },
        (reason) => {
          if (end()) reject(reason);
        },
      );
    } catch (error) {
      if (end()) reject(error);
      return;
    }
    if (ended) cleanUp?.();
    else
      stopTimer = startTimer(timeoutMs, () => {
        const reason = limits.timedOut();
        if (end()) reject(reason);
      });
  });
}

/** Waits for a promise that goes on by itself when the wait is cut off; its later rejection is then nobody's. */
export function interruptibleOn<T>(limits: Limits, promise: Promise<T>): Promise<T> {
  return interruptible(limits, (resolve, reject) => {
    promise.then(resolve, reject);
    return undefined;
  });
}

/** One signal out of several, as AbortSignal.any; `unlink` drops the listeners, which AbortSignal.any keeps as long as its sources live. */
export function linkSignals(...sources: readonly (AbortSignal | undefined)[]): {
  readonly signal: AbortSignal;
  readonly unlink: () => void;
} {
  const controller = new AbortController();
  const signals = sources.filter((signal) => signal !== undefined);
  const onAbort = (event: Event): void => controller.abort((event.target as AbortSignal).reason);
  for (const signal of signals) {
    if (signal.aborted) controller.abort(signal.reason);
    else onAbortOf(signal, onAbort);
  }
  return {
    signal: controller.signal,
    unlink: () => {
      for (const signal of signals) signal.removeEventListener('abort', onAbort);
    },
  };
}
