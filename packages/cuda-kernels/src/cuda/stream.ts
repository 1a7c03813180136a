/** A stream of a GPU. What is put on it runs on the device, in order; JS only hears of it. */
import {
  checkTimeout,
  type Device,
  type DeviceTensor,
  defaultTimeoutMs,
  type EpCode,
  EpError,
  type Event,
  invalid,
  linkSignals,
  Resource,
  type Stream,
  type WaitOptions,
} from '@ep/core';
import {
  codeOfStatus,
  type GpuQueue,
  type GraphMember,
  type GraphReplay,
  type NativeGpuEvent,
  type NativeGpuGraph,
  type NativeGpuLibrary,
  type NativeGpuStream,
  native,
  type OperationId,
  type Outcome,
} from '@ep/native';
import { copyEnd } from './buffer.js';

export interface CudaStreamOptions {
  /** Its kernels go before those of other streams where both could start. */
  readonly highPriority?: boolean;
}

const nativeMs = (timeoutMs: number): number => (Number.isFinite(timeoutMs) ? timeoutMs : -1);

const AS_TO: Partial<Record<EpCode, string>> = {
  EP_TIMEOUT: 'while awaiting',
  EP_PEER_LOST: 'by the loss of',
  EP_MISMATCH: 'by another call of',
};

function endText(code: EpCode, rank: number): string {
  const how = code === 'EP_TIMEOUT' ? 'timed out' : 'cut off';
  return rank < 0 ? how : `${how} ${AS_TO[code] ?? 'by, or while awaiting,'} rank ${rank}`;
}

export function throwOutcome(where: string, outcome: Outcome): void {
  if (outcome.status === 0) return;
  const code = codeOfStatus(outcome.status);
  throw new EpError(code, `${where}: ${outcome.message ?? endText(code, outcome.rank)}`, {
    context: { rank: outcome.rank, expected: outcome.expected, found: outcome.found },
  });
}

/** A point in a stream. */
export class CudaEvent extends Resource implements Event {
  readonly #event: NativeGpuEvent;
  readonly #stream: CudaStream;
  readonly #timed: boolean;

  constructor(event: NativeGpuEvent, stream: CudaStream, timed: boolean) {
    super('event of a GPU');
    this.#event = event;
    this.#stream = stream;
    this.#timed = timed;
  }

  get reached(): boolean {
    return this.#event.reached();
  }

  /** Milliseconds of the device from an earlier timed event to this one. Both must be reached. */
  elapsedMs(from: CudaEvent): number {
    this.checkOpen('elapsedMs');
    if (!this.#timed || !from.#timed) {
      throw new EpError('EP_INVALID_ARGUMENT', 'elapsedMs: both events must be recorded with {timed: true}');
    }
    return this.#event.elapsedMs(from.#event);
  }

  /** The addon's object. @internal */
  nativeEvent(operation: string): NativeGpuEvent {
    this.checkOpen(operation);
    return this.#event;
  }

  async synchronize(options: WaitOptions = {}): Promise<void> {
    this.checkOpen('synchronize');
    // What was put on the stream behind the event is waited for, too, unless the event is reached first.
    if (!this.reached) await this.#stream.synchronize(options);
  }

  protected override release(): void {}
}

/** Work that was captured once, to be launched with one call as often as one likes. */
export class CudaGraph extends Resource {
  readonly #graph: NativeGpuGraph;
  readonly #members: readonly GraphMember[];
  /** Replays that have not ended, and where they run. */
  #replays = 0;
  #replayedOn: CudaStream | undefined;

  /** Made by `CudaStream.capture`. */
  constructor(graph: NativeGpuGraph, members: readonly GraphMember[]) {
    super('graph of a GPU');
    this.#graph = graph;
    this.#members = members;
  }

