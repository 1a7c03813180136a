/** Moves the shards of plans between GPUs' memories, or between ranks that share one, by kernels that count on the device. */
import {
  checkTimeout,
  createWork,
  type DeviceTensor,
  EpError,
  isEpError,
  linkSignals,
  type WaitOptions,
  type Work,
} from '@ep/core';
import {
  codeOfStatus,
  type GraphMember,
  type GraphReplay,
  type NativeGpuCalls,
  type NativeGpuDispatch,
  native,
  type Outcome,
} from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import type { BoundPart, BoundSpec } from '../binding-spec.js';
import { DispatcherBase, type SharedInit } from '../dispatcher-base.js';
import { HeldLease, type LeaseSlot } from '../lease.js';
import type { RunOptions } from '../options.js';
import { outcomeText } from '../outcome-text.js';
import { deviceTensor } from './buffer.js';
import { type DeviceSource, deviceSource } from './operand.js';
import type { ResolvedDeviceOptions } from './options.js';

/** Received tensors on the device, lent until `release()`; see `Lease`. */
export interface DeviceLease {
  /** By part name. */
  readonly tensors: Readonly<Record<string, DeviceTensor>>;
  readonly released: boolean;
  /**
   * Grants credit to the senders, in the order of the dispatcher's stream. HAZARD: what reads the tensors on another stream must have ended, or the dispatcher's stream
   * must wait for an event behind it first.
   */
  release(): void;
}

type DeviceSources = Readonly<Record<string, DeviceTensor>>;

/** A dispatch over device memory that all ranks have agreed on. */
export interface BoundDeviceDispatch {
  /** Bytes that this rank sends and receives in one call, its own among them. */
  readonly bytesSent: number;
  readonly bytesReceived: number;
  readonly leaseBytes: number;
  /** Collective, as `BoundDispatch.run`. Resolves when everything for this rank has arrived. */
  run(sources: DeviceSources, options?: RunOptions): Work<DeviceLease>;
  /**
   * The same, in the order of the stream: returns at once with the lease, whose tensors hold the rows for what is put on the stream after this call. A failure rejects
   * `done`. While the stream is being captured, the call becomes a part of the graph, and `done` is undefined.
   */
  enqueue(
    sources: DeviceSources,
    options?: RunOptions,
  ): { readonly lease: DeviceLease; readonly done: Work<DeviceLease> | undefined };
}

interface DeviceDispatcherInit extends ResolvedDeviceOptions, SharedInit {
  readonly memory: DeviceMemory;
  readonly calls: NativeGpuCalls;
  /** Of the agreements, in host memory. */
  readonly closeControl: () => Promise<void>;
}

const nativeMs = (timeoutMs: number): number => (Number.isFinite(timeoutMs) ? timeoutMs : -1);

export class DeviceDispatcher extends DispatcherBase<BoundDeviceDispatch, DeviceTensor> implements GraphMember {
  readonly #init: DeviceDispatcherInit;
  #sequence = 0;

  constructor(init: DeviceDispatcherInit) {
    super(init, 'dispatcher of a GPU');
    this.#init = init;
  }

  /** Thread blocks and threads of a call, and how many such blocks the GPU runs at once. */
  get shape(): { readonly blocks: number; readonly lanes: number; readonly resident: number } {
    this.checkOpen('shape');
    return this.#init.calls.shape();
  }

  protected override async release(): Promise<void> {
    await this.cutOff();
    this.#init.calls.release();
    await this.#init.memory.close();
    await this.#init.closeControl();
    this.owner.check();
  }

  /**
   * HAZARD: releases lie on the stream, behind whatever it waits for. One that ran after the counters were taken for the new zero would be taken for a grant of the
   * next epoch, and a peer would write into a tensor that is held here.
   */
  protected override async settle(wait: WaitOptions): Promise<void> {
    const { stream } = this.#init;
    try {
      // A close waits for everything that was put on the stream.
      if (stream.closed) await stream.close(wait);
      else await stream.synchronize(wait);
    } catch (error) {
      if (!isEpError(error) || error.code !== 'EP_TIMEOUT') throw error;
      throw new EpError(
        'EP_TIMEOUT',
        `resync: the stream of this dispatcher did not come to the releases on it within ${wait.timeoutMs} ms: end what it waits for, or raise timeoutMs`,
        { context: { rank: this.rank, timeoutMs: wait.timeoutMs }, cause: error },
      );
    }
  }

  protected override rebase(): void {
    this.#init.calls.rebase();
  }

