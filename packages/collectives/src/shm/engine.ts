/** Process groups of ranks that share memory: the addon carries calls out, on the calling thread where that is quick, else on a thread of the group. */
import { setTimeout as delay } from 'node:timers/promises';
import { type DType, EpError, type Rank, Resource, type Storage } from '@ep/core';
import {
  codeOfStatus,
  type Native,
  type NativeCollectiveGroup,
  native,
  type OperationId,
  type Outcome,
} from '@ep/native';
import type { ElasticInit, EngineFactory, EngineInit } from '../backends.js';
import type {
  Elastic,
  Elements,
  EngineCall,
  EngineEnd,
  GroupEngine,
  GroupView,
  LookLimits,
  MembershipCall,
  MembershipEnd,
  OpKind,
  OpTrace,
  RecvCall,
  RecvEnd,
  SendCall,
} from '../engine.js';
import { limitOf, NativeCalls, ordinary } from './calls.js';
import { KINDS, PEER_STATES, TYPE_CODES } from './codes.js';
import { Connecting, nextIncarnation } from './connecting.js';
import { callError, messageError, type NamedCall } from './failures.js';
import { GroupMemory, NO_ALLOCATION } from './memory.js';

/** 64 bits of the group's name (FNV-1a): members of different groups that meet by mistake are told apart. */
function nonceOf(name: string): bigint {
  let hash = 0xcbf29ce484222325n;
  for (const byte of new TextEncoder().encode(name)) hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  return hash;
}

/** How often a rank that joins looks for others that have come since. */
const REFRESH_MS = 20;
/** How often a rank that waits looks whether it has to move its memory. */
const FENCE_MS = 20;

/** The ranks of a group that all take part in, and that none joins later. */
const fixed = (size: number): ElasticInit => ({
  capacity: size,
  active: Array.from({ length: size }, (_, rank) => rank),
  joins: false,
  evicts: false,
});

class ShmEngine extends Resource implements GroupEngine {
  readonly name = 'shm';
  readonly rank: Rank;
  readonly elastic: Elastic;
  readonly #native: Native;
  readonly #init: EngineInit;
  readonly #elastic: ElasticInit;
  /** Of the world, unless this is it. */
  readonly #first: ShmEngine | undefined;
  #group: NativeCollectiveGroup;
  readonly #memory: GroupMemory;
  #calls: NativeCalls;
  #connecting: Connecting;
  #size: number;
  /** Taken out by the others. */
  #evicted = false;
  /** The last one asked for: the outcomes of calls come late, and each is told in its own epoch. */
  #view: GroupView;
  #end: EngineEnd;
  #poison: EpError | undefined;
  /** The last call that failed so. */
  #poisonedAt = 0;
  /** Calls that the addon has under way. */
  #waiting = 0;
  #fencing: NodeJS.Timeout | undefined;

  constructor(init: EngineInit, incarnation: number, first: ShmEngine | undefined) {
    super(`shm group ${init.name}`);
    this.rank = init.rank;
    this.#first = first;
    this.#init = init;
    this.#elastic = init.elastic ?? fixed(init.size);
    this.#native = native();
    this.#group = this.#make(incarnation, this.#elastic.joins);
    this.#memory = new GroupMemory(this.#group);
    this.#calls = new NativeCalls(this.#native, this.#group, this.#memory);
    this.#connecting = this.#connect(incarnation);
    this.#size = this.#group.size();
    this.#view = { epoch: 1, active: [...this.#group.active(1)] };
    this.#end = { contributors: this.#view.active };
    this.elastic = {
      capacity: this.#elastic.capacity,
      change: (call) => this.#change(call),
      refresh: (limits) => this.#refresh(limits),
      join: (limits) => this.#join(limits),
    };
  }

  get size(): number {
    return this.#size;
  }

  /** The addon's object, for native measurements. */
  get nativeGroup(): NativeCollectiveGroup {
    return this.#group;
  }

  readonly #hasCome = (rank: Rank): boolean => this.#connecting.hasCome(rank);

