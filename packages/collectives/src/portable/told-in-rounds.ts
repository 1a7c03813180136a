/** Of the calls of a rank that may wait: which go in rounds, what is heard there, and to whom what was said there is told in records as well. */
import type { ActiveCall } from './active-call.js';
import type { Arrivals, Words } from './arrivals.js';
import type { CollectivesInit } from './collectives-init.js';
import type { GroupRounds } from './group-rounds.js';
import { nameOf } from './ordered.js';
import type { CallRecord } from './records.js';

/** Between looks at a round that did not come at once. */
const FIRST_LOOK_MS = 1;
const LONGEST_LOOK_MS = 50;

interface Listener {
  readonly active: () => ActiveCall | undefined;
  /** All words of the call under way are there. */
  readonly onWords: () => void;
}

export class ToldInRounds {
  readonly #init: CollectivesInit;
  readonly #arrivals: Arrivals;
  readonly #listener: Listener;

  constructor(init: CollectivesInit, arrivals: Arrivals, listener: Listener) {
    this.#init = init;
    this.#arrivals = arrivals;
    this.#listener = listener;
  }

  /** Those of the view in which the call was begun. */
  roundsOf({ contributors }: ActiveCall): GroupRounds | undefined {
    const rounds = this.#init.rounds();
    return rounds?.isOf(contributors) === true ? rounds : undefined;
  }

  isTold(peer: number): boolean {
    const { rank, reaches } = this.#init;
    return peer === rank || reaches(peer);
  }

  /** Not where somebody has told of it in a record: who does has no round of it any more. */
  goesInRound(active: ActiveCall, { given, carry }: CallRecord): boolean {
    const { rank } = this.#init;
    const { contributors, sequence } = active;
    if ((given ?? carry) === undefined || this.roundsOf(active)?.ready !== true) return false;
    // HAZARD: as of records, it must not end before all are told, and could not be told otherwise.
    if (!contributors!.every((peer) => this.isTold(peer))) return false;
    const words = this.#arrivals.of(sequence);
    return !contributors!.some((peer) => peer !== rank && words.has(peer));
  }

  /** In a round, and in records where that does not come at once: false. */
  say(active: ActiveCall, own: CallRecord): boolean {
    if (this.#hear(active, this.roundsOf(active)!.say(own, nameOf(active.call)))) return true;
    for (const peer of active.contributors!) this.retell(peer, active.sequence);
    this.#listen(active, FIRST_LOOK_MS);
    return false;
  }

  /** Tells the peer in records what this rank has told in rounds. */
  retell(peer: number, sequence?: number): void {
    const { rank, rounds, traces, tell, membership } = this.#init;
    if (peer === rank || membership.isGone(peer)) return;
    for (const { record, kind } of rounds()?.owed(peer, sequence) ?? []) {
      traces.signalled(kind);
      const byteLength = record.given?.byteLength ?? 0;
      if (byteLength > 0) traces.wrote(kind, byteLength);
      tell(peer, record);
    }
  }

  /** HAZARD: whoever has the round may have ended the call, and be away from what it is asked in records. */
  #listen(active: ActiveCall, ms: number): void {
    const { membership } = this.#init;
    active.after(ms, () => {
      const rounds = membership.undisturbed ? this.roundsOf(active) : undefined;
      if (this.#listener.active() !== active || active.plan !== undefined || rounds === undefined) return;
      if (!this.#hear(active, rounds.look(active.sequence))) this.#listen(active, Math.min(2 * ms, LONGEST_LOOK_MS));
    });
  }

  /** All words of a call in a round. False where it is not there. */
  #hear(active: ActiveCall, words: Words | undefined): boolean {
    if (words === undefined) return false;
    const { traces, rank } = this.#init;
    const { call } = active;
    const byteLength = words.get(rank)!.given?.byteLength ?? 0;
    traces.signalled(nameOf(call));
    if (byteLength > 0) traces.wrote(call.kind, byteLength);
    for (const [peer, record] of words) if (peer !== rank) this.#arrivals.add(peer, record);
    this.#listener.onWords();
    return true;
  }
}
