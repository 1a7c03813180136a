/** Who waits for requests that end in the order in which they were made. */
import type { OperationId, Outcome } from '../binding.js';
import { native } from '../native.js';

/** A request whose end somebody is to hear of. */
export interface AwaitedRequest {
  readonly request: number;
  readonly settle: (end: Outcome) => void;
  readonly fail: (reason: unknown) => void;
}

export interface RequestLooks {
  /** How the request has ended; undefined: it has not. */
  readonly look: (request: number) => Outcome | undefined;
  /** An operation that ends with the request. */
  readonly watch: (request: number) => OperationId;
}

/**
 * Another thread watches for the oldest request alone, since each watch and each end of one is a switch of threads; the next one is looked for when that has ended. It does so from the loop's next turn on:
 * whoever awaits a request meanwhile looks for its end himself (`settle`).
 */
export class RequestEnds {
  readonly #looks: RequestLooks;
  /** Oldest first. */
  readonly #waiting: AwaitedRequest[] = [];
  /** Of those, the ones for which the loop has not turned yet. */
  readonly #fresh = new Set<AwaitedRequest>();
  #isWatched = false;

  constructor(looks: RequestLooks) {
    this.#looks = looks;
  }

  add(one: AwaitedRequest): void {
    if (this.#fresh.size === 0) setImmediate(() => this.#turn());
    this.#waiting.push(one);
    this.#fresh.add(one);
  }

  /** Whether the loop has not turned since it was added. */
  isFresh(one: AwaitedRequest): boolean {
    return this.#fresh.has(one);
  }

  /** Of one that is fresh: its end was seen. */
  settle(one: AwaitedRequest, end: Outcome): void {
    this.#fresh.delete(one);
    this.#waiting.splice(this.#waiting.lastIndexOf(one), 1);
    one.settle(end);
  }

  #turn(): void {
    this.#fresh.clear();
    this.#advance();
  }

  #advance(): void {
    const { look, watch } = this.#looks;
    for (;;) {
      const oldest = this.#waiting[0];
      if (oldest === undefined || this.#isWatched || this.#fresh.has(oldest)) return;
      const end = look(oldest.request);
      if (end !== undefined) {
        this.#waiting.shift();
        oldest.settle(end);
        continue;
      }
      try {
        native().operations.track(watch(oldest.request), (found) => this.#ended(oldest, found));
        this.#isWatched = true;
      } catch (reason) {
        for (const one of this.#take()) one.fail(reason);
      }
      return;
    }
  }

  #ended(oldest: AwaitedRequest, end: Outcome): void {
    this.#isWatched = false;
    if (end.status === 0) {
      this.#waiting.shift();
      oldest.settle(end);
    } else {
      // Nobody watches any more, for whatever reason: what is younger has not ended before it.
      for (const one of this.#take()) one.settle(end);
    }
    this.#advance();
  }

  /** All for which the loop has turned. */
  #take(): AwaitedRequest[] {
    const fresh = this.#waiting.findIndex((one) => this.#fresh.has(one));
    return this.#waiting.splice(0, fresh < 0 ? this.#waiting.length : fresh);
  }
}
