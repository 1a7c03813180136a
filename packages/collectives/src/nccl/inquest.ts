/**
 * Who is missing, where NCCL does not say: whoever gives up leaves a note in the store, for which all wait from the beginning. All write down then where they are, those that
 * have no call under way, too; who does not within a second is not there, or elsewhere.
 */
import type { Store } from '@ep/core';

const ANSWERS_MS = 1000;

/** Where a rank is in the calls of its communicator. */
export interface Standing {
  /** Calls that it has made. */
  readonly made: number;
  /** Numbers and words of those under way. */
  readonly calls: readonly { readonly sequence: number; readonly text: string }[];
}

/** What the first to give up says. */
export interface Note {
  readonly rank: number;
  readonly code: string;
  readonly sequence: number;
}

/** By rank, of those who answered. */
export type Answers = ReadonlyMap<number, Standing>;

const jsonBytes = (value: unknown): Uint8Array => new Uint8Array(Buffer.from(JSON.stringify(value)));
const readJson = <T>(bytes: Uint8Array): T => JSON.parse(Buffer.from(bytes).toString()) as T;

const NOTE = 'nccl/note';
const standingKey = (rank: number): string => `nccl/standing/${rank}`;

export class Inquest {
  readonly #store: Store;
  readonly #rank: number;
  readonly #size: number;
  #told: Promise<void> | undefined;

  constructor(store: Store, rank: number, size: number) {
    this.#store = store;
    this.#rank = rank;
    this.#size = size;
  }

  /** Resolves with the first note, whoever wrote it. */
  async hear(signal: AbortSignal): Promise<Note> {
    return readJson<Note>(await this.#store.get(NOTE, { timeoutMs: Number.POSITIVE_INFINITY, signal }));
  }

  /** Says where this rank is, once. */
  tell(standing: Standing): Promise<void> {
    this.#told ??= this.#store.set(standingKey(this.#rank), jsonBytes(standing));
    return this.#told;
  }

  /** Resolves with what all have said who answer in time. */
  async hold(own: Standing, note: Note): Promise<Answers> {
    await this.tell(own);
    await this.#store.compareSet(NOTE, new Uint8Array(0), jsonBytes(note));
    const keys = Array.from({ length: this.#size }, (_, rank) => standingKey(rank));
    // Whoever does not answer is who is looked for.
    await this.#store.wait(keys, { timeoutMs: ANSWERS_MS }).catch(() => {});
    const standings = new Map<number, Standing>();
    for (const [rank, key] of keys.entries()) {
      if (await this.#store.check([key])) standings.set(rank, readJson<Standing>(await this.#store.get(key)));
    }
    return standings;
  }

  /** Waits so long for the others to leave, too. */
  async part(timeoutMs: number): Promise<void> {
    const keys = Array.from({ length: this.#size }, (_, rank) => `nccl/left/${rank}`);
    try {
      await this.#store.set(keys[this.#rank]!, new Uint8Array(1));
      await this.#store.wait(keys, { timeoutMs });
    } catch {
      // They go on without this rank, or the store is gone.
    }
  }
}
