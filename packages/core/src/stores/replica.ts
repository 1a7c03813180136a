/**
 * What a store's operations mean, once for all stores: a map, and operations applied to it in one order that everybody agrees on. Whether that
 * order comes from one event loop (memory) or from a shared log (file) is the only difference between them.
 */
import { checkAttached } from '../buffers.js';
import { defaultTimeoutMs } from '../env.js';
import { checkObject, EpError, invalid } from '../errors.js';
import { Resource } from '../scope.js';
import type { Store, StoreWaitOptions } from '../store.js';
import { checkSignal, interruptible } from '../waiting.js';

export type Operation =
  | { readonly kind: 'set'; readonly key: string; readonly value: Uint8Array }
  | { readonly kind: 'add'; readonly key: string; readonly delta: number }
  | {
      readonly kind: 'compare-set';
      readonly key: string;
      readonly expected: Uint8Array;
      readonly desired: Uint8Array;
    }
  | { readonly kind: 'append'; readonly key: string; readonly value: Uint8Array }
  | { readonly kind: 'multi-set'; readonly entries: readonly StoreEntry[] }
  | { readonly kind: 'delete'; readonly key: string };

export type StoreEntry = readonly [key: string, value: Uint8Array];

/** `undefined` for set, append and multi-set, the sum for add, the bytes held afterwards for compare-set, whether the key was there for delete. */
export type Outcome = undefined | number | Uint8Array | boolean | { readonly refused: string };

type Observer = (key: string, value: Uint8Array) => void;

const sameBytes = (a: Uint8Array, b: Uint8Array): boolean => Buffer.compare(a, b) === 0;

/** A value that is no number, or a sum that a number cannot hold, is refused: nothing changes, on every rank alike. */
function addition(held: Uint8Array | undefined, delta: number): number | { readonly refused: string } {
  const text = held === undefined ? '0' : Buffer.from(held.buffer, held.byteOffset, held.byteLength).toString('latin1');
  if (!/^-?\d{1,16}$/.test(text)) return { refused: `it holds ${held?.byteLength} bytes that are no decimal integer` };
  const sum = Number(text) + delta;
  return Number.isSafeInteger(sum) ? sum : { refused: `${text} plus ${delta} is not a safe integer` };
}

/** What an entry costs beside its bytes, about. */
const ENTRY_OVERHEAD = 128;
export const entryBytes = (key: string, value: Uint8Array): number => ENTRY_OVERHEAD + key.length + value.byteLength;

/** The map, and who waits for its keys. */
export class Replica {
  readonly #entries = new Map<string, Uint8Array>();
  #byteLength = 0;
  readonly #observers = new Map<string, Set<Observer>>();

  get size(): number {
    return this.#entries.size;
  }

  /** Bytes of all keys and values, and what the map itself takes for each. */
  get byteLength(): number {
    return this.#byteLength;
  }

  keys(): Iterable<string> {
    return this.#entries.keys();
  }

  get(key: string): Uint8Array | undefined {
    return this.#entries.get(key);
  }

  apply(operation: Operation): Outcome {
    if (operation.kind === 'multi-set') {
      for (const [key, value] of operation.entries) this.#put(key, value);
      return undefined;
    }
    const { key } = operation;
    const held = this.#entries.get(key);
    switch (operation.kind) {
      case 'set':
        this.#put(key, operation.value);
        return undefined;
      case 'add': {
        const sum = addition(held, operation.delta);
        if (typeof sum === 'number') this.#put(key, Buffer.from(String(sum), 'latin1'));
        return sum;
      }
      case 'compare-set': {
        const { expected, desired } = operation;
        if (held === undefined ? expected.byteLength > 0 : !sameBytes(held, expected)) return held ?? expected;
        this.#put(key, desired);
        return desired;
      }
      case 'append':
        this.#put(key, held === undefined ? operation.value : Buffer.concat([held, operation.value]));
        return undefined;
      case 'delete':
        if (held !== undefined) this.#byteLength -= entryBytes(key, held);
        return this.#entries.delete(key);
    }
  }