  /** Throws if one of its dispatchers or groups would refuse a call, and beside replays on another stream; none of them counts it then. @internal */
  beginReplay(operation: string, stream: CudaStream): readonly GraphReplay[] {
    if (this.#members.length === 0) return [];
    if (this.#replays > 0 && this.#replayedOn !== stream) {
      const why = `${operation}: this graph is being replayed on another stream, and its calls follow each other: await that first`;
      throw new EpError('EP_BUSY', why, { context: { replays: this.#replays } });
    }
    const begun: GraphReplay[] = [];
    try {
      for (const member of this.#members) begun.push(member.beginReplay(operation, stream));
    } catch (error) {
      for (const replay of begun) replay.end(undefined);
      throw error;
    }
    this.#replays++;
    this.#replayedOn = stream;
    return [...begun, { cuts: [], end: () => void this.#replays-- }];
  }

  /** The addon's object. @internal */
  nativeGraph(operation: string): NativeGpuGraph {
    this.checkOpen(operation);
    return this.#graph;
  }

  protected override release(): void {
    this.#graph.release();
  }
}

export class CudaStream extends Resource implements Stream, GpuQueue {
  readonly device: Device;
  readonly #library: NativeGpuLibrary;
  readonly #stream: NativeGpuStream;
  /** While the stream is being captured: whose calls have been put into the graph. */
  #captured: Set<GraphMember> | undefined;
  #pending = 0;
  #drained: (() => void) | undefined;

  /** Made by `CudaDevice.stream`. */
  constructor(library: NativeGpuLibrary, device: number, options: CudaStreamOptions) {
    super(`stream of GPU ${device}`);
    this.device = Object.freeze({ kind: 'cuda', index: device });
    this.#library = library;
    this.#stream = new (native().binding.GpuStream)(library, device, options.highPriority ?? false);
  }

  get capturing(): boolean {
    return this.#captured !== undefined;
  }

  /** The graph that is being captured has something of this member. Does nothing at other times. @internal */
  join(member: GraphMember): void {
    this.#captured?.add(member);
  }

  /** The addon's object. @internal */
  nativeStream(operation: string): NativeGpuStream {
    this.checkOpen(operation);
    return this.#stream;
  }

  /**
   * Follows an operation of this stream to its end; an abort ends its waits, and the promise rejects with `signal.reason` once the device has let go of
   * what it uses.
   */
  async follow(start: (stream: NativeGpuStream) => OperationId, signal?: AbortSignal): Promise<Outcome> {
    this.checkOpen('launch');
    this.#pending++;
    try {
      return await native().operations.run(() => start(this.#stream), signal);
    } finally {
      this.#pending--;
      if (this.#pending === 0) this.#drained?.();
    }
  }

  record(options: { readonly timed?: boolean } = {}): CudaEvent {
    this.checkOpen('record');
    const timed = options.timed ?? false;
    const event = new (native().binding.GpuEvent)(this.#library, this.device.index, timed);
    this.#stream.record(event);
    return new CudaEvent(event, this, timed);
  }

  wait(event: Event): void {
    this.checkOpen('wait');
    if (!(event instanceof CudaEvent)) {
      throw invalid('event', { where: 'wait', expected: 'an event of a stream of a GPU', found: event });
    }
    this.#stream.wait(event.nativeEvent('wait'));
  }

  /** Copies the bytes of one to the other, in the order of the stream. Arrays must lie in pinned memory, and stay unchanged until then. */
  copy(from: DeviceTensor | ArrayBufferView, to: DeviceTensor | ArrayBufferView): void {
    this.checkOpen('copy');
    const [source, target] = [copyEnd(from, 'copy from'), copyEnd(to, 'copy to')];
    if (source.byteLength !== target.byteLength) {
      throw invalid('to', { where: 'copy', expected: `${source.byteLength} bytes`, found: target.byteLength });
    }
    this.#stream.copy(target.operand, target.byteOffset, source.operand, source.byteOffset, source.byteLength);
  }

  async synchronize(options: WaitOptions = {}): Promise<void> {
    this.#checkRuns('synchronize');
    const timeoutMs = nativeMs(checkTimeout(options.timeoutMs ?? defaultTimeoutMs(), 'synchronize'));
    throwOutcome('synchronize', await this.follow((stream) => stream.follow(timeoutMs), options.signal));
  }

  /**
   * Runs `body`, which puts work on this stream and nothing else runs of it; the work is kept as a graph instead of being run. What a graph uses stays alive with
   * it. Dispatches and collective calls in it count on the device: each replay is a call. A body that throws leaves nothing behind: its calls were never made.
   */
  capture(body: () => void): CudaGraph {
    this.#checkRuns('capture');
    this.#stream.captureBegin();
    const members = new Set<GraphMember>();
    this.#captured = members;
    let failure: { readonly reason: unknown } | undefined;
    try {
      body();
    } catch (reason) {
      failure = { reason };
    }
    this.#captured = undefined;
    let graph: CudaGraph | undefined;
    try {
      graph = new CudaGraph(this.#stream.captureEnd(), [...members]);
    } finally {
      const failed = failure !== undefined || graph === undefined;
      for (const member of members) member.endCapture?.(failed);
    }
    if (failure === undefined) return graph;
    void graph.close();
    throw failure.reason;
  }

  /**
   * Resolves when this replay has run; rejects as the calls in it would, naming ranks of the world, and a replay that fails poisons their dispatchers and groups as a call does: a dispatcher
   * until all ranks have called `resync()`, a group for good. The graph itself stays good.
   */
  async launch(graph: CudaGraph, options: WaitOptions = {}): Promise<void> {
    this.#checkRuns('launch');
    const timeoutMs = nativeMs(checkTimeout(options.timeoutMs ?? defaultTimeoutMs(), 'launch'));
    const replayed = graph.nativeGraph('launch');
    options.signal?.throwIfAborted();
    const replays = graph.beginReplay('launch', this);
    const linked = linkSignals(options.signal, ...replays.flatMap(({ cuts }) => cuts));
    let failure: { readonly reason: unknown } | undefined;
    let launched = false;
    try {
      const outcome = await this.follow((stream) => {
        const operation = stream.launchGraph(replayed, timeoutMs);
        launched = true;
        return operation;
      }, linked.signal);
      throwOutcome('launch', outcome);
    } catch (reason) {
      if (launched) failure = { reason };
      throw reason;
    } finally {
      linked.unlink();
      for (const replay of replays) replay.end(failure);
    }
  }

  #checkRuns(operation: string): void {
    this.checkOpen(operation);
    if (this.capturing) {
      throw new EpError('EP_INVALID_ARGUMENT', `${operation}: the stream is being captured and runs nothing meanwhile`);
    }
  }

  /**
   * Waits for all that was put on the stream, then ends the thread that watches. HAZARD: the native close waits too, but on this thread, and what it waits for may be
   * behind an event of another stream, whose kernel only this thread can end.
   */
  protected override async release(): Promise<void> {
    if (this.#pending > 0) {
      await new Promise<void>((resolve) => {
        this.#drained = resolve;
      });
    }
    try {
      await native().operations.run(() => this.#stream.follow(-1));
    } finally {
      this.#stream.close();
    }
  }
}
