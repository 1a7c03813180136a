/** A look in the store for ranks that may have come: it ends where the store does not answer. */
import { EpError, interruptibleOn } from '@ep/core';
import type { LookLimits } from './engine.js';

export class Look {
  readonly #signal: AbortSignal | undefined;
  /** By the clock of `performance.now()`. */
  readonly #end: number;

  constructor({ timeoutMs = Number.POSITIVE_INFINITY, signal }: LookLimits = {}) {
    this.#signal = signal;
    this.#end = performance.now() + timeoutMs;
  }

  get hasEnded(): boolean {
    return this.#signal?.aborted === true || performance.now() >= this.#end;
  }

  /** Rejects where the limits end the look before this answer. */
  for<T>(answer: Promise<T>): Promise<T> {
    const timedOut = (): EpError => new EpError('EP_TIMEOUT', 'the store has not answered in time');
    const timeoutMs = Math.max(0, this.#end - performance.now());
    return interruptibleOn({ signals: [this.#signal], timeoutMs, where: 'look', timedOut }, answer);
  }
}
