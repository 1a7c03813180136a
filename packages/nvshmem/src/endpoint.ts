/** Operations towards one peer. With shared memory each is done when it returns: the peer's memory is mapped here. */
import {
  createWork,
  doneWork,
  type Endpoint,
  EpError,
  invalid,
  type Need,
  type Rank,
  type Region,
  type RemoteRegion,
  type Request,
  Resource,
  type SignalUpdate,
  type SymmetricMemory,
  type WaitOptions,
  type Work,
  WorkOwner,
} from '@ep/core';
import { type CallFrame, type NativeRankContext, type NativeSymmetricMemory, native } from '@ep/native';
import {
  checkLimits,
  checkRemote,
  checkSameSize,
  checkValue,
  emptyPlace,
  type Liveness,
  RankMemory,
  signalWords,
  wordOf,
} from '@ep/native/ranks';

function ownMemory(what: string, region: Region): NativeSymmetricMemory {
  const memory: unknown = region?.memory;
  if (memory instanceof RankMemory) return memory.nativeMemory('endpoint');
  if (typeof memory !== 'object' || memory === null) {
    throw invalid(what, { where: 'endpoint', expected: 'a region, which memory.local() makes', found: region });
  }
  throw new EpError('EP_UNSUPPORTED', `${what} must lie in a symmetric memory of nvshmem:shm; copy it there`);
}

/** Codes of `NativeSymmetricMemory.atomic`. */
const [ADD, COMPARE_SWAP] = [2, 7] as const;

export class ShmEndpoint extends Resource implements Endpoint<Need> {
  readonly peer: Rank;
  readonly #context: NativeRankContext;
  readonly #frame: CallFrame = native().frame;
  readonly #liveness: Liveness;
  /** By rank: 1 where nobody is in its place. */
  readonly #empty: Readonly<Uint8Array>;
  readonly #owner: WorkOwner;
  #sequence = 0;

  constructor(peer: Rank, context: NativeRankContext, liveness: Liveness, empty: Readonly<Uint8Array>) {
    super(`endpoint to rank ${peer}`);
    this.#empty = empty;
    this.peer = peer;
    this.#context = context;
    this.#liveness = liveness;
    this.#owner = new WorkOwner(`endpoint to rank ${peer}`);
  }

