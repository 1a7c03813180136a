/** Moves the shards of plans between ranks, over any transport whose signals are bundled with their puts and can add. */
import {
  type Closeable,
  checkTimeout,
  createWork,
  type DeviceHandle,
  doneWork,
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
  type Work,
  WorkOwner,
} from '@ep/core';
import type { Agreement } from './agreement.js';
import { type BoundSpec, bindSpecs, type PartSpec } from './binding-spec.js';
import { callError, type PreparedCall, prepareCall, zeroGaps } from './call.js';
import { refusal } from './difference.js';
import type { HostStream } from './host-stream.js';
import { arrivalSlot, creditSlot } from './layout.js';
import { HeldLease, type Lease, LeaseSlot } from './lease.js';
import { type SourceOperand, sourceOperand, sourceSpec } from './operand.js';
import type { ResolvedOptions, RunOptions } from './options.js';

/** What a dispatcher needs of a transport. Order of puts is never assumed: completions are counted. */
export type DispatchTransport = Transport<'bundled' | 'add'>;

/** A dispatch that all ranks have agreed on. */
export interface BoundDispatch {
  /** Bytes that this rank sends and receives in one call, its own among them. */
  readonly bytesSent: number;
  readonly bytesReceived: number;
  readonly leaseBytes: number;
  /**
   * Collective: every rank runs the same dispatches in the same order. `sources` by part name. Resolves when everything for this rank has arrived.
   * Throws `EP_BUSY` while the lease that is due is still held here. After a timeout, an abort or a lost peer all calls reject with `EP_POISONED`
   * until `resync()`.
   */
  run(sources: Readonly<Record<string, Tensor>>, options?: RunOptions): Work<Lease>;
}

interface DispatcherInit extends ResolvedOptions {
  readonly transport: DispatchTransport;
  readonly memory: SymmetricMemory;
  readonly endpoints: readonly Endpoint<'bundled' | 'add'>[];
  readonly agreement: Agreement;
  readonly stream: HostStream;
  readonly ownStream: boolean;
  readonly handle: DeviceHandle<'bundled' | 'add'>;
}

export class Dispatcher extends Resource implements Closeable {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly #init: DispatcherInit;
  readonly #owner = new WorkOwner('dispatcher');
  readonly #slots: readonly LeaseSlot[];
  /** Per lease and rank, absolute counter values: what has been awaited from, and what must be granted by, that rank. */
  readonly #arrived: readonly Float64Array[];
  readonly #granted: readonly Float64Array[];
  #sequence = 0;
  /** Call number of this epoch: decides which lease is due, so all ranks must agree on it. */
  #call = 0;
  #poison: { readonly reason: unknown } | undefined;
  #resyncing = false;

  constructor(init: DispatcherInit) {
    super('dispatcher');
    this.#init = init;
    this.rank = init.transport.rank;
    this.worldSize = init.transport.worldSize;
    const { leases, worldSize } = init.layout;
    this.#slots = Array.from({ length: leases }, (_, index) => new LeaseSlot(index));
    this.#arrived = this.#slots.map(() => new Float64Array(worldSize));
    this.#granted = this.#slots.map(() => new Float64Array(worldSize));
  }

  /** Raised by every `resync()`. */
  get epoch(): number {
    return this.#init.agreement.epoch;
  }

  /** True from a failed call to the next `resync()`. */
  get poisoned(): boolean {
    return this.#poison !== undefined;
  }

  /**
   * Collective, once for every set of plans: checks that all ranks hold the same plans, row sizes and dtypes (`EP_MISMATCH` names the odd ranks), and that
   * each dispatch fits a lease (`EP_CAPACITY`).
   */
  bind<const K extends string>(
    specs: Readonly<Record<K, readonly PartSpec[]>>,
    options: WaitOptions = {},
  ): Promise<Record<K, BoundDispatch>> {
    return this.bindMade('bind', () => specs, options);
  }

