/** What a buffer for experts has under way on its stream: launches, what awaits them, and the failure that ends the buffer. */
import { createWork, doneWork, EpError, linkSignals, type Work, type WorkControl, WorkOwner } from '@ep/core';
import type { NativeHostStream, OperationId, Outcome } from '@ep/native';
import type { HostStream } from '../host-stream.js';
import type { Culprits } from './culprits.js';
import { callFailure, isRefusal, poisonedBy } from './failure.js';
import { hookOf } from './hook.js';
import type { MoeCallOptions } from './options.js';
import type { MoeHook } from './received.js';

const DONE: Outcome = { status: 0, rank: -1, stage: 0, expected: 0n, found: 0n };

export interface LaunchesInit {
  readonly stream: HostStream;
  /** Throws where the buffer, or its memory, was closed. */
  readonly checkOpen: (where: string) => void;
  /** Keeps the buffer from being closed until what it returns is called. */
  readonly hold: (operation: string) => () => void;
  /** Fires when the buffer begins to close. */
  readonly closing: () => AbortSignal;
  /** Where no call goes on without a rank: who tells, and is told, whom calls have missed. */
  readonly culprits?: Culprits | undefined;
}

export class Launches {
  readonly #init: LaunchesInit;
  readonly #owner = new WorkOwner('MoE buffer');
  #cancel = new AbortController();
  #sequence = 0;
  /** Launches that have not ended. */
  #underWay = 0;
  /** What another rank told, and has ended the buffer. */
  #told: EpError | undefined;
  #failure: { readonly reason: unknown } | undefined;

  constructor(init: LaunchesInit) {
    this.#init = init;
  }

  /** What has ended the buffer: it takes no more calls. */
  get failure(): { readonly reason: unknown } | undefined {
    return this.#failure;
  }

  /** Throws a failure that nobody looked at, and `EP_POISONED` after any. */
  checkUsable(where: string): void {
    this.#init.checkOpen(where);
    this.#owner.check();
    if (this.#failure !== undefined) throw poisonedBy(this.#failure.reason, where);
  }

  /** Throws what the addon refuses: then nothing was launched, and the call does not count. */
  launch(start: (stream: NativeHostStream) => OperationId, { signal }: MoeCallOptions): Promise<Outcome> {
    const linked = linkSignals(signal, ...this.#ends());
    try {
      const { stream } = this.#init;
      const operation = start(stream.native('launch'));
      const under = operation === 0 ? Promise.resolve(DONE) : stream.follow(operation, linked.signal);
      return under.finally(linked.unlink);
    } catch (error) {
      linked.unlink();
      throw error;
    }
  }

  follow<T>(name: string, under: Promise<Outcome>, value: () => T, onRefused = (): void => {}): Work<T> {
    const control = createWork<T>({ op: name, sequence: this.#sequence++, owner: this.#owner });
    const letGo = this.#init.hold(name);
    const { culprits } = this.#init;
    this.#underWay++;
    culprits?.watch(
      () => this.#underWay > 0,
      (error) => this.#hear(error),
    );
    under
      .finally(() => this.#underWay--)
      .then((outcome) => {
        if (outcome.status !== 0) throw callFailure(name, outcome);
        control.resolve(value());
      })
      .catch((reason: unknown) => {
        const refused = isRefusal(reason);
        if (refused) onRefused();
        else this.#failure ??= { reason };
        const isTold = reason === this.#told;
        const cut = !isTold && this.#ends().some((signal) => signal.aborted && signal.reason === reason);
        if (cut) control.abort(reason);
        else if (refused || culprits === undefined) control.reject(reason);
        else return this.#rejectAfter(culprits.settle(name, reason), control, reason);
        return undefined;
      })
      .finally(letGo);
    return control.work;
  }

  /** With what others know of why a call failed. */
  async #rejectAfter<T>(known: Promise<unknown>, control: WorkControl<T>, reason: unknown): Promise<void> {
    const better = await known.catch(() => reason);
    if (this.#failure?.reason === reason) this.#failure = { reason: better };
    control.reject(better);
  }

  /** Another rank has told that its call has failed: what is under way here gets no further. HAZARD: nothing may be launched from here on, for it would run with nobody who follows it. */
  #hear(error: EpError): void {
    if (this.#failure !== undefined) return;
    this.#failure = { reason: error };
    this.#told = error;
    this.#cancel.abort(error);
  }

  done(name: string): Work {
    return doneWork(name, this.#sequence++, undefined);
  }

  hook<T>(where: string, second: (limits: MoeCallOptions) => Work<T>): MoeHook<T> {
    return hookOf(where, (at) => this.checkUsable(at), second);
  }

  /** The buffer begins again: what had ended it is over. Nothing is under way. */
  mend(): void {
    this.#failure = undefined;
    if (this.#told !== undefined) this.#cancel = new AbortController();
    this.#told = undefined;
    this.#init.culprits?.renew();
  }

  /** Nothing is under way any more. */
  idle(): Promise<void> {
    return this.#owner.idle();
  }

  /** Ends what is under way, and waits for it. */
  async cancel(): Promise<void> {
    this.#init.culprits?.rest();
    this.#cancel.abort(new EpError('EP_ABORTED', 'the MoE buffer was closed'));
    await this.idle();
  }

  /** Throws a failure that nobody looked at. */
  check(): void {
    this.#owner.check();
  }

  #ends(): readonly AbortSignal[] {
    return [this.#cancel.signal, this.#init.closing()];
  }
}
