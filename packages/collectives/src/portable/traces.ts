/** Counts what was written, by kind of call. */
import type { OpKind, OpTrace } from '../engine.js';

export type TracedKind = OpKind | 'send' | 'recv';
type Counts = { -readonly [key in keyof OpTrace]: OpTrace[key] };

export class Traces {
  readonly #counts = new Map<TracedKind, Counts>();

  call(kind: TracedKind): void {
    this.#of(kind).calls++;
  }

  /** A chunk for one peer. */
  wrote(kind: TracedKind, byteLength: number): void {
    const counts = this.#of(kind);
    counts.writes++;
    counts.bytes += byteLength;
  }

  /** A record to one peer. That a slot is free again rides on what is sent anyway where it can, and is not counted. */
  signalled(kind: TracedKind): void {
    this.#of(kind).signals++;
  }

  snapshot(): Readonly<Partial<Record<TracedKind, OpTrace>>> {
    return Object.fromEntries([...this.#counts].map(([kind, counts]) => [kind, { ...counts }]));
  }

  #of(kind: TracedKind): Counts {
    let counts = this.#counts.get(kind);
    if (counts === undefined) {
      counts = { calls: 0, bytes: 0, writes: 0, signals: 0 };
      this.#counts.set(kind, counts);
    }
    return counts;
  }
}
