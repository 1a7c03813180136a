/** Moves the shards of plans between ranks, over any transport whose signals are bundled with their puts and can add. */
import {
  checkTimeout,
  createWork,
  type DeviceHandle,
  doneWork,
  isEpError,
  linkSignals,
  type SignalUpdate,
  type Tensor,
  type Work,
} from '@ep/core';
import type { OperationId } from '@ep/native';
import type { BoundSpec } from './binding-spec.js';
import { callError, type PreparedCall, prepareCall, zeroGaps } from './call.js';
import { DispatcherBase, type SharedInit } from './dispatcher-base.js';
import type { HostStream } from './host-stream.js';
import { arrivalSlot, creditSlot } from './layout.js';
import { HeldLease, type Lease, type LeaseSlot } from './lease.js';
import { type SourceOperand, sourceOperand, sourceSpec } from './operand.js';
import type { ResolvedOptions, RunOptions } from './options.js';

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

interface DispatcherInit extends ResolvedOptions, SharedInit {
  readonly stream: HostStream;
  readonly ownStream: boolean;
  readonly handle: DeviceHandle<'bundled' | 'add'>;
}

interface UnderWay {
  readonly name: string;
  readonly sequence: number;
  readonly call: PreparedCall;
  readonly counters: Float64Array;
  readonly lease: Lease;
  readonly operation: OperationId;
}

export class Dispatcher extends DispatcherBase<BoundDispatch> {
  readonly #init: DispatcherInit;
  /** Per lease and rank, absolute counter values: what has been awaited from, and what must be granted by, that rank. */
  readonly #arrived: readonly Float64Array[];
  readonly #granted: readonly Float64Array[];
  /** What the call that uses a lease waits for, see `#count`. Every byte that a call leaves to the garbage collector stalls some later call of all ranks. */
  readonly #counters: readonly Float64Array[];
  readonly #gives: readonly (() => void)[];
  /** What a release tells every sender. */
  readonly #grants: readonly SignalUpdate<'bundled' | 'add'>[];
  #sequence = 0;