  /** @internal */
  beginReplay(operation: string): GraphReplay {
    this.checkCallable(operation);
    const control = createWork({ op: operation, sequence: this.#sequence++, owner: this.owner });
    const letGo = this.hold(operation);
    return {
      cuts: this.cuts(),
      end: (failure) => {
        if (failure === undefined) {
          control.resolve();
        } else {
          this.poison(failure.reason);
          // Whoever launched the graph is told: nothing to keep for later.
          control.abort(failure.reason);
        }
        letGo();
      },
    };
  }

  protected override bound(name: string, spec: BoundSpec): BoundDeviceDispatch {
    const dispatch = this.#prepare(spec);
    const tensors = this.slots.map((slot) => this.#tensors(spec, slot.index));
    const { device } = this.#init.memory;
    const wanted = spec.parts.map(({ spec: { name: part, dtype, rowShape }, sendRows: rows }) => ({
      where: `${name}, source ${part}`,
      ...{ dtype, rows, rowShape, device },
    }));
    const enqueue = (sources: DeviceSources, options: RunOptions | undefined) => {
      const slot = this.admit(name, options);
      // Everything that can be refused is refused before the call counts: the other ranks' counters must not wait for it.
      const operands = spec.parts.map((part, i) => deviceSource(sources?.[part.spec.name], wanted[i]!));
      return this.#run(name, slot, { dispatch, tensors: tensors[slot.index]! }, operands, options);
    };
    return {
      bytesSent: spec.bytesSent,
      bytesReceived: spec.bytesReceived,
      leaseBytes: spec.leaseBytes,
      enqueue,
      run: (sources, options) => {
        if (this.#init.stream.capturing) {
          throw new EpError(
            'EP_INVALID_ARGUMENT',
            `${name}: the stream is being captured; enqueue() puts a call into a graph`,
          );
        }
        return enqueue(sources, options).done!;
      },
    };
  }

  #prepare(spec: BoundSpec): NativeGpuDispatch {
    const { calls, layout } = this.#init;
    return new (native().binding.GpuDispatch)({
      calls,
      leaseBytes: spec.leaseBytes,
      parts: spec.parts.map((part) => ({
        rowBytes: part.rowBytes,
        dstOffset: part.receiveOffset,
        dstRows: part.receiveCapacity,
        program: part.program,
      })),
      sums: spec.parts.flatMap(({ sum, receiveOffset, rowBytes, rowElements }) =>
        sum === undefined
          ? []
          : [
              {
                srcOffset: receiveOffset,
                dstOffset: sum.offset,
                strideBytes: rowBytes,
                rowElements,
                dtype: sum.dtype,
                program: sum.program,
              },
            ],
      ),
      chunks: spec.chunksFrom,
      leases: this.slots.map(({ index }) => ({
        offset: index * layout.leaseBytes,
        gaps: Float64Array.from(spec.parts.flatMap((part) => gapsOf(part, index * layout.leaseBytes))),
      })),
    });
  }

  #tensors(spec: BoundSpec, lease: number): Readonly<Record<string, DeviceTensor>> {
    const { memory, layout } = this.#init;
    const device = Object.freeze({ kind: 'cuda' as const, index: memory.device });
    const address = memory.address(this.rank);
    const operand = memory.nativeMemory('bind');
    const tensorOf = ({ spec: { dtype, rowShape }, sum, receiveRows, receiveOffset }: BoundPart): DeviceTensor =>
      deviceTensor(dtype, [sum?.rows ?? receiveRows, ...rowShape], {
        device,
        address,
        place: {
          operand,
          byteOffset: lease * layout.leaseBytes + (sum?.offset ?? receiveOffset),
          copier: memory.copier,
        },
      });
    return Object.freeze(Object.fromEntries(spec.parts.map((part) => [part.spec.name, tensorOf(part)])));
  }

  #run(
    name: string,
    slot: LeaseSlot<DeviceTensor>,
    call: { readonly dispatch: NativeGpuDispatch; readonly tensors: Readonly<Record<string, DeviceTensor>> },
    operands: readonly DeviceSource[],
    options: RunOptions | undefined,
  ): { readonly lease: DeviceLease; readonly done: Work<DeviceLease> | undefined } {
    const { stream } = this.#init;
    const timeoutMs = nativeMs(checkTimeout(options?.timeoutMs ?? this.#init.timeoutMs, name));
    const sources = operands.flatMap(({ operand, byteOffset, strideBytes }) => [operand, byteOffset, strideBytes]);
    const operation = stream
      .nativeStream(name)
      .dispatch(call.dispatch, slot.index, timeoutMs, ...(sources as (DeviceSource['operand'] | number)[]));
    this.count(slot);
    const lease = new HeldLease<DeviceTensor>(call.tensors, 0, () => this.#give(slot));
    slot.held = lease;
    if (operation === 0) {
      stream.join(this);
      return { lease, done: undefined };
    }
    const cuts = this.cuts();
    const linked = linkSignals(options?.signal, ...cuts);
    const control = createWork<DeviceLease>({ op: name, sequence: this.#sequence++, owner: this.owner });
    const letGo = this.hold(name);
    stream
      .follow(() => operation, linked.signal)
      .then((outcome) => {
        if (outcome.status !== 0) throw callError(name, outcome);
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
    return { lease, done: control.work };
  }

  #give(slot: LeaseSlot<DeviceTensor>): void {
    slot.held = undefined;
    const { stream, calls, memory } = this.#init;
    if (this.closed || stream.closed || memory.closed) return;
    stream.nativeStream('release').grant(calls, slot.index);
    stream.join(this);
  }
}

/** Offset and bytes of each run of rows that no sender writes: they hold what an earlier call left there. */
function gapsOf(part: BoundPart, lease: number): number[] {
  if (part.sum !== undefined) return [];
  return part.gaps.flatMap(([row, rows]) => [lease + part.receiveOffset + row * part.rowBytes, rows * part.rowBytes]);
}

function callError(name: string, outcome: Outcome): EpError {
  const code = codeOfStatus(outcome.status);
  const verb =
    code === 'EP_PEER_LOST' ? 'lost' : code === 'EP_TIMEOUT' ? 'timed out waiting for' : 'ended while waiting for';
  return new EpError(code, `${name}: ${outcome.message ?? outcomeText(outcome, verb)}`, {
    context: {
      rank: outcome.rank,
      stage: outcome.stage,
      expected: outcome.expected,
      found: outcome.found,
      awaited: outcome.rank >= 0 ? [outcome.rank] : [],
    },
  });
}
