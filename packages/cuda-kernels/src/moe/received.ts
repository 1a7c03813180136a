/** What calls of a MoE buffer hand out. */
import { EpError, type Tensor, type Work } from '@ep/core';
import type { MoeDType } from './options.js';
import type { RoutingArrays } from './routing.js';

/**
 * Choices and places of a dispatch, for later dispatches of the same choices ('high-throughput'): counts do not travel again. A rank that is lost is left out of
 * it for good; one that a call's `activeRanks` left out must not take part in a later call with it.
 */
export interface MoeLayout {
  readonly tokens: number;
  /** @internal */
  readonly routing: RoutingArrays;
}

/**
 * What arrived, lent: everything here lies in memory that the buffer writes again once the handle is released, which the call's combine does when it
 * ends. Rows of local expert e are `blockStart[e] .. blockStart[e] + counts[e]`; those of one source are one run of them, in the order of its tokens.
 */
export interface MoeReceived {
  /**
   * 'low-latency': [localExperts, ranks * maxTokens, hidden]; 'high-throughput': [rows, hidden], rows padded to `alignment` being 0, and rows may lie
   * apart. Of the buffer's dtype, or f8e4m3.
   */
  readonly x: Tensor;
  /**
   * With `zeroCopyCombine`: shaped as x, in the buffer's dtype, its rows possibly apart. Results that experts write here, and that are given to combine as this very tensor, are read here by
   * the ranks that their rows came from; nothing copies them. From the combine on nobody writes here until a later dispatch hands it out again: other ranks may still be reading.
   * Rows that no token wrote are never read.
   */
  readonly combineBuffer?: Tensor<MoeDType>;
  /** Of f8e4m3: one scale for each 128 channels, f32 or ue8m0: as x, the last axis ceil(hidden / 128). Column-major: rows are neighbours. */
  readonly scales?: Tensor;
  /** By local expert. */
  readonly counts: Int32Array;
  readonly blockStart: Int32Array;
  /** Element `e * ranks + s`: `begin << 32 | count` of the rows of source s in the block of local expert e. */
  readonly layoutRange: BigInt64Array;
  /** By row, of rows that a token wrote: its number at its source, and which of its choices it is. Undefined for other rows. */
  readonly sourceToken: Int32Array;
  readonly sourceChoice: Int32Array;
  /** Who sent nothing, as a mask, whatever the reason: left out from the start, late, or dead. All of their rows are left out. */
  readonly lostRanks: Uint8Array;
  /** Nanoseconds spent in waiting for each rank. */
  readonly waitNs: BigUint64Array;
  /** Bytes that had to be copied first, because x was not in native memory. */
  readonly stagedBytes: number;
  readonly handle: MoeHandle;
  /** Present if asked for by `keepLayout`. */
  readonly layout?: MoeLayout;
}

export interface MoeCombined {
  /** [tokens, hidden]. */
  readonly y: Tensor<MoeDType>;
  /** Whose results were left out, as a mask. */
  readonly lostRanks: Uint8Array;
  readonly waitNs: BigUint64Array;
  readonly stagedBytes: number;
}

/** A call whose first half has ended: nothing is awaited, and nothing of this rank runs, until `receive`. */
export interface MoeHook<T> {
  receive(options?: { readonly timeoutMs?: number; readonly signal?: AbortSignal }): Work<T>;
}

export type CallStage = 'dispatching' | 'received' | 'captured' | 'combining' | 'released';

/** One call of a buffer, from dispatch to combine. */
export interface MoeHandle {
  readonly released: boolean;
  /**
   * For a call that nothing is combined of: all ranks do it. Lets the call's slot be used again; until it has resolved, or the call's combine has, the slot is taken.
   */
  release(): Work;
}

export class HeldCall implements MoeHandle {
  readonly slot: number;
  readonly epoch: number;
  readonly tokens: number;
  /** Rows of the receive tensor; known after dispatch. */
  rows = 0;
  stage: CallStage = 'dispatching';
  readonly routing: RoutingArrays;
  readonly #release: (call: HeldCall) => Work;

  constructor(init: {
    readonly slot: number;
    readonly epoch: number;
    readonly tokens: number;
    readonly routing: RoutingArrays;
    readonly release: (call: HeldCall) => Work;
  }) {
    this.slot = init.slot;
    this.epoch = init.epoch;
    this.tokens = init.tokens;
    this.routing = init.routing;
    this.#release = init.release;
  }

  get released(): boolean {
    return this.stage === 'released';
  }

  release(): Work {
    return this.#release(this);
  }

  /** Which of the buffer's calls it is, from 0. */
  number(calls: number): number {
    return (this.epoch - 1) * calls + this.slot;
  }

  /** Throws `EP_INVALID_ARGUMENT` unless the call is at this stage. */
  expect(stage: CallStage, where: string): void {
    if (this.stage === stage) return;
    throw new EpError('EP_INVALID_ARGUMENT', `${where}: the call is ${this.stage}, expected one that is ${stage}`, {
      context: { stage: this.stage, slot: this.slot },
    });
  }
}