  readonly run = (call: EngineCall): EngineEnd | Promise<EngineEnd> => {
    if (this.#poison !== undefined) return Promise.reject(this.#poisoned(call, this.#poison));
    if (call.signal?.aborted) {
      // The others make this call: they must hear that this rank does not.
      const cancelled = this.#calls.start(call, false);
      this.#native.binding.cancel(cancelled);
      return this.#follow(call, cancelled, call.signal);
    }
    const id = this.#calls.start(call, true);
    return id === 0 ? this.#endIn(this.#calls.epoch) : this.#follow(call, id);
  };

  readonly send = async (call: SendCall): Promise<void> => {
    call.signal?.throwIfAborted();
    const allocation = this.#memory.allocationOf(call.data);
    const { peer, tag, data, timeoutMs } = call;
    const type = messageType(data);
    const start = () =>
      this.#group.send(
        peer,
        tag,
        type,
        data.byteLength,
        limitOf(timeoutMs),
        allocation,
        data.byteOffset,
        ordinary(data, allocation),
      );
    const outcome = await this.#native.operations.run(start, call.signal);
    if (outcome.status !== 0) throw messageError('send', call, outcome, this.#hasCome);
  };

  readonly recv = async (call: RecvCall): Promise<RecvEnd> => {
    call.signal?.throwIfAborted();
    const { peer, tag, data, timeoutMs } = call;
    const allocation = this.#memory.allocationOf(data);
    const type = messageType(data);
    let operation: OperationId = 0;
    const start = () => {
      operation = this.#group.receive(
        peer,
        tag,
        type,
        data.byteLength,
        limitOf(timeoutMs),
        allocation,
        data.byteOffset,
      );
      return operation;
    };
    const outcome = await this.#native.operations.run(start, call.signal);
    if (outcome.status !== 0) throw messageError('recv', call, outcome, this.#hasCome);
    if (allocation === NO_ALLOCATION) this.#group.takeReceived(operation, data);
    return { source: outcome.rank, byteLength: Number(outcome.found) };
  };

  readonly view = (): GroupView => {
    if (!this.closed) this.#endIn(this.#group.epoch());
    return this.#view;
  };

  readonly allocate = <D extends DType>(dtype: D, length: number): Storage[D] => {
    this.checkOpen('allocate');
    return this.#memory.allocate(dtype, length);
  };

  readonly trace = (): Readonly<Partial<Record<OpKind | 'send' | 'recv', OpTrace>>> => {
    const numbers = this.#group.trace();
    const names = [...KINDS, 'membership', 'send', 'recv'] as const;
    return Object.fromEntries(
      names.flatMap((name, i) => {
        const [calls, bytes, writes, signals] = numbers.subarray(4 * i, 4 * i + 4);
        return calls === 0 || name === 'membership'
          ? []
          : [[name, { calls: calls!, bytes: bytes!, writes: writes!, signals: signals! }]];
      }),
    );
  };

  readonly connections = () => {
    const seen = this.#group.survey();
    return Array.from({ length: this.size }, (_, rank) => {
      const { state, detail } = this.#connecting.stateOf(rank);
      const gone = state === 'connected' && seen[rank] === 0;
      return {
        rank,
        state: gone ? ('lost' as const) : state,
        ...(gone ? { detail: 'it died or closed the group' } : detail !== undefined && { detail }),
      };
    });
  };

  protected override async release(): Promise<void> {
    await this.#connecting.close();
    clearInterval(this.#fencing);
    this.#calls.forget();
    this.#group.close();
    this.#memory.release();
  }

  /** A new side of the group for this rank; after the first, with the memory that it has. */
  #make(incarnation: number, joins: boolean, previous?: NativeCollectiveGroup): NativeCollectiveGroup {
    const { rank, size, ranks, name, ranksOnHost } = this.#init;
    const { capacity, active, evicts } = this.#elastic;
    const onHost = ranksOnHost ?? Math.max(capacity, ...ranks.map((world) => world + 1));
    const { CollectiveGroup } = this.#native.binding;
    return new CollectiveGroup(
      rank,
      size,
      capacity,
      nonceOf(name),
      onHost,
      Int32Array.from(active),
      joins,
      incarnation,
      evicts,
      previous,
      this.#first?.nativeGroup,
    );
  }

  #connect(incarnation: number): Connecting {
    const { rank, store, lost = () => [] } = this.#init;
    return new Connecting(this.#group, store, { rank, incarnation, awaited: this.#elastic.active, lost });
  }

  async #refresh(limits?: LookLimits): Promise<void> {
    const seen = this.#group.survey();
    const takingPart = PEER_STATES.indexOf('active');
    await this.#connecting.refresh(
      [...seen.keys()].filter((rank) => seen[rank] !== takingPart),
      limits,
    );
  }

  async #change(call: MembershipCall): Promise<MembershipEnd> {
    const { sequence, timeoutMs, evicted, admitted, size, repairs, signal } = call;
    const named: NamedCall = { kind: 'membership', sequence, timeoutMs, change: { evicted, admitted, size } };
    // By the order of calls on every rank: those made after this one are not refused for what it repairs.
    if (repairs && !this.#evicted) this.#poison = undefined;
    const aborted = signal?.aborted === true ? signal : undefined;
    if (this.#poison !== undefined) throw this.#poisoned(named, this.#poison);
    const id = this.#group.membership(
      sequence,
      limitOf(timeoutMs),
      Int32Array.from(evicted),
      Int32Array.from(admitted),
      size,
      repairs,
    );
    // The others make this call: they must hear that this rank does not.
    if (aborted !== undefined) this.#native.binding.cancel(id);
    const outcome = await this.#outcome(named, id, signal, aborted);
    if (outcome.status !== 0) throw this.#failed(named, outcome, id);
    // HAZARD: also for what was under way when it was made, and has ended badly since.
    if (repairs && !this.#evicted && this.#poisonedAt < sequence) this.#poison = undefined;
    const end = this.#group.membershipEnd(id);
    const states = Array.from(end.states, (state) => PEER_STATES[state]!);
    return { ...this.#endIn(outcome.stage), sequence: Number(outcome.expected), admitted: end.admitted, states };
  }

  async #join({
    timeoutMs,
    signal,
  }: {
    readonly timeoutMs: number;
    readonly signal?: AbortSignal | undefined;
  }): Promise<number> {
    const until = performance.now() + timeoutMs;
    for (;;) {
      signal?.throwIfAborted();
      if (this.#evicted || this.#view.epoch > 1 || !this.#elastic.joins) await this.#begin();
      const outcome = await this.#lookUntil(() =>
        this.#native.operations.run(() => this.#group.join(limitOf(Math.max(0, until - performance.now()))), signal),
      );
      if (outcome.status === 0) {
        this.#evicted = false;
        this.#poison = undefined;
        this.#fenceOrRest();
        this.#endIn(outcome.stage);
        return Number(outcome.expected);
      }
      const code = codeOfStatus(outcome.status);
      if (code === 'EP_EVICTED') {
        // They had taken it in, and waited for it in vain: they do not take the same one in again.
        this.#evicted = true;
        continue;
      }
      const where = `joinGroup of rank ${this.rank}`;
      throw new EpError(code, `${where}: nobody took it in within ${timeoutMs} ms`, {
        context: { timeoutMs, awaited: this.#elastic.active.filter((rank) => rank !== this.rank) },
      });
    }
  }

  /** Maps ranks as they come while `work` is under way. */
  async #lookUntil<T>(work: () => Promise<T>): Promise<T> {
    const stop = new AbortController();
    const { signal } = stop;
    const looking = (async () => {
      while (!signal.aborted) {
        await this.#connecting.refresh(
          Array.from({ length: this.#elastic.capacity }, (_, rank) => rank),
          { signal },
        );
        await delay(REFRESH_MS);
      }
    })();
    try {
      return await work();
    } finally {
      stop.abort();
      await looking;
    }
  }

  /** Begins anew beside the group that goes on without this rank, as another process would; group memory stays where it is. */
  async #begin(): Promise<void> {
    await this.#connecting.close();
    const incarnation = await nextIncarnation(this.#init.store, this.rank);
    this.checkOpen('joinGroup');
    const previous = this.#group;
    this.#group = this.#make(incarnation, true, previous);
    this.#memory.move(this.#group);
    this.#calls = new NativeCalls(this.#native, this.#group, this.#memory);
    previous.close();
    this.#connecting = this.#connect(incarnation);
  }

  /** The end of a call that the group's thread carries on. `cancelled`: by a signal that had fired before. */
  async #follow(call: EngineCall, id: OperationId, cancelled?: AbortSignal): Promise<EngineEnd> {
    const outcome = await this.#outcome(call, id, call.signal, cancelled);
    if (outcome.status === 0) {
      const targets = call.outputs.map((output) => ordinary(output, this.#memory.allocationOf(output)));
      if (!this.closed && targets.some((target) => target !== undefined)) this.#group.collect(id, targets);
      return this.#endIn(outcome.stage);
    }
    throw this.#failed(call, outcome, id);
  }

  async #outcome(
    call: NamedCall,
    id: OperationId,
    signal: AbortSignal | undefined,
    cancelled?: AbortSignal,
  ): Promise<Outcome> {
    this.#waiting++;
    this.#fencing ??= setInterval(() => this.#fenceOrRest(), FENCE_MS).unref();
    try {
      const outcome = await this.#native.operations.run(() => id, cancelled === undefined ? signal : undefined);
      if (outcome.status !== 0) cancelled?.throwIfAborted();
      return outcome;
    } catch (error) {
      this.#poisonBy(call, this.#abortedHere(call, error));
      if (!this.closed) this.#group.failure(id);
      throw error;
    } finally {
      this.#waiting--;
    }
  }

  /**
   * HAZARD: not only after calls that fail. One that has not begun when a rank is taken out goes on, once memory has been moved away from that rank: here, on
   * the thread that uses the memory.
   */
  #fenceOrRest(): void {
    if (this.#waiting === 0) {
      clearInterval(this.#fencing);
      this.#fencing = undefined;
    }
    try {
      this.#group.fence();
    } catch {
      // Tried again; a call that waits for it in vain says why when its time is up.
    }
  }

  #failed(call: NamedCall, outcome: Outcome, id: OperationId): EpError {
    const details = this.#group.failure(id);
    // Here, because nobody else changes group memory on this thread, and the next call waits for it.
    if (!this.closed) this.#group.fence();
    if (codeOfStatus(outcome.status) === 'EP_BUSY' && this.#poison !== undefined)
      return this.#poisoned(call, this.#poison);
    const error = callError(this.rank, call, outcome, details, this.#hasCome);
    if (error.code === 'EP_EVICTED') this.#leave();
    if (error.code !== 'EP_PEER_LOST' && error.code !== 'EP_CLOSED') this.#poisonBy(call, error);
    return error;
  }

  #poisonBy(call: NamedCall, error: EpError): void {
    this.#poison ??= error;
    this.#poisonedAt = Math.max(this.#poisonedAt, call.sequence);
  }

  #poisoned(call: NamedCall, cause: EpError): EpError {
    const where = `call ${call.sequence}: ${call.kind}`;
    if (this.#evicted) {
      return new EpError(
        'EP_EVICTED',
        `${where}: the others took this rank out of the group; joinGroup() asks them to take it in again`,
        {
          cause,
          context: cause.context,
        },
      );
    }
    return new EpError(
      'EP_POISONED',
      `${where}: an earlier call failed, so that the ranks no longer agree where they are; deactivate() those that did not come, or open a new group: ${cause.message}`,
      { cause, context: cause.context },
    );
  }

  /** Taken out. The view that says so may not have come. */
  #leave(): void {
    this.#evicted = true;
    this.#view = { epoch: this.#view.epoch, active: this.#view.active.filter((rank) => rank !== this.rank) };
    this.#end = { contributors: this.#view.active };
  }

  #abortedHere(call: NamedCall, reason: unknown): EpError {
    return new EpError('EP_ABORTED', `call ${call.sequence}: ${call.kind}: this rank gave it up`, {
      cause: reason,
      context: { sequence: call.sequence, ranks: [this.rank] },
    });
  }

  #endIn(epoch: number): EngineEnd {
    if (epoch !== this.#view.epoch) {
      // Whoever was taken out may not have heard of the view that says so.
      const active = [...this.#group.active(epoch)].filter((rank) => !this.#evicted || rank !== this.rank);
      this.#view = { epoch, active };
      this.#size = this.#group.size();
      this.#end = { contributors: this.#view.active };
    }
    return this.#end;
  }
}

