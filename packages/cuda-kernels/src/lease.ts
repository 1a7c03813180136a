/** Received tensors, lent until `release()`. */
import type { Tensor } from '@ep/core';

/**
 * Peers write into this rank's receive tensors directly, so what arrived is lent: until `release()` nobody writes into it, however far ahead peers run.
 * After `release()`, `resync()` or the dispatcher's `close()` the tensors must not be used: their content is whatever comes next.
 */
export interface Lease {
  /** By part name. */
  readonly tensors: Readonly<Record<string, Tensor>>;
  /** Bytes of this call that had to be copied before they could be sent (sources in ordinary JS memory). */
  readonly stagedBytes: number;
  readonly released: boolean;
  /** Grants credit to the senders. Calling it again does nothing. */
  release(): void;
}

/** One slot of the dispatcher's memory. */
export class LeaseSlot<T = Tensor> {
  readonly index: number;
  /** Calls that have used it in this epoch. */
  uses = 0;
  held: HeldLease<T> | undefined;

  constructor(index: number) {
    this.index = index;
  }
}

export class HeldLease<T = Tensor> {
  readonly tensors: Readonly<Record<string, T>>;
  readonly stagedBytes: number;
  #give: (() => void) | undefined;

  constructor(tensors: Readonly<Record<string, T>>, stagedBytes: number, give: () => void) {
    this.tensors = tensors;
    this.stagedBytes = stagedBytes;
    this.#give = give;
  }

  get released(): boolean {
    return this.#give === undefined;
  }

  release(): void {
    const give = this.#give;
    this.#give = undefined;
    give?.();
  }

  /** Takes the lease back without granting credit: its epoch is over. */
  revoke(): void {
    this.#give = undefined;
  }
}