  /** Calls `observer` whenever one of the keys gets a value, until the returned function is called. */
  observe(keys: Iterable<string>, observer: Observer): () => void {
    const watched = [...keys];
    for (const key of watched) {
      const observers = this.#observers.get(key) ?? new Set();
      this.#observers.set(key, observers.add(observer));
    }
    return () => {
      for (const key of watched) {
        const observers = this.#observers.get(key);
        observers?.delete(observer);
        if (observers?.size === 0) this.#observers.delete(key);
      }
    };
  }

  #put(key: string, value: Uint8Array): void {
    const held = this.#entries.get(key);
    this.#byteLength += entryBytes(key, value) - (held === undefined ? 0 : entryBytes(key, held));
    this.#entries.set(key, value);
    const observers = this.#observers.get(key);
    if (observers) for (const observer of [...observers]) observer(key, value);
  }
}

const KEYS_SHOWN = 8;

/** The error of a wait whose deadline passed, the same for every store. */
export function notArrived(
  label: string,
  operation: string,
  keys: number,
  missing: readonly string[],
  timeoutMs: number,
  cause?: unknown,
): EpError {
  const shown = missing.slice(0, KEYS_SHOWN).map((key) => JSON.stringify(key));
  const more = missing.length > KEYS_SHOWN ? ', …' : '';
  return new EpError(
    'EP_TIMEOUT',
    `${label}: ${operation}: ${missing.length} of ${keys} keys did not appear within ${timeoutMs} ms: ${shown.join(', ')}${more}`,
    { context: { operation, missing, keys, timeoutMs }, ...(cause !== undefined && { cause }) },
  );
}

export function checkKey(key: unknown, where: string): asserts key is string {
  if (typeof key !== 'string') throw invalid('key', { where, expected: 'a string', found: key });
}

export function checkKeys(keys: unknown, where: string): asserts keys is readonly string[] {
  if (!Array.isArray(keys)) throw invalid('keys', { where, expected: 'an array of strings', found: keys });
  for (const key of keys) checkKey(key, where);
}

/** A copy: the caller may go on to change its buffer, and nobody may change what the store holds. */
export function copyBytes(value: unknown, what: string, where: string): Uint8Array {
  if (!(value instanceof Uint8Array)) throw invalid(what, { where, expected: 'a Uint8Array', found: value });
  checkAttached(value, where);
  return Uint8Array.from(value);
}

export function checkWaitOptions(options: StoreWaitOptions, where: string): void {
  checkObject(options, 'options', 'an object with timeoutMs and signal', where);
  checkSignal(options.signal, where);
}

export function copyEntries(entries: unknown, where: string): readonly StoreEntry[] {
  const iterate = (entries as Partial<Iterable<unknown>> | null | undefined)?.[Symbol.iterator];
  if (typeof iterate !== 'function')
    throw invalid('entries', { where, expected: 'an iterable of keys and values', found: entries });
  return [...(entries as Iterable<unknown>)].map((entry) => {
    if (!Array.isArray(entry)) throw invalid('entry', { where, expected: 'a key and a value', found: entry });
    const [key, value] = entry as readonly unknown[];
    checkKey(key, where);
    return [key, copyBytes(value, 'value', where)];
  });
}

/** A store on a replica. Subclasses say how operations get their order and how news arrives. */
export abstract class ReplicaStore extends Resource implements Store {
  readonly #label: string;
  protected readonly replica: Replica;

  protected constructor(label: string, replica: Replica) {
    super(label);
    this.#label = label;
    this.replica = replica;
  }

  /** Gives the operation its place in the order and applies everything up to it. */
  protected abstract commit(operation: Operation): Outcome;

  /** Applies what others did. */
  protected abstract refresh(): void;

  /** Keeps calling `refresh` when there is news, until the returned function is called; `fail` ends the wait. */
  protected abstract follow(fail: (reason: unknown) => void): () => void;

  async set(key: string, value: Uint8Array): Promise<void> {
    this.#run({ kind: 'set', key, value: copyBytes(value, 'value', `${this.#label}: set`) });
  }