  // Each has its own try: a body passed to a shared function would be a closure per call, a fifth of the call's time.
  readonly put = (from: Region, to: RemoteRegion, options?: { readonly signal?: SignalUpdate<Need> }): Work => {
    this.#checkUsable('put');
    try {
      this.#put(from, to, options?.signal);
    } catch (error) {
      return this.#failed('put', error);
    }
    return doneWork('put', this.#sequence++);
  };

  readonly putValue = (to: RemoteRegion, value: bigint, options?: { readonly signal?: SignalUpdate<Need> }): Work => {
    this.#checkUsable('putValue');
    try {
      this.#putValue(to, value, options?.signal);
    } catch (error) {
      return this.#failed('putValue', error);
    }
    return doneWork('putValue', this.#sequence++);
  };

  readonly signal = (memory: SymmetricMemory, update: SignalUpdate<Need>): Work => {
    this.#checkUsable('signal');
    try {
      this.#signal(memory, update);
    } catch (error) {
      return this.#failed('signal', error);
    }
    return doneWork('signal', this.#sequence++);
  };

  readonly get = (from: RemoteRegion, to: Region): Work => {
    this.#checkUsable('get');
    try {
      this.#get(from, to);
    } catch (error) {
      return this.#failed('get', error);
    }
    return doneWork('get', this.#sequence++);
  };

  /** By processors' own instructions, so atomic against their stores of whole words, puts and kernels as well. */
  readonly fetchAdd = (to: RemoteRegion, add: bigint): Work<bigint> => this.#change('fetchAdd', to, ADD, add, 0n);

  readonly compareSwap = (to: RemoteRegion, compare: bigint, swap: bigint): Work<bigint> =>
    this.#change('compareSwap', to, COMPARE_SWAP, swap, compare);

  readonly submit = (batch: readonly Request<Need>[]): readonly Work[] => {
    this.#checkUsable('submit');
    if (!Array.isArray(batch))
      throw invalid('batch', { where: 'submit', expected: 'a list of requests', found: batch });
    // Not through put() and its like: their check for failures that nobody saw would throw at the second request what is the first one's own.
    return batch.map((request) => {
      try {
        this.#request(request);
      } catch (error) {
        return this.#failed(request?.kind ?? 'submit', error);
      }
      return doneWork(request.kind, this.#sequence++);
    });
  };

  /** Rejects with `EP_PEER_LOST` if the peer is dead: what was put there has landed in memory that nobody will read. */
  readonly flush = async (options?: WaitOptions): Promise<void> => {
    if (options !== undefined) checkLimits(options, 'flush', this.#liveness.worldSize);
    options?.signal?.throwIfAborted();
    // Nothing to wait for: every operation had landed when its call returned. What failed unseen is reported here.
    this.#checkUsable('flush');
    if (this.#liveness.isDead(this.peer)) {
      const context = { lost: [this.peer] };
      throw this.#liveness.notice(new EpError('EP_PEER_LOST', `flush: rank ${this.peer} died`, { context }));
    }
    if (this.#empty[this.peer] === 1) throw emptyPlace('flush', this.peer);
  };

  protected override release(): Promise<void> {
    return this.#owner.close();
  }

  #change(op: string, to: RemoteRegion, code: number, word: bigint, expected: bigint): Work<bigint> {
    this.#checkUsable(op);
    try {
      const target = this.#remote(to);
      if (to.byteLength !== 8 || to.byteOffset % 8 !== 0) {
        const found = `${to.byteLength} bytes at ${to.byteOffset}`;
        throw invalid('region', { where: op, expected: '8 bytes at a multiple of 8', found });
      }
      const operand = wordOf(op, code === ADD ? 'add' : 'swap', word);
      const other = wordOf(op, 'compare', expected);
      const old = target.atomic(this.peer, to.byteOffset, 8, code, operand, other);
      return doneWork(op, this.#sequence++, BigInt(old));
    } catch (error) {
      return this.#failed(op, error);
    }
  }

  #checkUsable(operation: string): void {
    this.checkOpen(operation);
    this.#owner.check();
  }

  /** Whatever is wrong with a call is carried by its Work, so that in a batch each request has its own status. */
  #failed<T>(op: string, reason: unknown): Work<T> {
    const control = createWork<T>({ op, sequence: this.#sequence++, owner: this.#owner });
    control.reject(reason);
    return control.work;
  }

  #request(request: Request<Need>): void {
    switch (request?.kind) {
      case 'put':
        this.#put(request.from, request.to, request.signal);
        return;
      case 'put-value':
        this.#putValue(request.to, request.value, request.signal);
        return;
      case 'signal':
        this.#signal(request.memory, request.signal);
        return;
      default: {
        const found: unknown = (request as { kind?: unknown } | undefined)?.kind ?? request;
        throw invalid('kind', { where: 'submit', expected: 'put, put-value or signal', found });
      }
    }
  }

  #put(from: Region, to: RemoteRegion, update: SignalUpdate<Need> | undefined): void {
    const target = this.#remote(to);
    const source = ownMemory('put: the source', from);
    checkSameSize('put', from, to);
    const { op, slot, value } = signalWords(update);
    if (source !== target) {
      target.put(this.peer, to.byteOffset, source, from.byteOffset, from.byteLength, op, slot, value);
      return;
    }
    this.#frame.put(this.peer, to.byteOffset, from.byteOffset, from.byteLength);
    this.#frame.signal(this.peer, op, slot, value);
    target.putFrame();
  }

  #putValue(to: RemoteRegion, word: bigint, update: SignalUpdate<Need> | undefined): void {
    const target = this.#remote(to);
    checkValue(word, to);
    const { op, slot, value } = signalWords(update);
    target.putValue(this.peer, to.byteOffset, to.byteLength, word, op, slot, value);
  }

  #signal(memory: SymmetricMemory, update: SignalUpdate<Need>): void {
    if (update === undefined)
      throw invalid('signal', { where: 'signal', expected: '{slot, op, value}', found: update });
    const { op, slot, value } = signalWords(update);
    const target = this.#memory(memory);
    this.#frame.signal(this.peer, op, slot, value);
    target.signalFrame();
  }

  #get(from: RemoteRegion, to: Region): void {
    const source = this.#remote(from);
    const target = ownMemory('get: the target', to);
    checkSameSize('get', from, to);
    source.get(this.peer, from.byteOffset, target, to.byteOffset, to.byteLength);
  }

  /** HAZARD: what is written into an empty place is lost, and nobody would hear of it. */
  #memory(memory: SymmetricMemory): NativeSymmetricMemory {
    if (this.#empty[this.peer] === 1) throw emptyPlace('endpoint', this.peer);
    if (memory instanceof RankMemory && memory.context === this.#context) return memory.nativeMemory('endpoint');
    throw new EpError('EP_INVALID_ARGUMENT', 'the memory belongs to another transport');
  }

  #remote(region: RemoteRegion): NativeSymmetricMemory {
    checkRemote(region, this.peer);
    return this.#memory(region.memory);
  }
}
