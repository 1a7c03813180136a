/** Where old values of atomics land: words of 8 bytes in memory that the NIC knows. */
import type { NativeHostMemory } from '../binding.js';
import { native } from '../native.js';

const WORDS = 64;

export interface AtomicWord {
  readonly memory: NativeHostMemory;
  readonly byteOffset: number;
  /** The value that the NIC has left there. */
  read(): bigint;
}

/** As many as requests are under way at once; a word is another request's once it was given back. */
export class AtomicWords {
  readonly #free: AtomicWord[] = [];

  take(): AtomicWord {
    const word = this.#free.pop();
    if (word !== undefined) return word;
    const memory = new (native().binding.HostMemory)(WORDS * 8);
    const values = new BigUint64Array(memory.window(0, WORDS * 8));
    for (let index = 0; index < WORDS; index++) {
      this.#free.push({ memory, byteOffset: index * 8, read: () => values[index]! });
    }
    return this.#free.pop()!;
  }

  give(word: AtomicWord): void {
    this.#free.push(word);
  }
}
