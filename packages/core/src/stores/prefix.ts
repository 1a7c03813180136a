/** A part of a store under a prefix, as c10d's PrefixStore: `key` is `prefix/key` below. */
import { EpError, invalid, isEpError } from '../errors.js';
import { Resource } from '../scope.js';
import type { Store, StoreWaitOptions } from '../store.js';
import { interruptibleOn, linkSignals } from '../waiting.js';
import { checkKeys, checkWaitOptions, copyEntries, notArrived, type StoreEntry } from './replica.js';

/** How long close() waits for requests that are under way: the store below may let them wait for minutes. */
const CLOSE_MS = 1000;

/** Closing it ends its own waits and leaves the store below open. */
class PrefixStore extends Resource implements Store {
  readonly #below: Store;
  readonly #prefix: string;
  readonly #label: string;
  readonly #cut = new AbortController();
  #closeTimer: NodeJS.Timeout | undefined;

  constructor(below: Store, prefix: string) {
    const label = `prefix store ${JSON.stringify(prefix)}`;
    super(label);
    this.#label = label;
    this.#below = below;
    this.#prefix = prefix;
    this.closing.addEventListener('abort', () => {
      this.#closeTimer = setTimeout(() => {
        this.#cut.abort(new EpError('EP_ABORTED', `${label} was closed while requests were under way`));
      }, CLOSE_MS);
    });
  }

  set(key: string, value: Uint8Array): Promise<void> {
    return this.#ask('set', () => this.#below.set(this.#path(key), value));
  }

  get(key: string, options: StoreWaitOptions = {}): Promise<Uint8Array> {
    return this.#wait('get', options, (linked) => this.#below.get(this.#path(key), linked));
  }

  add(key: string, delta: number): Promise<number> {
    return this.#ask('add', () => this.#below.add(this.#path(key), delta));
  }

  compareSet(key: string, expected: Uint8Array, desired: Uint8Array): Promise<Uint8Array> {
    return this.#ask('compareSet', () => this.#below.compareSet(this.#path(key), expected, desired));
  }

  wait(keys: readonly string[], options: StoreWaitOptions = {}): Promise<void> {
    return this.#wait('wait', options, (linked) => this.#below.wait(this.#paths(keys, 'wait'), linked));
  }

  check(keys: readonly string[]): Promise<boolean> {
    return this.#ask('check', () => this.#below.check(this.#paths(keys, 'check')));
  }

  append(key: string, value: Uint8Array): Promise<void> {
    return this.#ask('append', () => this.#below.append(this.#path(key), value));
  }

  multiGet(keys: readonly string[], options: StoreWaitOptions = {}): Promise<readonly Uint8Array[]> {
    return this.#wait('multiGet', options, (linked) => this.#below.multiGet(this.#paths(keys, 'multiGet'), linked));
  }

  multiSet(entries: Iterable<StoreEntry>): Promise<void> {
    return this.#ask('multiSet', () => {
      const copied = copyEntries(entries, 'prefix store: multiSet');
      return this.#below.multiSet(copied.map(([key, value]) => [this.#path(key), value]));
    });
  }

  delete(key: string): Promise<boolean> {
    return this.#ask('delete', () => this.#below.delete(this.#path(key)));
  }

  /** Counts all keys of the store below, as c10d does: a store cannot list its keys. */
  numKeys(): Promise<number> {
    return this.#ask('numKeys', () => this.#below.numKeys());
  }

  protected override release(): void {
    clearTimeout(this.#closeTimer);
  }

  #path(key: string): string {
    if (typeof key !== 'string') throw invalid('key', { where: 'prefix store', expected: 'a string', found: key });
    return `${this.#prefix}/${key}`;
  }

  #ask<T>(operation: string, body: () => Promise<T>): Promise<T> {
    const limits = { signals: [this.#cut.signal], where: `prefix store: ${operation}`, timedOut: () => undefined };
    return this.guard(operation, () => interruptibleOn(limits, body()));
  }

  #paths(keys: readonly string[], operation: string): readonly string[] {
    checkKeys(keys, `prefix store: ${operation}`);
    return keys.map((key) => this.#path(key));
  }

  /** Keys of a wait that timed out as the caller names them: it looks there for what it asked for. */
  #ofCaller(operation: string, error: unknown): unknown {
    if (!isEpError(error) || error.code !== 'EP_TIMEOUT') return error;
    const { missing, keys, timeoutMs } = error.context;
    const front = this.#path('');
    if (!Array.isArray(missing) || !missing.every((key) => typeof key === 'string' && key.startsWith(front)))
      return error;
    const own = (missing as readonly string[]).map((key) => key.slice(front.length));
    return notArrived(this.#label, operation, Number(keys), own, Number(timeoutMs), error);
  }

  #wait<T>(operation: string, options: StoreWaitOptions, body: (linked: StoreWaitOptions) => Promise<T>): Promise<T> {
    return this.guard(operation, async () => {
      checkWaitOptions(options, `prefix store: ${operation}`);
      const { signal, unlink } = linkSignals(options.signal, this.closing);
      try {
        return await body({ ...options, signal });
      } catch (error) {
        throw this.#ofCaller(operation, error);
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
