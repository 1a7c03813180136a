/** What ranks have told of calls that this rank has not ended, by call and rank; of those under way, what this rank has told too. */
import type { CallRecord } from './records.js';

/** Of one call, by rank. */
export type Words = ReadonlyMap<number, CallRecord>;

export class Arrivals {
  readonly #calls = new Map<number, Map<number, CallRecord>>();

  of(sequence: number): Words {
    return this.#of(sequence);
  }

  /** Somebody has told of the call. */
  has(sequence: number): boolean {
    const words = this.#calls.get(sequence);
    return words !== undefined && words.size > 0;
  }

  all(): Iterable<Words> {
    return this.#calls.values();
  }

  add(rank: number, record: CallRecord): void {
    this.#of(record.sequence).set(rank, record);
  }

  /** What was told of a call that has ended; nothing is kept of it. */
  take(sequence: number): Words {
    const words = this.#of(sequence);
    this.#calls.delete(sequence);
    return words;
  }

  /** Of calls that nobody makes any more. */
  drop(ended: (sequence: number) => boolean): void {
    for (const sequence of this.#calls.keys()) if (ended(sequence)) this.#calls.delete(sequence);
  }

  #of(sequence: number): Map<number, CallRecord> {
    let words = this.#calls.get(sequence);
    if (words === undefined) {
      words = new Map();
      this.#calls.set(sequence, words);
    }
    return words;
  }
}

/** Those who are needed and have not told. */
export const absentFrom = (words: Words, contributors: readonly number[]): readonly number[] =>
  contributors.filter((rank) => !words.has(rank));

/** What these ranks have told all that they give with, for whoever may not have heard it from them. */
export function retold(words: Words, ranks: readonly number[]): readonly CallRecord[] {
  return ranks.flatMap((rank) => {
    const record = words.get(rank);
    return record?.given === undefined ? [] : [{ ...record, of: rank }];
  });
}
