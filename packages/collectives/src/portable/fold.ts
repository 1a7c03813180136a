/** Folds the same elements of several ranks, chunk by chunk, in one order. */
import { type DType, elementBytes, viewStorage } from '@ep/core';
import type { Elements } from '../engine.js';
import type { ReduceOp } from '../reduce-op.js';
import { type Chunk, part, type Sink } from './chunks.js';
import type { FoldOrder } from './fold-order.js';

export interface FoldInit {
  readonly dtype: DType;
  readonly op: ReduceOp;
  readonly order: FoldOrder;
  readonly target: Elements;
  /** The part of this rank; may be `target`. */
  readonly own: Elements;
  readonly rank: number;
  /** All whose parts are folded, this rank among them, ascending. */
  readonly contributors: readonly number[];
  /** Bytes from 0 to `byteOffset` of the target are final. */
  readonly onFolded: (byteOffset: number) => void;
  /** Bytes of the target, from its beginning, that may be written by now; `advance` says that there are more. All of them unless given. */
  readonly writable?: () => number;
}

interface Held {
  readonly payload: Uint8Array;
  readonly release: () => void;
}

export class Fold {
  readonly #init: FoldInit;
  readonly #held = new Map<number, Held[]>();
  /** Of the target, in elements. HAZARD: one that is transferred meanwhile has none left, and would pass for complete: the call would wait for what has come. */
  readonly #length: number;
  #folded = 0;
  /** The part of this rank is there. */
  #begun = false;

  constructor(init: FoldInit) {
    this.#init = init;
    this.#length = init.target.length;
    for (const rank of init.contributors) if (rank !== init.rank) this.#held.set(rank, []);
  }

  get complete(): boolean {
    return this.#folded === this.#length;
  }

  /** From now on the part of this rank is read; what others have sent is held until then. Alone, there is nothing to wait for. */
  begin(): void {
    const { contributors, target, own, dtype, op, order, onFolded } = this.#init;
    this.#begun = true;
    if (contributors.length > 1 || this.complete) {
      this.#fold();
      return;
    }
    order(dtype, op, target, [own]);
    this.#folded = target.length;
    onFolded(target.byteLength);
  }

  /** More of the target may be written. */
  advance(): void {
    this.#fold();
  }

  /** All sources cut their parts alike, so the chunks of all that are oldest cover the same elements. */
  sink(rank: number): Sink {
    const held = this.#held.get(rank)!;
    const lacks = (): boolean => !this.complete && held.length === 0;
    return {
      get lacks() {
        return lacks();
      },
      accept: ({ payload }: Chunk, release: () => void): void => {
        held.push({ payload, release });
        this.#fold();
      },
      drop: () => {
        for (const { release } of held.splice(0)) release();
      },
    };
  }

  #fold(): void {
    if (!this.#begun || this.complete) return;
    const { dtype, op, order, target, own, rank, contributors, onFolded, writable } = this.#init;
    const queues = [...this.#held.values()];
    while (queues.every((queue) => queue.length > 0)) {
      const byteLength = queues[0]![0]!.payload.byteLength;
      const begin = this.#folded;
      const end = begin + byteLength / elementBytes(dtype);
      if (writable !== undefined && writable() < end * elementBytes(dtype)) return;
      const sources = contributors.map((peer) => {
        if (peer === rank) return part(own, begin, end);
        const { payload } = this.#held.get(peer)![0]!;
        return viewStorage(dtype, payload.buffer, payload.byteOffset, end - begin);
      });
      order(dtype, op, part(target, begin, end), sources);
      this.#folded = end;
      for (const queue of queues) queue.shift()!.release();
      onFolded(end * elementBytes(dtype));
    }
  }
}
