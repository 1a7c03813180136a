/** Handles of stores in processes of their own, as ranks have them: what a test calls here happens there. */
import { type ChildProcess, fork } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { type EpCode, EpError, type Store, type StoreWaitOptions } from '@ep/core';
import type { FromStoreProcess, SentFailure, StoreMethod, StorePlace, ToStoreProcess } from './protocol.js';

interface Pending {
  readonly resolve: (value: unknown) => void;
  readonly reject: (reason: unknown) => void;
}

function errorOf({ code, message, context }: SentFailure): Error {
  if (code === undefined) return new Error(message);
  return new EpError(code as EpCode, message, context === undefined ? {} : { context });
}

class StoreProcess {
  readonly #child: ChildProcess;
  readonly #pending = new Map<number, Pending>();
  readonly #gone: Promise<void>;
  #next = 0;

  constructor(main: URL) {
    this.#child = fork(fileURLToPath(main), [], { serialization: 'advanced', execArgv: [] });
    this.#child.on('message', (message) => this.#receive(message as FromStoreProcess));
    this.#gone = new Promise((resolve) => {
      this.#child.once('exit', (code, signal) => {
        for (const { reject } of this.#pending.values()) reject(new Error(`the process ended: ${signal ?? code}`));
        this.#pending.clear();
        resolve();
      });
    });
  }

  #receive(message: FromStoreProcess): void {
    const pending = this.#pending.get(message.id);
    this.#pending.delete(message.id);
    if (message.kind === 'value') pending?.resolve(message.value);
    else pending?.reject(message.failure.aborted ? this : errorOf(message.failure));
  }

  /** `make` gets the request's number. A rejection with this object: the process gave the reason of an abort. */
  ask(make: (id: number) => ToStoreProcess): { readonly id: number; readonly answer: Promise<unknown> } {
    const id = this.#next++;
    const answer = new Promise((resolve, reject) => this.#pending.set(id, { resolve, reject }));
    this.#child.send(make(id));
    return { id, answer };
  }

  abort(id: number): void {
    if (this.#pending.has(id)) this.#child.send({ kind: 'abort', id } satisfies ToStoreProcess);
  }

  async close(): Promise<void> {
    if (this.#child.connected) this.#child.disconnect();
    await this.#gone;
  }
}

class HandleElsewhere implements Store {
  readonly #process: StoreProcess;
  readonly #handle: number;
  #closed = false;

  constructor(process: StoreProcess, handle: number) {
    this.#process = process;
    this.#handle = handle;
  }

  async #call(method: StoreMethod, args: readonly unknown[], options?: StoreWaitOptions): Promise<never> {
    const { signal, ...limits } = options ?? {};
    const asked = options === undefined ? {} : { options: { ...limits, abortable: signal !== undefined } };
    const { id, answer } = this.#process.ask((id) => ({
      kind: 'call',
      id,
      handle: this.#handle,
      method,
      args,
      ...asked,
    }));
    const abort = (): void => this.#process.abort(id);
    if (signal?.aborted) abort();
    signal?.addEventListener('abort', abort);
    try {
      return (await answer) as never;
    } catch (error) {
      throw error === this.#process ? signal!.reason : error;
    } finally {
      signal?.removeEventListener('abort', abort);
    }
  }

  get closed(): boolean {
    return this.#closed;
  }
  async close(): Promise<void> {
    this.#closed = true;
    await this.#call('close', []);
  }
  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  readonly set = (key: string, value: Uint8Array): Promise<void> => this.#call('set', [key, value]);
  readonly get = (key: string, options?: StoreWaitOptions): Promise<Uint8Array> => this.#call('get', [key], options);
  readonly add = (key: string, delta: number): Promise<number> => this.#call('add', [key, delta]);
  readonly compareSet = (key: string, expected: Uint8Array, desired: Uint8Array): Promise<Uint8Array> =>
    this.#call('compareSet', [key, expected, desired]);
  readonly wait = (keys: readonly string[], options?: StoreWaitOptions): Promise<void> =>
    this.#call('wait', [keys], options);
  readonly check = (keys: readonly string[]): Promise<boolean> => this.#call('check', [keys]);
  readonly append = (key: string, value: Uint8Array): Promise<void> => this.#call('append', [key, value]);
  readonly multiGet = (keys: readonly string[], options?: StoreWaitOptions): Promise<readonly Uint8Array[]> =>
    this.#call('multiGet', [keys], options);
  readonly multiSet = (entries: Iterable<readonly [key: string, value: Uint8Array]>): Promise<void> =>
    this.#call('multiSet', [entries]);
  readonly delete = (key: string): Promise<boolean> => this.#call('delete', [key]);
  readonly numKeys = (): Promise<number> => this.#call('numKeys', []);
}

/** So many processes, started at the first handle. Handles go to them in turn, so that the first ones of a case are never in the same process. */
export class StoreProcesses {
  readonly #count: number;
  readonly #main: URL;
  #processes: StoreProcess[] = [];
  #turn = 0;

  constructor(count: number, main = new URL('./store-main.js', import.meta.url)) {
    this.#count = count;
    this.#main = main;
  }

  async open(place: StorePlace): Promise<Store> {
    if (this.#processes.length === 0) {
      this.#processes = Array.from({ length: this.#count }, () => new StoreProcess(this.#main));
    }
    const process = this.#processes[this.#turn++ % this.#count]!;
    const handle = await process.ask((id) => ({ kind: 'open', id, place })).answer;
    return new HandleElsewhere(process, handle as number);
  }

  async close(): Promise<void> {
    await Promise.all(this.#processes.splice(0).map((process) => process.close()));
  }
}