  /** As `bind`, of specs that are made first: what goes wrong there is refused like a wrong spec. @internal */
  async bindMade<const K extends string>(
    where: string,
    make: () => Readonly<Record<K, readonly PartSpec[]>>,
    options: WaitOptions,
  ): Promise<Record<K, BoundDispatch>> {
    return this.guard(where, async () => {
      this.#checkUsable();
      const { layout, chunkBytes } = this.#init;
      const place = { rank: this.rank, worldSize: this.worldSize, chunkBytes, leaseBytes: layout.leaseBytes };
      let bound: readonly (readonly [string, BoundSpec, BoundDispatch])[] = [];
      let refused: { readonly reason: unknown } | undefined;
      try {
        bound = bindSpecs(make(), place).map(([name, spec]) => [name, spec, this.#bound(name, spec)]);
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
      return Object.fromEntries(bound.map(([name, , dispatch]) => [name, dispatch])) as Record<K, BoundDispatch>;
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
      if (this.#resyncing) throw new EpError('EP_BUSY', 'resync: one is under way already');
      this.#resyncing = true;
      // close() cuts off what waits for ranks that may never come.
      const linked = linkSignals(options.signal, this.closing);
      try {
        const reason = new EpError('EP_ABORTED', 'the dispatcher was resynchronised');
        this.#poison ??= { reason };
        this.#cancel.abort(reason);
        await this.#owner.idle();
        await this.#init.agreement.idle();
        this.#cancel = new AbortController();
        const wait = { timeoutMs: this.#init.timeoutMs, ...options, signal: linked.signal };
        // From the first announcement on, peers may count from anew: a credit that is granted now would be taken for one of the next epoch.
        for (const slot of this.#slots) {
          slot.held?.revoke();
          slot.held = undefined;
        }
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

  /** Ends calls in flight at `resync()` and `close()`. */
  #cancel = new AbortController();

  protected override async release(): Promise<void> {
    this.#cancel.abort(new EpError('EP_ABORTED', 'the dispatcher was closed'));
    await this.#owner.idle();
    for (const slot of this.#slots) slot.held?.revoke();
    if (this.#init.ownStream) await this.#init.stream.close();
    await this.#init.memory.close();
    this.#owner.check();
  }

  #rebase(): void {
    const { memory, layout } = this.#init;
    for (const slot of this.#slots) {
      slot.uses = 0;
      for (let rank = 0; rank < this.worldSize; rank++) {
        this.#arrived[slot.index]![rank] = Number(memory.signals.peek(arrivalSlot(layout, slot.index) + rank));
        this.#granted[slot.index]![rank] = Number(memory.signals.peek(creditSlot(layout, slot.index) + rank));
      }
    }
    this.#call = 0;
  }

  #checkUsable(): void {
    this.#owner.check();
    if (this.#poison === undefined) return;
    const { reason } = this.#poison;
    const text = reason instanceof Error ? reason.message : String(reason);
    throw new EpError('EP_POISONED', `an earlier call failed (${text}): all ranks must call resync()`, {
      cause: reason,
    });
  }

  #bound(name: string, spec: BoundSpec): BoundDispatch {
    const { layout, memory, transport, handle, blocks, simt } = this.#init;
    const calls = this.#slots.map((slot) => {
      const place = { layout, memory, transportName: transport.name, lease: slot.index };
      return prepareCall(spec, place, { handle: handle.bytes, blocks, simt });
    });
    const wanted = spec.parts.map(({ spec: { name: part, dtype, rowShape }, sendRows }) =>
      sourceSpec(`${name}, source ${part}`, dtype, sendRows, rowShape),
    );
    return {
      bytesSent: spec.bytesSent,
      bytesReceived: spec.bytesReceived,
      leaseBytes: spec.leaseBytes,
      run: (sources, options) => {
        const slot = this.#admit(name, options);
        // Everything that can be refused is refused before the call counts: the other ranks' counters must not wait for it.
        const operands = spec.parts.map((part, i) => sourceOperand(sources?.[part.spec.name], wanted[i]!));
        return this.#run(name, slot, calls[slot.index]!, operands, options);
      },
    };
  }

  /** The lease that is due, if a call may begin. */
  #admit(name: string, options: RunOptions | undefined): LeaseSlot {
    this.checkOpen(name);
    this.#checkUsable();
    options?.signal?.throwIfAborted();
    // A transport closes its memories; what was prepared knows their addresses only.
    if (this.#init.memory.closed) throw new EpError('EP_CLOSED', `${name}: the memory of the dispatcher was closed`);
    const slot = this.#slots[this.#call % this.#slots.length]!;
    if (slot.held === undefined) return slot;
    throw new EpError(
      'EP_BUSY',
      `${name}: lease ${slot.index} of ${this.#slots.length} is still held by an earlier call: release() it, or open with more leases`,
      { context: { lease: slot.index, leases: this.#slots.length } },
    );
  }

  #run(
    name: string,
    slot: LeaseSlot,
    call: PreparedCall,
    operands: readonly SourceOperand[],
    options: RunOptions | undefined,
  ): Work<Lease> {
    const timeoutMs = checkTimeout(options?.timeoutMs ?? this.#init.timeoutMs, name);
    const counters = this.#counters(call, slot);
    // close() cuts off what waits for peers: they may never come.
    const cuts = [this.#cancel.signal, this.closing];
    let unlink: (() => void) | undefined;
    const under = this.#init.stream.launchInline(
      (stream) =>
        stream.dispatch(
          call.dispatch,
          counters,
          Number.isFinite(timeoutMs) ? timeoutMs : -1,
          call.inline,
          ...operands.flatMap(({ operand, byteOffset, strideBytes }) => [operand, byteOffset, strideBytes]),
        ),
      () => {
        const linked = linkSignals(options?.signal, ...cuts);
        unlink = linked.unlink;
        return linked.signal;
      },
    );
    this.#call++;
    slot.uses++;
    const arrived = this.#arrived[slot.index]!;
    for (let rank = 0; rank < this.worldSize; rank++) if (counters[rank] !== 0) arrived[rank] = counters[rank]!;
    const stagedBytes = operands.reduce((sum, operand) => sum + operand.stagedBytes, 0);
    const lease = new HeldLease(call.tensors, stagedBytes, () => this.#give(slot));
    slot.held = lease;
    const sequence = this.#sequence++;
    if (under === undefined) {
      zeroGaps(call);
      return doneWork<Lease>(name, sequence, lease);
    }
    const control = createWork<Lease>({ op: name, sequence, owner: this.#owner });
    const letGo = this.hold(name);
    under
      .then((outcome) => {
        if (outcome.status !== 0) throw callError(name, outcome, call.place, counters);
        zeroGaps(call);
        control.resolve(lease);
      })
      .catch((reason: unknown) => {
        this.#poison ??= { reason };
        if (cuts.some((cut) => cut.aborted && cut.reason === reason)) control.abort(reason);
        else control.reject(reason);
      })
      .finally(() => {
        unlink?.();
        letGo();
      });
    return control.work;
  }

  /** Per rank the value to wait for from it, then per rank the value needed before the first write to it; 0: nothing. */
  #counters({ spec }: PreparedCall, slot: LeaseSlot): Float64Array {
    const { worldSize } = this;
    const [arrived, granted] = [this.#arrived[slot.index]!, this.#granted[slot.index]!];
    const counters = new Float64Array(2 * worldSize);
    for (let rank = 0; rank < worldSize; rank++) {
      const chunks = spec.chunksFrom[rank]!;
      if (chunks > 0) counters[rank] = arrived[rank]! + chunks;
      // The n-th use of a lease needs n - 1 grants of every receiver, whoever it was that sent in those uses: a receiver may still hold another's rows.
      if (slot.uses > 0) counters[worldSize + rank] = granted[rank]! + slot.uses;
    }
    return counters;
  }

  #give(slot: LeaseSlot): void {
    slot.held = undefined;
    if (this.closed) return;
    const { memory, layout, endpoints } = this.#init;
    const update = { slot: creditSlot(layout, slot.index) + this.rank, op: 'add' as const, value: 1n };
    try {
      for (const endpoint of endpoints) endpoint.signal(memory, update);
    } catch (error) {
      // The transport was closed first: nobody can use the credit, and a release in a `finally` must not hide what went wrong before.
      if (!isEpError(error) || error.code !== 'EP_CLOSED') throw error;
    }
  }
}
