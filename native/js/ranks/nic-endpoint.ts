/** Operations towards one peer that a NIC executes: work requests on a queue pair of JS's own. */
import {
  createWork,
  doneWork,
  type Endpoint,
  EpError,
  invalid,
  isEpError,
  loopIsDue,
  type Need,
  type Rank,
  type Region,
  type RemoteRegion,
  type Request,
  Resource,
  type SignalUpdate,
  type SymmetricMemory,
  turnLoopIfDue,
  type WaitOptions,
  type Work,
  WorkOwner,
} from '@ep/core';
import type { NativeRankContext, NativeSymmetricMemory, OperationId, Outcome } from '../binding.js';
import { native } from '../native.js';
import { AdoptedRange, type NativeLocal, type NicMemories } from './adopted.js';
import { emptyPlace, type Liveness } from './liveness.js';
import { RankMemory } from './memory.js';
import { checkLimits, nativeTimeout, runWait, waitError } from './outcome.js';
import { type AwaitedRequest, RequestEnds } from './request-ends.js';
import { checkRemote, checkSameSize, checkValue, type SignalWords, signalWords } from './requests.js';

/** A request that was posted: 0 if it has ended already, otherwise its number for `watch`. Signals: op 0 none, 1 add, 2 set. */
export type PostedRequest = number;

/** What an endpoint needs of the addon's NIC. `unawaited`: nobody waits for the request's end, of which a peer may tell when it has a moment. */
export interface NicRequests extends NicMemories {
  put(
    memory: NativeSymmetricMemory,
    peer: number,
    dstOffset: number,
    source: NativeLocal,
    srcOffset: number,
    byteLength: number,
    op: number,
    slot: number,
    value: bigint,
    unawaited?: boolean,
  ): PostedRequest;
  putValue(
    memory: NativeSymmetricMemory,
    peer: number,
    dstOffset: number,
    width: number,
    word: bigint,
    op: number,
    slot: number,
    value: bigint,
    unawaited?: boolean,
  ): PostedRequest;
  signal(
    memory: NativeSymmetricMemory,
    peer: number,
    op: number,
    slot: number,
    value: bigint,
    unawaited?: boolean,
  ): PostedRequest;
  get(
    memory: NativeSymmetricMemory,
    peer: number,
    srcOffset: number,
    target: NativeLocal,
    dstOffset: number,
    byteLength: number,
  ): PostedRequest;
  /** Number of the last request to this peer; 0: none. */
  accepted(peer: number): number;
  /** Ends with the request: `found` is 0 where it is done, 1 where the queue pair broke, 2 where another process has come in the peer's place. */
  watch(peer: number, request: number, timeoutMs: number): OperationId;
  /**
   * Looks whether the request has ended, and carries on in passing what a waiting thread can: 0 where it is done, 1 where nothing reaches the peer any more, -1 where it is under
   * way. `patiently`: for as long as a thread of JS may hold itself up. Absent where whoever posts has looked like that already.
   */
  requestTry?(peer: number, request: number, patiently: boolean): number;
  /** How the queue pair to the peer broke; undefined: it did not. */
  failure(peer: number): object | undefined;
}

export interface NicEndpointInit<C extends Need> {
  readonly peer: Rank;
  readonly nic: NicRequests;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly timeoutMs: number;
  /** By rank: 1 where nobody is in its place. Absent where all places are taken from the beginning on. */
  readonly empty?: Readonly<Uint8Array> | undefined;
  /** What the broken queue pair to this peer means. */
  readonly broken: (where: string) => EpError;
  /** Throws for a signal that this NIC cannot send, where a caller went past the types. */
  readonly checkSignal?: (update: SignalUpdate<C>) => void;
}

const endOf = (found: number): Outcome => ({ status: 0, rank: -1, stage: 0, expected: 0n, found: BigInt(found) });

/** Set once this thread has waited in vain for a request: until its loop has turned it waits for no other one, or a hundred that are late would hold it up a hundred times. */
let isSpent = false;

function spend(): void {
  isSpent = true;
  setImmediate(() => {
    isSpent = false;
  }).unref();
}