  async get(key: string, options: StoreWaitOptions = {}): Promise<Uint8Array> {
    const found = await this.#await('get', [key], options);
    return Uint8Array.from(found.get(key)!);
  }

  async add(key: string, delta: number): Promise<number> {
    const where = `${this.#label}: add`;
    if (!Number.isSafeInteger(delta)) throw invalid('delta', { where, expected: 'a safe integer', found: delta });
    const outcome = this.#run({ kind: 'add', key, delta });
    if (typeof outcome === 'number') return outcome;
    const { refused } = outcome as { readonly refused: string };
    throw new EpError('EP_INVALID_ARGUMENT', `${where}: key ${JSON.stringify(key)} cannot be added to: ${refused}`, {
      context: { key, delta },
    });
  }

  async compareSet(key: string, expected: Uint8Array, desired: Uint8Array): Promise<Uint8Array> {
    const where = `${this.#label}: compareSet`;
    const outcome = this.#run({
      kind: 'compare-set',
      key,
      expected: copyBytes(expected, 'expected', where),
      desired: copyBytes(desired, 'desired', where),
    });
    return Uint8Array.from(outcome as Uint8Array);
  }

  async wait(keys: readonly string[], options: StoreWaitOptions = {}): Promise<void> {
    await this.#await('wait', keys, options);
  }

  async check(keys: readonly string[]): Promise<boolean> {
    this.checkOpen('check');
    checkKeys(keys, `${this.#label}: check`);
    this.refresh();
    return keys.every((key) => this.replica.get(key) !== undefined);
  }

  async append(key: string, value: Uint8Array): Promise<void> {
    this.#run({ kind: 'append', key, value: copyBytes(value, 'value', `${this.#label}: append`) });
  }

  async multiGet(keys: readonly string[], options: StoreWaitOptions = {}): Promise<readonly Uint8Array[]> {
    const found = await this.#await('multiGet', keys, options);
    return keys.map((key) => Uint8Array.from(found.get(key)!));
  }

  async multiSet(entries: Iterable<StoreEntry>): Promise<void> {
    const operation = { kind: 'multi-set', entries: copyEntries(entries, `${this.#label}: multiSet`) } as const;
    this.checkOpen('multiSet');
    this.commit(operation);
  }

  async delete(key: string): Promise<boolean> {
    return this.#run({ kind: 'delete', key }) as boolean;
  }

  async numKeys(): Promise<number> {
    this.checkOpen('numKeys');
    this.refresh();
    return this.replica.size;
  }

  #run(operation: Exclude<Operation, { kind: 'multi-set' }>): Outcome {
    this.checkOpen(operation.kind);
    checkKey(operation.key, `${this.#label}: ${operation.kind}`);
    return this.commit(operation);
  }

  /** The values as each key had them when it was first seen: a key that was deleted again still counts as come. */
  #await(operation: string, keys: readonly string[], options: StoreWaitOptions): Promise<Map<string, Uint8Array>> {
    return this.guard(operation, () => {
      const where = `${this.#label}: ${operation}`;
      checkKeys(keys, where);
      checkWaitOptions(options, where);
      const timeoutMs = options.timeoutMs ?? defaultTimeoutMs();
      const found = new Map<string, Uint8Array>();
      const missing = new Set(keys);
      const total = missing.size;
      const arrive = (key: string, value: Uint8Array): void => {
        if (missing.delete(key)) found.set(key, value);
      };
      return interruptible<Map<string, Uint8Array>>(
        {
          signals: [options.signal, this.closing],
          timeoutMs,
          where,
          timedOut: () => notArrived(this.#label, operation, total, [...missing], timeoutMs),
        },
        (resolve, reject) => {
          this.refresh();
          for (const key of keys) {
            const value = this.replica.get(key);
            if (value !== undefined) arrive(key, value);
          }
          if (missing.size === 0) {
            resolve(found);
            return undefined;
          }
          const forget = this.replica.observe(missing, (key, value) => {
            arrive(key, value);
            if (missing.size === 0) resolve(found);
          });
          const unfollow = this.follow(reject);
          return () => {
            forget();
            unfollow();
          };
        },
      );
    });
  }
}
