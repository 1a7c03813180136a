/** A host stream: a native thread that runs kernels in the order in which they were launched. */
import { checkObject, invalid, Resource } from '@ep/core';
import {
  type NativeHostStream,
  type NativeStreamEvent,
  native,
  nativePlaceOf,
  type OperationId,
  type Outcome,
} from '@ep/native';

/** A point in a stream. */
export interface HostEvent {
  /** True once everything launched before the record has ended. */
  readonly done: boolean;
}

class RecordedEvent implements HostEvent {
  readonly handle: NativeStreamEvent;

  constructor(handle: NativeStreamEvent) {
    this.handle = handle;
  }

  get done(): boolean {
    return this.handle.done();
  }
}

export interface HostStreamOptions {
  /** How long an idle stream looks for its next kernel before it sleeps, in nanoseconds. Spinning helps only while cores are to spare: 0 unless given. */
  readonly spinNs?: number;
}

export class HostStream extends Resource {
  readonly #addon = native();
  readonly #stream: NativeHostStream;
  #pending = 0;
  #drained: (() => void) | undefined;

  constructor(options: HostStreamOptions = {}) {
    super('host stream');
    checkObject(options, 'options', 'an object with spinNs', 'HostStream');
    this.#stream = new this.#addon.binding.HostStream(options.spinNs ?? 0);
  }

  /** Kernels launched but not ended. */
  get depth(): number {
    return this.#pending;
  }

  /**
   * Launches through the addon; resolves with how the kernel ended. An abort cancels it: the promise rejects with `signal.reason` once the kernel
   * has let go of its operands.
   */
  launch(start: (stream: NativeHostStream) => OperationId, signal?: AbortSignal): Promise<Outcome> {
    this.checkOpen('launch');
    if (typeof start !== 'function') throw invalid('start', { where: 'launch', expected: 'a function', found: start });
    return this.#follow(() => start(this.#stream), signal);
  }

  /** For launches that may end inside their call (the addon says operation 0), without a closure for each; the others go to `follow`. @internal */
  native(where: string): NativeHostStream {
    this.checkOpen(where);
    return this.#stream;
  }

  /** How a launch through `native` ended. @internal */
  follow(operation: OperationId, signal: AbortSignal): Promise<Outcome> {
    return this.#follow(() => operation, signal);
  }

  #follow(start: () => OperationId, signal?: AbortSignal): Promise<Outcome> {
    this.#pending++;
    return this.#addon.operations.run(start, signal).finally(() => {
      this.#pending--;
      if (this.#pending === 0) this.#drained?.();
    });
  }

  /**
   * Copies between native memories, past the caches if `nonTemporal`. Throws `EP_INVALID_ARGUMENT` for ordinary JS memory or unequal lengths,
   * `EP_DETACHED` for memory that was closed.
   */
  async copy(
    source: Uint8Array,
    target: Uint8Array,
    options: { readonly nonTemporal?: boolean; readonly signal?: AbortSignal } = {},
  ): Promise<void> {
    checkObject(options, 'options', 'an object with nonTemporal and signal', 'copy');
    const [from, to] = [nativePlaceOf(source), nativePlaceOf(target)];
    if (from === undefined || to === undefined || source.byteLength !== target.byteLength) {
      throw invalid('source and target', {
        where: 'copy',
        expected: 'views of native memory (allocateHost, symmetric memory) of one length',
        found: [source.byteLength, target.byteLength],
      });
    }
    await this.launch(
      (stream) =>
        stream.copy(
          from.operand,
          from.byteOffset,
          to.operand,
          to.byteOffset,
          source.byteLength,
          options.nonTemporal ?? false,
        ),
      options.signal,
    );
  }

  /** An event behind everything launched so far. */
  record(): HostEvent {
    const event = new RecordedEvent(new this.#addon.binding.StreamEvent());
    void this.launch((stream) => stream.record(event.handle));
    return event;
  }

  /** What is launched from now on starts only after the event, which may be of another stream. */
  wait(event: HostEvent): void {
    if (!(event instanceof RecordedEvent)) {
      throw invalid('event', { where: 'wait', expected: 'an event of a host stream', found: event });
    }
    void this.launch((stream) => stream.waitEvent(event.handle));
  }

  /** Resolves when everything launched so far has ended. */
  async synchronize(): Promise<void> {
    await this.launch((stream) => stream.record(new this.#addon.binding.StreamEvent()));
  }

  /** Waits for what was launched, then ends the thread. */
  protected override async release(): Promise<void> {
    if (this.#pending > 0) {
      await new Promise<void>((resolve) => {
        this.#drained = resolve;
      });
    }
    this.#stream.close();
  }
}
