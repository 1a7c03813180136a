/** A part of a store under a prefix, as c10d's PrefixStore: `key` is `prefix/key` below. */
import { invalid } from '../errors.js';
import { Resource } from '../scope.js';
import type { Store, StoreWaitOptions } from '../store.js';
import { linkSignals } from '../waiting.js';
import { checkKeys, checkWaitOptions, copyEntries, type StoreEntry } from './replica.js';

/** Closing it ends its own waits and leaves the store below open. */
class PrefixStore extends Resource implements Store {
  readonly #below: Store;
  readonly #prefix: string;

  constructor(below: Store, prefix: string) {
    super(`prefix store ${JSON.stringify(prefix)}`);
    this.#below = below;
    this.#prefix = prefix;
  }

  set(key: string, value: Uint8Array): Promise<void> {
    return this.guard('set', () => this.#below.set(this.#path(key), value));
  }

  get(key: string, options: StoreWaitOptions = {}): Promise<Uint8Array> {
    return this.#wait('get', options, (linked) => this.#below.get(this.#path(key), linked));
  }

  add(key: string, delta: number): Promise<number> {
    return this.guard('add', () => this.#below.add(this.#path(key), delta));
  }

  compareSet(key: string, expected: Uint8Array, desired: Uint8Array): Promise<Uint8Array> {
    return this.guard('compareSet', () => this.#below.compareSet(this.#path(key), expected, desired));
  }

  wait(keys: readonly string[], options: StoreWaitOptions = {}): Promise<void> {
    return this.#wait('wait', options, (linked) => this.#below.wait(this.#paths(keys, 'wait'), linked));
  }

  check(keys: readonly string[]): Promise<boolean> {
    return this.guard('check', () => this.#below.check(this.#paths(keys, 'check')));
  }

  append(key: string, value: Uint8Array): Promise<void> {
    return this.guard('append', () => this.#below.append(this.#path(key), value));
  }

  multiGet(keys: readonly string[], options: StoreWaitOptions = {}): Promise<readonly Uint8Array[]> {
    return this.#wait('multiGet', options, (linked) => this.#below.multiGet(this.#paths(keys, 'multiGet'), linked));
  }

  multiSet(entries: Iterable<StoreEntry>): Promise<void> {
    return this.guard('multiSet', () => {
      const copied = copyEntries(entries, 'prefix store: multiSet');
      return this.#below.multiSet(copied.map(([key, value]) => [this.#path(key), value]));
    });
  }

  delete(key: string): Promise<boolean> {
    return this.guard('delete', () => this.#below.delete(this.#path(key)));
  }

  /** Counts all keys of the store below, as c10d does: a store cannot list its keys. */
  numKeys(): Promise<number> {
    return this.guard('numKeys', () => this.#below.numKeys());
  }

  protected override release(): void {}

  #path(key: string): string {
    if (typeof key !== 'string') throw invalid('key', { where: 'prefix store', expected: 'a string', found: key });
    return `${this.#prefix}/${key}`;
  }

  #paths(keys: readonly string[], operation: string): readonly string[] {
    checkKeys(keys, `prefix store: ${operation}`);
    return keys.map((key) => this.#path(key));
  }

  #wait<T>(operation: string, options: StoreWaitOptions, body: (linked: StoreWaitOptions) => Promise<T>): Promise<T> {
    return this.guard(operation, async () => {
      checkWaitOptions(options, `prefix store: ${operation}`);
      const { signal, unlink } = linkSignals(options.signal, this.closing);
      try {
        return await body({ ...options, signal });
      } finally {
        unlink();
      }
    });
  }
}

/** `store`'s keys that begin with `prefix/`. Prefixes nest: the one wrapped first comes first in the key. */
export function prefixStore(store: Store, prefix: string): Store {
  if (typeof prefix !== 'string')
    throw invalid('prefix', { where: 'prefixStore', expected: 'a string', found: prefix });
  return new PrefixStore(store, prefix);
}
