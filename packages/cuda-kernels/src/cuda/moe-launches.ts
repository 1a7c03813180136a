/** What a buffer for experts on a GPU has under way on its stream: what awaits it, and the failure that ends the buffer. */
import { createWork, doneWork, EpError, linkSignals, type Work, WorkOwner } from '@ep/core';
import type { GraphReplay, OperationId } from '@ep/native';
import { callFailure, isRefusal, poisonedBy } from '../moe/failure.js';
import { hookOf } from '../moe/hook.js';
import type { MoeCallOptions } from '../moe/options.js';
import type { MoeHook } from '../moe/received.js';
import type { CudaStream } from './stream.js';

interface DeviceLaunchesInit {
  readonly stream: CudaStream;
  /** Throws where the buffer, or its memory, was closed. */
  readonly checkOpen: (where: string) => void;
  /** Keeps the buffer from being closed until what it returns is called. */
  readonly hold: (operation: string) => () => void;
  /** Fires when the buffer begins to close. */
  readonly closing: () => AbortSignal;
}

export class DeviceLaunches {
  readonly #init: DeviceLaunchesInit;
  readonly #owner = new WorkOwner('MoE buffer of a GPU');
  readonly #cancel = new AbortController();
  #sequence = 0;
  #failure: { readonly reason: unknown } | undefined;

  constructor(init: DeviceLaunchesInit) {
    this.#init = init;
  }

  /** Throws a failure that nobody looked at, and `EP_POISONED` after any. */
  checkUsable(where: string): void {
    this.#init.checkOpen(where);
    this.#owner.check();
    if (this.#failure !== undefined) throw poisonedBy(this.#failure.reason, where);
  }

  /** Follows what was launched, on the buffer's stream unless `on` says where. A refused call is over, and the next one may go on; any other failure ends the buffer. */
  follow<T>(
    name: string,
    operation: OperationId,
    { signal }: MoeCallOptions,
    value: () => T,
    onRefused = (): void => {},
    on: CudaStream = this.#init.stream,
  ): Work<T> {
    const ends = [this.#cancel.signal, this.#init.closing()];
    const linked = linkSignals(signal, ...ends);
    const control = createWork<T>({ op: name, sequence: this.#sequence++, owner: this.#owner });
    const letGo = this.#init.hold(name);
    on.follow(() => operation, linked.signal)
      .then((outcome) => {
        if (outcome.status !== 0) throw callFailure(name, outcome);
        control.resolve(value());
      })
      .catch((reason: unknown) => {
        if (isRefusal(reason)) onRefused();
        else this.#failure ??= { reason };
        if (ends.some((one) => one.aborted && one.reason === reason)) control.abort(reason);
        else control.reject(reason);
      })
      .finally(() => {
        linked.unlink();
        letGo();
      });
    return control.work;
  }

  done(name: string): Work {
    return doneWork(name, this.#sequence++, undefined);
  }

  /** A replay of a graph with calls of the buffer. Whoever launched it is told of a failure, which ends the buffer as that of a call does. */
  beginReplay(operation: string): GraphReplay {
    const control = createWork({ op: operation, sequence: this.#sequence++, owner: this.#owner });
    const letGo = this.#init.hold(operation);
    return {
      cuts: [this.#cancel.signal, this.#init.closing()],
      end: (failure) => {
        if (failure === undefined) {
          control.resolve();
        } else {
          this.#failure ??= failure;
          control.abort(failure.reason);
        }
        letGo();
      },
    };
  }

  hook<T>(where: string, second: (limits: MoeCallOptions) => Work<T>): MoeHook<T> {
    return hookOf(where, (at) => this.checkUsable(at), second);
  }

  /** Ends what is under way, and waits for it. */
  async cancel(): Promise<void> {
    this.#cancel.abort(new EpError('EP_ABORTED', 'the MoE buffer was closed'));
    await this.#owner.idle();
  }

  /** Throws a failure that nobody looked at. */
  check(): void {
    this.#owner.check();
  }
}