type Options<C extends Need> = { readonly signal?: SignalUpdate<C> };

/** Requests end in the order in which they were made; what order they are seen in at the peer is the NIC's affair. */
export class NicEndpoint<C extends Need> extends Resource implements Endpoint<C> {
  readonly peer: Rank;
  readonly #init: NicEndpointInit<C>;
  readonly #owner: WorkOwner;
  readonly #ends: RequestEnds;
  #sequence = 0;

  constructor(init: NicEndpointInit<C>) {
    super(`endpoint to rank ${init.peer}`);
    this.peer = init.peer;
    this.#init = init;
    this.#owner = new WorkOwner(`endpoint to rank ${init.peer}`);
    this.#ends = new RequestEnds({
      look: (request) => {
        const found = this.#look(request, false);
        return found < 0 ? undefined : endOf(found);
      },
      watch: (request) => init.nic.watch(init.peer, request, -1),
    });
  }

  readonly put = (from: Region, to: RemoteRegion, options?: Options<C>): Work => {
    this.#checkUsable('put');
    return this.#run('put', () => this.#put(from, to, options?.signal));
  };

  readonly putValue = (to: RemoteRegion, value: bigint, options?: Options<C>): Work => {
    this.#checkUsable('putValue');
    return this.#run('putValue', () => this.#putValue(to, value, options?.signal));
  };

  readonly signal = (memory: SymmetricMemory, update: SignalUpdate<C>): Work => {
    this.#checkUsable('signal');
    return this.#run('signal', () => this.#signal(memory, update));
  };

  readonly get = (from: RemoteRegion, to: Region): Work => {
    this.#checkUsable('get');
    return this.#run('get', () => {
      const source = this.#remote(from);
      checkSameSize('get', from, to);
      const target = this.#local('get: the target', to);
      return this.#init.nic.get(source, this.peer, from.byteOffset, target, to.byteOffset, to.byteLength);
    });
  };

  readonly submit = (batch: readonly Request<C>[]): readonly Work[] => {
    this.#checkUsable('submit');
    if (!Array.isArray(batch))
      throw invalid('batch', { where: 'submit', expected: 'a list of requests', found: batch });
    // Not through put() and its like: their check for failures that nobody saw would throw at the second request what is the first one's own.
    return batch.map((request) => this.#run(request?.kind ?? 'submit', () => this.#request(request)));
  };

  /** Rejects with `EP_PEER_LOST` if the peer is dead, `EP_REMOTE_ACCESS` if it refused a request, `EP_TIMEOUT` if it has not answered in time. */
  readonly flush = (options?: WaitOptions): Promise<void> =>
    this.guard('flush', async () => {
      if (options !== undefined) checkLimits(options, 'flush', this.#init.liveness.worldSize);
      options?.signal?.throwIfAborted();
      this.#checkUsable('flush');
      await this.#drain(options);
      this.#checkUsable('flush');
      const { liveness } = this.#init;
      if (!liveness.isDead(this.peer)) return;
      const context = { lost: [this.peer] };
      throw liveness.notice(new EpError('EP_PEER_LOST', `flush: rank ${this.peer} died`, { context }));
    });

  /** What was accepted is carried out, unless it cannot be any more: then its own Work has said so. */
  protected override async release(): Promise<void> {
    await this.#drain().catch(() => {});
    await this.#owner.close();
  }

  async #drain(options?: WaitOptions): Promise<void> {
    const { nic, timeoutMs: fallback } = this.#init;
    const request = nic.accepted(this.peer);
    if (request === 0) return;
    const timeoutMs = nativeTimeout(options, fallback, 'flush');
    const found = this.#look(request, true);
    if (found >= 0) {
      const error = this.#errorOf('flush', endOf(found));
      if (error !== undefined) throw error;
      return turnLoopIfDue();
    }
    const never = new AbortController().signal;
    const end = await runWait(
      native().operations,
      () => nic.watch(this.peer, request, timeoutMs),
      this.closed ? never : this.closing,
      options?.signal,
    );
    const error = this.#errorOf('flush', end, timeoutMs);
    if (error !== undefined) throw error;
  }

  #checkUsable(operation: string): void {
    this.checkOpen(operation);
    this.#owner.check();
    if (this.#init.empty?.[this.peer] === 1) throw emptyPlace(operation, this.peer);
  }

  /** `Endpoint.post`, for NICs that may offer it: no Work, and no thread that watches for the end. */
  protected hand(request: Request<C>): void {
    const operation = request?.kind ?? 'post';
    this.#checkUsable(operation);
    try {
      this.#request(request, true);
    } catch (error) {
      throw this.#ofBrokenPair(operation, error);
    }
  }

  /** For operations that only some NICs have. `value` is asked for once, when the request is done. */
  protected request<T>(
    op: string,
    to: RemoteRegion,
    post: (memory: NativeSymmetricMemory) => PostedRequest,
    value: () => T,
  ): Work<T> {
    this.#checkUsable(op);
    return this.#valueOf(op, () => post(this.#remote(to)), value);
  }

  #run(op: string, post: () => PostedRequest): Work {
    return this.#valueOf(op, post, () => {});
  }

  #valueOf<T>(op: string, post: () => PostedRequest, value: () => T): Work<T> {
    let request: PostedRequest;
    try {
      request = post();
    } catch (error) {
      return this.#failed(op, this.#ofBrokenPair(op, error));
    }
    if (request === 0) return doneWork(op, this.#sequence++, value());
    const settle = (end: Outcome): void => {
      const error = this.#errorOf(op, end);
      if (error === undefined) control.resolve(value());
      else control.reject(error);
    };
    const one: AwaitedRequest = { request, settle, fail: (reason) => control.reject(reason) };
    const hurry = (): void => {
      // A chain of awaits that end inline never leaves the microtasks: timers and aborts would starve.
      const found = this.#ends.isFresh(one) && !loopIsDue() ? this.#look(request, true) : -1;
      if (found >= 0) this.#ends.settle(one, endOf(found));
    };
    const control = createWork<T>({ op, sequence: this.#sequence++, owner: this.#owner, hurry });
    if (this.#init.nic.requestTry === undefined) this.#watch(one);
    else this.#ends.add(one);
    return control.work;
  }

  /** As `requestTry`; -1 also where the NIC has none, or is closed: then whoever watches hears of that. */
  #look(request: PostedRequest, isAwaited: boolean): number {
    const { nic } = this.#init;
    if (nic.requestTry === undefined) return -1;
    const patiently = isAwaited && !isSpent;
    try {
      const found = nic.requestTry(this.peer, request, patiently);
      if (patiently && found < 0) spend();
      return found;
    } catch {
      return -1;
    }
  }

  #watch({ request, settle, fail }: AwaitedRequest): void {
    try {
      native().operations.track(this.#init.nic.watch(this.peer, request, -1), settle);
    } catch (error) {
      fail(error);
    }
  }

  /** Whatever is wrong with a call is carried by its Work, so that in a batch each request has its own status. */
  #failed<T>(op: string, reason: unknown): Work<T> {
    const control = createWork<T>({ op, sequence: this.#sequence++, owner: this.#owner });
    control.reject(reason);
    return control.work;
  }

  /** What native code refused because the queue pair is broken, in the words of what broke it. */
  #ofBrokenPair(op: string, error: unknown): unknown {
    try {
      if (this.#init.nic.failure(this.peer) === undefined) return error;
    } catch {
      // The NIC is closed, as `error` says.
      return error;
    }
    return this.#broken(op);
  }

  /**
   * HAZARD: a request's end may be heard of only after the NIC or the ranks' context was closed, and both throw from then on. It is heard of on no stack of a caller: what is thrown there ends the
   * process, and the request would have no end.
   */
  #broken(op: string): EpError {
    const { broken, liveness } = this.#init;
    try {
      const error = broken(op);
      if (error.code === 'EP_PEER_LOST') liveness.lostRanks();
      liveness.fail(error);
      return error;
    } catch (closed) {
      if (isEpError(closed)) return closed;
      throw closed;
    }
  }

  /** HAZARD: says nothing of the way to the peer, which is another one by now. */
  #replaced(op: string): EpError {
    const { peer } = this;
    const text = `${op}: rank ${peer} died before it had all of it; another process has come in its place`;
    return new EpError('EP_PEER_LOST', text, { context: { peer, lost: [peer] } });
  }

  #errorOf(op: string, end: Outcome, timeoutMs?: number): EpError | undefined {
    if (end.status === 0 && end.found === 2n) return this.#replaced(op);
    if (end.status === 0) return end.found === 0n ? undefined : this.#broken(op);
    const { liveness } = this.#init;
    const progress = 'the NIC has not completed it';
    const awaited = [this.peer];
    return liveness.notice(
      waitError(`${op} to rank ${this.peer}`, end, {
        awaited,
        progress,
        ...(timeoutMs === undefined ? {} : { timeoutMs }),
      }),
    );
  }

  #request(request: Request<C>, unawaited = false): PostedRequest {
    switch (request?.kind) {
      case 'put':
        return this.#put(request.from, request.to, request.signal, unawaited);
      case 'put-value':
        return this.#putValue(request.to, request.value, request.signal, unawaited);
      case 'signal':
        return this.#signal(request.memory, request.signal, unawaited);
      default: {
        const found: unknown = (request as { kind?: unknown } | undefined)?.kind ?? request;
        throw invalid('kind', { where: 'submit', expected: 'put, put-value or signal', found });
      }
    }
  }

  #put(from: Region, to: RemoteRegion, update: SignalUpdate<C> | undefined, unawaited = false): PostedRequest {
    const target = this.#remote(to);
    const source = this.#local('put: the source', from);
    checkSameSize('put', from, to);
    const { op, slot, value } = this.#signalWords(update);
    const { nic } = this.#init;
    const [at, begin] = [to.byteOffset, from.byteOffset];
    return nic.put(target, this.peer, at, source, begin, from.byteLength, op, slot, value, unawaited);
  }

  #putValue(to: RemoteRegion, word: bigint, update: SignalUpdate<C> | undefined, unawaited = false): PostedRequest {
    const target = this.#remote(to);
    checkValue(word, to);
    const { op, slot, value } = this.#signalWords(update);
    const { nic } = this.#init;
    return nic.putValue(target, this.peer, to.byteOffset, to.byteLength, word, op, slot, value, unawaited);
  }

  #signal(memory: SymmetricMemory, update: SignalUpdate<C>, unawaited = false): PostedRequest {
    if (update === undefined)
      throw invalid('signal', { where: 'signal', expected: '{slot, op, value}', found: update });
    const { op, slot, value } = this.#signalWords(update);
    return this.#init.nic.signal(this.#memory(memory), this.peer, op, slot, value, unawaited);
  }

  #signalWords(update: SignalUpdate<C> | undefined): SignalWords {
    if (update !== undefined && update !== null) this.#init.checkSignal?.(update);
    return signalWords(update);
  }

  #local(what: string, region: Region): NativeLocal {
    const memory: unknown = region?.memory;
    if (memory instanceof RankMemory) return memory.localOperand('endpoint');
    if (memory instanceof AdoptedRange) return memory.numberFor(this.#init.nic);
    if (typeof memory !== 'object' || memory === null) {
      throw invalid(what, { where: 'endpoint', expected: 'a region, which memory.local() makes', found: region });
    }
    throw new EpError(
      'EP_UNSUPPORTED',
      `${what} must lie in a symmetric memory or in memory that this transport adopted; adopt() it, or copy it there`,
    );
  }

  #memory(memory: SymmetricMemory): NativeSymmetricMemory {
    if (memory instanceof RankMemory && memory.context === this.#init.context) return memory.nativeMemory('endpoint');
    throw new EpError('EP_INVALID_ARGUMENT', 'the memory belongs to another transport');
  }

  #remote(region: RemoteRegion): NativeSymmetricMemory {
    checkRemote(region, this.peer);
    return this.#memory(region.memory);
  }
}
