/** Handles of stores in threads or processes of their own, as ranks have them: what a test calls here happens there. */
import { type EpCode, EpError, type Store, type StoreWaitOptions } from '@ep/core';
import type { Mode } from '../cases/case.js';
import { type Launched, launch } from '../world/launch.js';
import type {
  FromStoreProgram,
  SentFailure,
  StoreMethod,
  StorePlace,
  StoreRequest,
  ToStoreProgram,
} from './protocol.js';

interface Pending {
  readonly resolve: (value: unknown) => void;
  readonly reject: (reason: unknown) => void;
}

function errorOf({ code, message, context }: SentFailure): Error {
  if (code === undefined) return new Error(message);
  return new EpError(code as EpCode, message, context === undefined ? {} : { context });
}

class StoreProgram {
  readonly #program: Launched<ToStoreProgram, FromStoreProgram>;
  readonly #pending = new Map<number, Pending>();
  readonly #gone: Promise<void>;
  #next = 0;
  readonly #outbox: StoreRequest[] = [];

  constructor(mode: Mode, main: URL) {
    this.#program = launch(mode, main, {});
    this.#program.onMessage((message) => this.#receive(message));
    this.#gone = new Promise((resolve) => {
      this.#program.onExit((how) => {
        for (const { reject } of this.#pending.values()) reject(new Error(`the program ended: ${how}`));
        this.#pending.clear();
        resolve();
      });
    });
  }

  #receive(message: FromStoreProgram): void {
    const pending = this.#pending.get(message.id);
    this.#pending.delete(message.id);
    if (message.kind === 'value') pending?.resolve(message.value);
    else pending?.reject(message.failure.aborted ? this : errorOf(message.failure));
  }

  /** `make` gets the request's number. A rejection with this object: the program gave the reason of an abort. */
  ask(make: (id: number) => StoreRequest): { readonly id: number; readonly answer: Promise<unknown> } {
    const id = this.#next++;
    const answer = new Promise((resolve, reject) => this.#pending.set(id, { resolve, reject }));
    this.#post(make(id));
    return { id, answer };
  }

  abort(id: number): void {
    if (this.#pending.has(id)) this.#post({ kind: 'abort', id });
  }

  #post(request: StoreRequest): void {
    if (this.#outbox.push(request) > 1) return;
    queueMicrotask(() => this.#program.send({ kind: 'requests', requests: this.#outbox.splice(0) }));
  }

  async close(): Promise<void> {
    this.#program.send({ kind: 'quit' });
    await this.#gone;
  }
}

class HandleElsewhere implements Store {
  readonly #program: StoreProgram;
  readonly #handle: number;
  #closed = false;

  constructor(program: StoreProgram, handle: number) {
    this.#program = program;
    this.#handle = handle;
  }

  async #call(method: StoreMethod, args: readonly unknown[], options?: StoreWaitOptions): Promise<never> {
    const { signal, ...limits } = options ?? {};
    const asked = options === undefined ? {} : { options: { ...limits, abortable: signal !== undefined } };
    const { id, answer } = this.#program.ask((id) => ({
      kind: 'call',
      id,
      handle: this.#handle,
      method,
      args,
      ...asked,
    }));
    const abort = (): void => this.#program.abort(id);
    if (signal?.aborted) abort();
    signal?.addEventListener('abort', abort);
    try {
      return (await answer) as never;
    } catch (error) {
      throw error === this.#program ? signal!.reason : error;
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

/** So many threads or processes, started at the first handle. Handles go to them in turn, so that the first ones of a case are never in the same program. */
export class StorePrograms {
  readonly #mode: Mode;
  readonly #count: number;
  #programs: StoreProgram[] = [];
  #turn = 0;

  constructor(mode: Mode, count: number) {
    this.#mode = mode;
    this.#count = count;
  }

  async open(place: StorePlace): Promise<Store> {
    if (this.#programs.length === 0) {
      const main = new URL('./store-main.js', import.meta.url);
      this.#programs = Array.from({ length: this.#count }, () => new StoreProgram(this.#mode, main));
    }
    const program = this.#programs[this.#turn++ % this.#count]!;
    const handle = await program.ask((id) => ({ kind: 'open', id, place })).answer;
    return new HandleElsewhere(program, handle as number);
  }

  async close(): Promise<void> {
    await Promise.all(this.#programs.splice(0).map((program) => program.close()));
  }
}
