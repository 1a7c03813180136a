/** What dispatchers of all devices share: what ranks agree on, whose turn which lease is, and how a failed call is got over. */
import {
  type Closeable,
  type Endpoint,
  EpError,
  isEpError,
  linkSignals,
  type Rank,
  Resource,
  type SymmetricMemory,
  type Tensor,
  type Transport,
  type WaitOptions,
  WorkOwner,
} from '@ep/core';
import type { Agreement } from './agreement.js';
import { type BoundSpec, bindSpecs, type PartSpec } from './binding-spec.js';
import { refusal } from './difference.js';
import type { Layout } from './layout.js';
import { LeaseSlot } from './lease.js';
import { checkRunOptions, type RunOptions } from './options.js';

/** What a dispatcher needs of a transport. Order of puts is never assumed: completions are counted. */
export type DispatchTransport = Transport<'bundled' | 'add'>;

export interface SharedInit {
  readonly transport: DispatchTransport;
  /** Of the leases and their counters. */
  readonly memory: SymmetricMemory;
  readonly endpoints: readonly Endpoint<'bundled' | 'add'>[];
  readonly agreement: Agreement;
  readonly layout: Layout;
  readonly chunkBytes: number;
  readonly timeoutMs: number;
}

/** `Bound`: a dispatch that all ranks have agreed on. `Held`: tensors of a lease. */
export abstract class DispatcherBase<Bound, Held = Tensor> extends Resource implements Closeable {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly #init: SharedInit;
  protected readonly owner: WorkOwner;
  protected readonly slots: readonly LeaseSlot<Held>[];
  /** Call number of this epoch: decides which lease is due, so all ranks must agree on it. */
  #call = 0;
  #poison: { readonly reason: unknown } | undefined;
  #resyncing = false;
  /** Ends calls in flight at `resync()` and `close()`. */
  #cancel = new AbortController();

  protected constructor(init: SharedInit, label: string) {
    super(label);
    this.#init = init;
    this.owner = new WorkOwner(label);
    this.rank = init.transport.rank;
    this.worldSize = init.transport.worldSize;
    this.slots = Array.from({ length: init.layout.leases }, (_, index) => new LeaseSlot<Held>(index));
  }

  /** Raised by every `resync()`. */
  get epoch(): number {
    return this.#init.agreement.epoch;
  }

  /** True from a failed call to the next `resync()`. */
  get poisoned(): boolean {
    return this.#poison !== undefined;
  }

  /** Makes a dispatch of what all ranks have bound. */
  protected abstract bound(name: string, spec: BoundSpec): Bound;

  /** Takes the counters as they stand for the new zero. */
  protected abstract rebase(): void;

  /** Resolves when nothing that this rank has started can still change a counter. Calls have ended and leases are revoked. */
  protected abstract settle(wait: WaitOptions): Promise<void>;

  /**
   * Collective, once for every set of plans: checks that the plans keep their rules (`EP_INVALID_PLAN`, `EP_PLAN_VERSION`; some µs for each of their dispatches), that all ranks hold the
   * same plans, row sizes and dtypes (`EP_MISMATCH` names the odd ranks), and that each dispatch fits a lease (`EP_CAPACITY`).
   */
  bind<const K extends string>(
    specs: Readonly<Record<K, readonly PartSpec[]>>,
    options: WaitOptions = {},
  ): Promise<Record<K, Bound>> {
    return this.bindMade('bind', () => specs, options);
  }

  /** As `bind`, of specs that are made first: what goes wrong there is refused like a wrong spec. @internal */
  async bindMade<const K extends string>(
    where: string,
    make: () => Readonly<Record<K, readonly PartSpec[]>>,
    options: WaitOptions,
  ): Promise<Record<K, Bound>> {
    return this.guard(where, async () => {
      checkRunOptions(options, where);
      this.checkUsable();
      const { layout, chunkBytes } = this.#init;
      const place = { rank: this.rank, worldSize: this.worldSize, chunkBytes, leaseBytes: layout.leaseBytes };
      let bound: readonly (readonly [string, BoundSpec, Bound])[] = [];
      let refused: { readonly reason: unknown } | undefined;
      try {
        bound = bindSpecs(make(), place).map(([name, spec]) => [name, spec, this.bound(name, spec)]);
      } catch (reason) {
        // The others must hear of it instead of waiting for this rank.
        refused = { reason };
      }
      const lines = refused
        ? refusal(refused.reason)
        : bound.flatMap(([name, spec]) => spec.identity.map((line) => `${name}: ${line}`));
      try {
        await this.agree('bind', lines, options);
      } catch (error) {
        if (refused === undefined) throw error;
      }
      if (refused !== undefined) throw refused.reason;
      return Object.fromEntries(bound.map(([name, , dispatch]) => [name, dispatch])) as Record<K, Bound>;
    });
  }

