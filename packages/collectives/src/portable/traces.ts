/** Counts what was written, by kind of call. */
import type { OpKind, OpTrace } from '../engine.js';

export type TracedKind = OpKind | 'send' | 'recv';

/** What is asked or changed of who takes part is nobody's operation. */
type CountedKind = TracedKind | 'membership';
type Counts = { -readonly [key in keyof OpTrace]: OpTrace[key] };

export class Traces {
  readonly #counts = new Map<CountedKind, Counts>();

  call(kind: CountedKind): void {
    this.#of(kind).calls++;
  }

  /** A chunk for one peer. */
  wrote(kind: CountedKind, byteLength: number): void {
    const counts = this.#of(kind);
    counts.writes++;
    counts.bytes += byteLength;
  }

  /** A record to one peer. That a slot is free again rides on what is sent anyway where it can, and is not counted. */
  signalled(kind: CountedKind): void {
    this.#of(kind).signals++;
  }

  snapshot(): Readonly<Partial<Record<TracedKind, OpTrace>>> {
    const operations = [...this.#counts].filter(([kind]) => kind !== 'membership');
    return Object.fromEntries(operations.map(([kind, counts]) => [kind, { ...counts }]));
  }

  #of(kind: CountedKind): Counts {
    let counts = this.#counts.get(kind);
    if (counts === undefined) {
      counts = { calls: 0, bytes: 0, writes: 0, signals: 0 };
      this.#counts.set(kind, counts);
    }
    return counts;
  }
}
