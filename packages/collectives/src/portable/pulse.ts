/**
 * Looks at all words for as long as there is something to see, so that waits of the transport are begun only when nothing comes.
 *
 * A transport may hold this thread for a moment whenever a wait begins, because what is awaited often comes at once (nvshmem does: half a millisecond and
 * more where ranks share cores). But what comes next may come from another peer than the one whose wait began: with a wait begun after every event,
 * the engine would mostly sit in waits for the wrong one.
 */

/** Since something was seen last: then waits are cheaper than looks. */
const QUIET_MS = 0.5;

export class Pulse {
  /** True if there was something. */
  readonly #look: () => boolean;
  readonly #onError: (error: unknown) => void;
  readonly #waiting: (() => void)[] = [];
  #lastSeen = 0;
  #beating = false;

  constructor(look: () => boolean, onError: (error: unknown) => void) {
    this.#look = look;
    this.#onError = onError;
  }

  /** Looks now. Nothing is thrown: half of the callers are timers. */
  look(): void {
    try {
      if (this.#look()) this.#lastSeen = performance.now();
    } catch (error) {
      this.#onError(error);
    }
  }

  /** Resolves when nothing has been seen for a while; one caller at a time, as each may hold the thread. */
  quiet(): Promise<void> {
    return new Promise((resolve) => {
      this.#waiting.push(resolve);
      if (this.#beating) return;
      this.#beating = true;
      setImmediate(() => this.#beat());
    });
  }

  #beat(): void {
    this.look();
    if (performance.now() - this.#lastSeen >= QUIET_MS) this.#waiting.shift()?.();
    if (this.#waiting.length > 0) setImmediate(() => this.#beat());
    else this.#beating = false;
  }
}
