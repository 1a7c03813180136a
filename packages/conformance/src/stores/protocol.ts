/** What a test and the programs that hold its stores' handles say to each other. */
import { openFileStore, openTcpStore, prefixStore, type Store } from '@ep/core';

/** How a program comes to a store that others share. */
export type StorePlace =
  | { readonly kind: 'file'; readonly path: string }
  | { readonly kind: 'tcp'; readonly host: string; readonly port: number }
  | { readonly kind: 'prefix'; readonly prefix: string; readonly below: StorePlace };

export async function openPlace(place: StorePlace): Promise<Store> {
  switch (place.kind) {
    case 'file':
      return openFileStore(place.path);
    case 'tcp':
      return openTcpStore({ host: place.host, port: place.port });
    case 'prefix':
      return prefixStore(await openPlace(place.below), place.prefix);
  }
}

/** A method of a store whose last argument may be options of a wait. */
export type StoreMethod = Exclude<keyof Store, 'closed' | symbol>;

export type StoreRequest =
  | { readonly kind: 'open'; readonly id: number; readonly place: StorePlace }
  | {
      readonly kind: 'call';
      readonly id: number;
      readonly handle: number;
      readonly method: StoreMethod;
      readonly args: readonly unknown[];
      /** Given where the caller gave options; `abortable`: with a signal. */
      readonly options?: { readonly timeoutMs?: number; readonly abortable: boolean };
    }
  | { readonly kind: 'abort'; readonly id: number };

/** What a test asked in one turn of its loop: the program's store sees all of it in one turn, too. */
export interface ToStoreProgram {
  readonly kind: 'requests';
  readonly requests: readonly StoreRequest[];
}

export interface SentFailure {
  readonly code?: string;
  readonly message: string;
  readonly context?: Readonly<Record<string, unknown>>;
  /** The reason of an `abort` came back. */
  readonly aborted: boolean;
}

/** `id` of the request. An `open` gives the handle's number. */
export type FromStoreProgram =
  | { readonly kind: 'value'; readonly id: number; readonly value: unknown }
  | { readonly kind: 'failure'; readonly id: number; readonly failure: SentFailure };
