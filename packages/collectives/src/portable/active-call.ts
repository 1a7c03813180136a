/** One collective call from its turn in the queue to its end. */
import { EpError, formatRanks } from '@ep/core';
import { listenToAbort } from './abort.js';
import type { Found } from './admission.js';
import { absentFrom, type Words } from './arrivals.js';
import { nameOf, type OrderedCall, type OrderedEnd } from './ordered.js';
import type { DataPlan } from './plan.js';

/** A call of the queue, and how its caller hears of its end. */
export class QueuedCall {
  readonly call: OrderedCall;
  readonly #stopListening: () => void;
  #outcome: { readonly end: OrderedEnd } | { readonly error: unknown } | undefined;
  #resolve: ((end: OrderedEnd) => void) | undefined;
  #reject: ((error: unknown) => void) | undefined;
  /** Whoever may still use the arrays of a call that has failed: its caller hears of the failure afterwards. */
  heldBy: Pick<DataPlan, 'idle'> | undefined;

  constructor(call: OrderedCall, onAbort: (queued: QueuedCall) => void) {
    this.call = call;
    this.#stopListening = listenToAbort(call.signal, () => onAbort(this));
  }

  /** No failure of others ends it: it is what they all make then. */
  get repairs(): boolean {
    return this.call.membership?.repairs === true;
  }

  get settled(): boolean {
    return this.#outcome !== undefined;
  }

  resolve(end: OrderedEnd): void {
    if (this.settled) return;
    this.#outcome = { end };
    this.#stopListening();
    this.#resolve?.(end);
  }

  reject(error: unknown): void {
    if (this.settled) return;
    this.#outcome = { error };
    this.#stopListening();
    const idle = this.heldBy?.idle?.();
    if (idle === undefined) this.#reject?.(error);
    else void idle.then(() => this.#reject?.(error));
  }

  /** What `run` returns. */
  answer(): OrderedEnd | Promise<OrderedEnd> {
    const outcome = this.#outcome;
    if (outcome === undefined) {
      return new Promise((resolve, reject) => {
        this.#resolve = resolve;
        this.#reject = reject;
      });
    }
    return 'end' in outcome ? outcome.end : Promise.reject(outcome.error);
  }
}

export class ActiveCall {
  readonly queued: QueuedCall;
  /** Set once this rank has told the others of its call: the view of that moment. */
  contributors: readonly number[] | undefined;
  plan: DataPlan | undefined;
  /** This rank has told that it has all of its data. */
  finished = false;
  /** Another rank has completed it: so does this one, as soon as it has what it lacks, whatever is being agreed on. */
  due = false;
  /** Of a repair: this rank has told that it has come. */
  agreeing = false;
  /** Of another question or change of who takes part, once all have come: whom all have found. */
  found: ReadonlyMap<number, number> | undefined;
  readonly #done = new Set<number>();
  readonly #timers = new Set<NodeJS.Timeout>();

  constructor(queued: QueuedCall) {
    this.queued = queued;
  }

  get call(): OrderedCall {
    return this.queued.call;
  }

  get repairs(): boolean {
    return this.queued.repairs;
  }

  get sequence(): number {
    return this.queued.call.sequence;
  }

  /** Its root is gone since before it began. All know, and nobody waits for anybody. */
  get rootless(): boolean {
    const { root } = this.call;
    return root >= 0 && this.contributors !== undefined && !this.contributors.includes(root);
  }

  /** Whom it takes in: all that it names and that are no members, or nobody. */
  get admits(): Found {
    const admitted = this.call.membership?.admitted ?? [];
    const coming = admitted.filter((rank) => this.contributors?.includes(rank) !== true);
    const found = coming.map((rank) => [rank, this.found?.get(rank) ?? 0] as const);
    return found.every(([, attempt]) => attempt > 0) ? found : [];
  }

  done(rank: number): void {
    this.#done.add(rank);
  }

  isDone(rank: number): boolean {
    return this.#done.has(rank);
  }

  /** Nothing of that rank is needed any more. */
  needs(rank: number): boolean {
    return !(this.finished && this.#done.has(rank));
  }

  after(ms: number, action: () => void): void {
    if (ms === Number.POSITIVE_INFINITY) return;
    const timer = setTimeout(
      () => {
        this.#timers.delete(timer);
        action();
      },
      Math.min(ms, 2 ** 31 - 1),
    );
    this.#timers.add(timer);
  }

  /** Stops what it does; `queued` is left to whoever ends it. */
  cut(): void {
    for (const timer of this.#timers) clearTimeout(timer);
    this.plan?.cut();
  }

  /** `awaited`: members that an agreement on the view waits for; `unreached`: those that this rank could not tell of its call. Either may be none. */
  timeoutError(
    rank: number,
    words: Words,
    { awaited, unreached }: { readonly awaited: readonly number[]; readonly unreached: readonly number[] },
  ): EpError {
    const members = this.contributors ?? [rank];
    const absent = absentFrom(words, members).filter((peer) => peer !== rank);
    const unfinished = members.filter((peer) => peer !== rank && !this.#done.has(peer));
    // A peer may have all it needs, and say so, where what it sent went astray.
    const lacking = this.plan?.lacking.filter((peer) => this.#done.has(peer)) ?? [];
    const [missing, what] =
      awaited.length > 0
        ? [awaited, 'did not agree on the next view']
        : absent.length > 0
          ? [absent, 'did not come']
          : this.plan === undefined
            ? [unreached, 'could not be told of it']
            : unfinished.length > 0
              ? [unfinished, 'came, but did not finish']
              : [lacking, 'finished, but not all that was sent arrived'];
    const arrived = members.filter((peer) => !missing.includes(peer));
    const { sequence, timeoutMs } = this.call;
    return new EpError(
      'EP_TIMEOUT',
      `${nameOf(this.call)} ${sequence}: ${formatRanks(missing)} ${what} within the ${timeoutMs} ms of rank ${rank}; ${formatRanks(arrived)} did`,
      { context: { sequence, arrived, awaited: missing, timeoutMs, rank } },
    );
  }
}