/** A message says of what kind its elements are: a receiver with another kind of array is told. */
const MESSAGE_TYPES: Readonly<Record<string, DType>> = {
  Float64Array: 'f64',
  Float32Array: 'f32',
  BigInt64Array: 'i64',
  BigUint64Array: 'u64',
  Int32Array: 'i32',
  Uint32Array: 'u32',
  Int16Array: 'i16',
  Uint16Array: 'u16',
  Int8Array: 'i8',
};

const messageType = (data: Elements): number => TYPE_CODES[MESSAGE_TYPES[data[Symbol.toStringTag]] ?? 'u8'];

/** Does not wait for anybody. Throws `EP_MEMORY_LIMIT` where this rank's part does not fit, `EP_NATIVE_LOAD` where there is no addon. */
export function openShmEngine(init: EngineInit): GroupEngine | Promise<GroupEngine> {
  return openBeside(init, undefined);
}

/** The same for all groups of one world: the first one knows the cores of ranks that are not in the others. */
export function shmEngines(): EngineFactory {
  let first: ShmEngine | undefined;
  return async (init) => {
    const engine = await openBeside(init, first);
    first ??= engine;
    return engine;
  };
}

function openBeside(init: EngineInit, first: ShmEngine | undefined): ShmEngine | Promise<ShmEngine> {
  if (init.elastic?.joins !== true) return new ShmEngine(init, 1, first);
  return nextIncarnation(init.store, init.rank).then((incarnation) => new ShmEngine(init, incarnation, first));
}
