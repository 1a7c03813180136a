/** The key-value store through which ranks find each other. */
import type { AbortOptions, Closeable } from './scope.js';

export interface StoreWaitOptions extends AbortOptions {
  /** Ends with `EP_TIMEOUT` naming the keys that never came, also as `context.missing`. 0 looks once. EP_TIMEOUT_MS unless given. */
  readonly timeoutMs?: number;
}

/** The semantics of PyTorch's c10d stores. Values are bytes; strings are encoded by the caller. */
export interface Store extends Closeable {
  set(key: string, value: Uint8Array): Promise<void>;
  /** Waits until the key exists. */
  get(key: string, options?: StoreWaitOptions): Promise<Uint8Array>;
  /** Atomic; a key that is absent counts as 0. The stored form is the decimal text of the sum. Resolves with the new sum. */
  add(key: string, delta: number): Promise<number>;
  /**
   * Atomic. Stores `desired` if the key holds `expected`, or if the key is absent and `expected` is empty. Resolves with the bytes that the
   * key holds afterwards (`expected` itself if the key is absent and `expected` is not empty).
   */
  compareSet(key: string, expected: Uint8Array, desired: Uint8Array): Promise<Uint8Array>;
  /** Waits until all keys exist. No keys are all there. */
  wait(keys: readonly string[], options?: StoreWaitOptions): Promise<void>;
  /** True if all keys exist now. Never waits for one that does not. */
  check(keys: readonly string[]): Promise<boolean>;
  /** Atomic; adds the bytes at the end of what the key holds. A key that is absent counts as empty, and exists afterwards. */
  append(key: string, value: Uint8Array): Promise<void>;
  /** Waits until all keys exist. Resolves with their values, in the order of `keys`. */
  multiGet(keys: readonly string[], options?: StoreWaitOptions): Promise<readonly Uint8Array[]>;
  /** Sets all of them, in order, with nobody else's operation in between. A `Map` is taken as it is. */
  multiSet(entries: Iterable<readonly [key: string, value: Uint8Array]>): Promise<void>;
  /** True if the key existed. */
  delete(key: string): Promise<boolean>;
  numKeys(): Promise<number>;
}