  constructor(init: DispatcherInit) {
    super(init, 'dispatcher');
    this.#init = init;
    this.#arrived = this.slots.map(() => new Float64Array(this.worldSize));
    this.#granted = this.slots.map(() => new Float64Array(this.worldSize));
    this.#counters = this.slots.map(() => new Float64Array(2 * this.worldSize));
    this.#grants = this.slots.map(({ index }) => ({
      slot: creditSlot(init.layout, index) + this.rank,
      op: 'add',
      value: 1n,
    }));
    this.#gives = this.slots.map((slot) => () => this.#give(slot));
  }

  protected override async release(): Promise<void> {
    await this.cutOff();
    if (this.#init.ownStream) await this.#init.stream.close();
    await this.#init.memory.close();
    this.owner.check();
  }

  /** A release of the host signals at once. */
  protected override async settle(): Promise<void> {}

  protected override rebase(): void {
    const { memory, layout } = this.#init;
    for (const slot of this.slots) {
      for (let rank = 0; rank < this.worldSize; rank++) {
        this.#arrived[slot.index]![rank] = Number(memory.signals.peek(arrivalSlot(layout, slot.index) + rank));
        this.#granted[slot.index]![rank] = Number(memory.signals.peek(creditSlot(layout, slot.index) + rank));
      }
    }
  }

  protected override bound(name: string, spec: BoundSpec): BoundDispatch {
    const { layout, memory, transport, handle, blocks, simt } = this.#init;
    const calls = this.slots.map((slot) => {
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
        const slot = this.admit(name, options);
        // Everything that can be refused is refused before the call counts: the other ranks' counters must not wait for it.
        const operands: (SourceOperand['operand'] | number)[] = [];
        let stagedBytes = 0;
        for (let i = 0; i < wanted.length; i++) {
          const source = sourceOperand(sources?.[spec.parts[i]!.spec.name], wanted[i]!);
          operands.push(source.operand, source.byteOffset, source.strideBytes);
          stagedBytes += source.stagedBytes;
        }
        return this.#run(name, slot, calls[slot.index]!, operands, stagedBytes, options);
      },
    };
  }

  #run(
    name: string,
    slot: LeaseSlot,
    call: PreparedCall,
    operands: readonly (SourceOperand['operand'] | number)[],
    stagedBytes: number,
    options: RunOptions | undefined,
  ): Work<Lease> {
    const timeoutMs = checkTimeout(options?.timeoutMs ?? this.#init.timeoutMs, name);
    const counters = this.#count(call, slot);
    const limit = Number.isFinite(timeoutMs) ? timeoutMs : -1;
    const { stream } = this.#init;
    const operation = stream.native(name).dispatch(call.dispatch, counters, limit, call.inline, ...operands);
    this.count(slot);
    const arrived = this.#arrived[slot.index]!;
    for (let rank = 0; rank < this.worldSize; rank++) if (counters[rank] !== 0) arrived[rank] = counters[rank]!;
    const lease = new HeldLease(call.tensors, stagedBytes, this.#gives[slot.index]!);
    slot.held = lease;
    const sequence = this.#sequence++;
    if (operation !== 0) return this.#follow({ name, sequence, call, counters, lease, operation }, options);
    zeroGaps(call);
    return doneWork<Lease>(name, sequence, lease);
  }

  /** Of a call that had not ended when it returned. */
  #follow(
    { name, sequence, call, counters, lease, operation }: UnderWay,
    options: RunOptions | undefined,
  ): Work<Lease> {
    // close() cuts off what waits for peers: they may never come.
    const cuts = this.cuts();
    const linked = linkSignals(options?.signal, ...cuts);
    const control = createWork<Lease>({ op: name, sequence, owner: this.owner });
    const letGo = this.hold(name);
    this.#init.stream
      .follow(operation, linked.signal)
      .then((outcome) => {
        if (outcome.status !== 0) throw callError(name, outcome, call.place, counters);
        zeroGaps(call);
        control.resolve(lease);
      })
      .catch((reason: unknown) => {
        this.poison(reason);
        if (cuts.some((cut) => cut.aborted && cut.reason === reason)) control.abort(reason);
        else control.reject(reason);
      })
      .finally(() => {
        linked.unlink();
        letGo();
      });
    return control.work;
  }

  /** Per rank the value to wait for from it, then per rank the value needed before the first write to it; 0: nothing. Stands until the lease's next use. */
  #count({ spec }: PreparedCall, slot: LeaseSlot): Float64Array {
    const { worldSize } = this;
    const arrived = this.#arrived[slot.index]!;
    const granted = this.#granted[slot.index]!;
    const counters = this.#counters[slot.index]!;
    for (let rank = 0; rank < worldSize; rank++) {
      const chunks = spec.chunksFrom[rank]!;
      counters[rank] = chunks > 0 ? arrived[rank]! + chunks : 0;
      // The n-th use of a lease needs n - 1 grants of every receiver, whoever it was that sent in those uses: a receiver may still hold another's rows.
      counters[worldSize + rank] = slot.uses > 0 ? granted[rank]! + slot.uses : 0;
    }
    return counters;
  }

  #give(slot: LeaseSlot): void {
    slot.held = undefined;
    if (this.closed) return;
    const { memory, endpoints } = this.#init;
    const update = this.#grants[slot.index]!;
    for (const endpoint of endpoints) {
      try {
        // HAZARD: nobody can await a credit. One that never gets to a lost rank is told by the next call, which misses that rank; kept, it would end the close of the transport.
        endpoint.signal(memory, update).catch(() => {});
      } catch (error) {
        // The transport was closed first: nobody can use the credit, and a release in a `finally` must not hide what went wrong before.
        if (!isEpError(error) || error.code !== 'EP_CLOSED') throw error;
      }
    }
  }
}