  /** Collective: throws `EP_MISMATCH` naming the ranks that gave other lines, and the first one that differs. @internal */
  async agree(where: string, lines: readonly string[], options: WaitOptions): Promise<void> {
    const linked = linkSignals(options.signal, this.#cancel.signal, this.closing);
    try {
      await this.#init.agreement.same(where, lines, {
        timeoutMs: this.#init.timeoutMs,
        ...options,
        signal: linked.signal,
      });
    } catch (reason) {
      // Ranks may have counted this round or not: only a resync brings them together again. After a mismatch all have counted it.
      if (!isEpError(reason) || reason.code !== 'EP_MISMATCH') this.#poison ??= { reason };
      throw reason;
    } finally {
      linked.unlink();
    }
  }

  /**
   * Collective, from whatever state each rank is in: ends what is in flight, agrees on the next epoch, forgets all counts and leases. Held leases are
   * revoked. Rejects with `EP_TIMEOUT` or `EP_PEER_LOST` naming who did not take part.
   */
  async resync(options: WaitOptions = {}): Promise<void> {
    await this.guard('resync', async () => {
      checkRunOptions(options, 'resync');
      if (this.#resyncing) throw new EpError('EP_BUSY', 'resync: one is under way already');
      this.#resyncing = true;
      // close() cuts off what waits for ranks that may never come.
      const linked = linkSignals(options.signal, this.closing);
      try {
        const reason = new EpError('EP_ABORTED', 'the dispatcher was resynchronised');
        this.#poison ??= { reason };
        this.#cancel.abort(reason);
        await this.owner.idle();
        await this.#init.agreement.idle();
        this.#cancel = new AbortController();
        const wait = { timeoutMs: this.#init.timeoutMs, ...options, signal: linked.signal };
        // From the first announcement on, peers may count from anew: a credit that is granted now would be taken for one of the next epoch.
        for (const slot of this.slots) {
          slot.held?.revoke();
          slot.held = undefined;
        }
        await this.settle(wait);
        // What kernels and JS have posted must have landed, or been given up, before anyone trusts a counter.
        await Promise.all(this.#init.endpoints.map((endpoint) => endpoint.flush(wait)));
        await this.#init.agreement.resync(() => this.#rebase(), wait);
        this.#poison = undefined;
      } finally {
        linked.unlink();
        this.#resyncing = false;
      }
    });
  }

  #rebase(): void {
    for (const slot of this.slots) slot.uses = 0;
    this.rebase();
    this.#call = 0;
  }

  /** What ends a call of this dispatcher besides its own signal. */
  protected cuts(): readonly AbortSignal[] {
    return [this.#cancel.signal, this.closing];
  }

  /** A call failed: the others may or may not have done their part of it. */
  protected poison(reason: unknown): void {
    this.#poison ??= { reason };
  }

  /** A call has begun. */
  protected count(slot: LeaseSlot<Held>): void {
    this.#call++;
    slot.uses++;
  }

  /** Ends what is in flight, and takes all leases back. */
  protected async cutOff(): Promise<void> {
    this.#cancel.abort(new EpError('EP_ABORTED', 'the dispatcher was closed'));
    await this.owner.idle();
    for (const slot of this.slots) slot.held?.revoke();
  }

  protected checkUsable(): void {
    this.owner.check();
    if (this.#poison === undefined) return;
    const { reason } = this.#poison;
    const text = reason instanceof Error ? reason.message : String(reason);
    throw new EpError('EP_POISONED', `an earlier call failed (${text}): all ranks must call resync()`, {
      cause: reason,
    });
  }

  /** Throws unless calls may begin. */
  protected checkCallable(name: string): void {
    this.checkOpen(name);
    this.checkUsable();
    // A transport closes its memories; what was prepared knows their addresses only.
    if (this.#init.memory.closed) throw new EpError('EP_CLOSED', `${name}: the memory of the dispatcher was closed`);
  }

  /** The lease that is due, if a call may begin. */
  protected admit(name: string, options: RunOptions | undefined): LeaseSlot<Held> {
    this.checkCallable(name);
    checkRunOptions(options, name);
    options?.signal?.throwIfAborted();
    const slot = this.slots[this.#call % this.slots.length]!;
    if (slot.held === undefined) return slot;
    throw new EpError(
      'EP_BUSY',
      `${name}: lease ${slot.index} of ${this.slots.length} is still held by an earlier call: release() it, or open with more leases`,
      { context: { lease: slot.index, leases: this.slots.length } },
    );
  }
}
