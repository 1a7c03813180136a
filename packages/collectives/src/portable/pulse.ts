/**
 * Looks at all words for as long as there is something to see, so that waits of the transport are begun only when nothing comes.
 *
 * A transport may hold this thread for a moment whenever a wait begins, because what is awaited often comes at once (nvshmem does: a millisecond and
 * more where ranks share cores). But what comes next may come from another peer than the one whose wait began: with a wait begun after every event,
 * the engine would mostly sit in waits for the wrong one. So where the transport can, it is held for all of them at once between two looks: ranks that
 * outnumber their cores would otherwise look at words on cores that those need who are to write them.
 *
 * HAZARD: only while no other engine looks on this thread: what this one awaits may be what that one has yet to do, and it would be held up each time.
 */

/** Since something was seen last: then waits are cheaper than looks. */
const QUIET_MS = 0.5;
/** What was seen so lately need not be looked at again before a call that is one of many: over a network each look asks the kernel. */
const LATELY_MS = 0.25;
/** Looks say nothing of the loss of a peer, waits do: however much comes from the others, one begins this often. */
const LONGEST_MS = 50;

/** Engines that look, of this thread. */
let looking = 0;

export interface PulseInit {
  /** True if there was something. */
  readonly look: () => boolean;
  /** Returns when there is something to see, or after a moment. */
  readonly hold: () => void;
  readonly onError: (error: unknown) => void;
}

export class Pulse {
  readonly #init: PulseInit;
  readonly #waiting: (() => void)[] = [];
  #lastSeen = 0;
  #lastLook = 0;
  /** When a wait was last let go, or the looks began. */
  #lastWait = 0;
  #beating = false;

  constructor(init: PulseInit) {
    this.#init = init;
  }

  /** Looks now. True if there was something. Nothing is thrown: half of the callers are timers. */
  look(): boolean {
    // HAZARD: from before it, since this rank may be stopped in it, behind the words that it has read.
    this.#lastLook = performance.now();
    let seen = false;
    try {
      seen = this.#init.look();
    } catch (error) {
      this.#init.onError(error);
    }
    if (seen) this.#lastSeen = performance.now();
    return seen;
  }

  /** Looks, unless it has just begun to: so it does behind a pause of this rank, in which much may have been told. */
  lookLately(): void {
    if (performance.now() - this.#lastLook >= LATELY_MS) this.look();
  }

  /** Resolves when nothing has been seen for a while, or much for long; one caller at a time, as each may hold the thread. */
  quiet(): Promise<void> {
    return new Promise((resolve) => {
      this.#waiting.push(resolve);
      if (this.#beating) return;
      this.#beating = true;
      looking++;
      this.#lastWait = performance.now();
      setImmediate(() => this.#beat());
    });
  }

  #beat(): void {
    if (!this.look() && looking === 1 && !this.#isQuiet()) {
      this.#hold();
      this.look();
    }
    const now = performance.now();
    if (this.#isQuiet() || now - this.#lastWait >= LONGEST_MS) {
      this.#lastWait = now;
      this.#waiting.shift()?.();
    }
    if (this.#waiting.length > 0) {
      setImmediate(() => this.#beat());
      return;
    }
    this.#beating = false;
    looking--;
  }

  #isQuiet(): boolean {
    return performance.now() - this.#lastSeen >= QUIET_MS;
  }

  #hold(): void {
    try {
      this.#init.hold();
    } catch (error) {
      this.#init.onError(error);
    }
  }
}
