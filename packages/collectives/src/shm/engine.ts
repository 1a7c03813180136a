/** Process groups of ranks that share memory: the addon carries calls out, on the calling thread where that is quick, else on a thread of the group. */
import { type DType, EpError, type Rank, Resource, type Storage } from '@ep/core';
import {
  codeOfStatus,
  type Native,
  type NativeCollectiveGroup,
  native,
  type OperationId,
  type Outcome,
} from '@ep/native';
import type { EngineInit } from '../backends.js';
import type {
  Elements,
  EngineCall,
  EngineEnd,
  GroupEngine,
  GroupView,
  OpKind,
  OpTrace,
  RecvCall,
  RecvEnd,
  SendCall,
} from '../engine.js';
import { factorOf, KIND_CODES, KINDS, reductionCode, TYPE_CODES } from './codes.js';
import { Connecting } from './connecting.js';
import { callError, messageError } from './failures.js';
import { GroupMemory, NO_ALLOCATION } from './memory.js';

const limitOf = (timeoutMs: number): number => (Number.isFinite(timeoutMs) ? timeoutMs : -1);

/** 64 bits of the group's name (FNV-1a): members of different groups that meet by mistake are told apart. */
function nonceOf(name: string): bigint {
  let hash = 0xcbf29ce484222325n;
  for (const byte of new TextEncoder().encode(name)) hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  return hash;
}

const ordinary = (elements: Elements, allocation: number): Elements | undefined =>
  allocation === NO_ALLOCATION ? elements : undefined;

class ShmEngine extends Resource implements GroupEngine {
  readonly name = 'shm';
  readonly rank: Rank;
  readonly size: number;
  readonly #native: Native;
  readonly #group: NativeCollectiveGroup;
  readonly #memory: GroupMemory;
  readonly #connecting: Connecting;
  /** The last one asked for: the outcomes of calls come late, and each is told in its own epoch. */
  #view: GroupView;
  #end: EngineEnd;
  #poison: EpError | undefined;

  constructor({ rank, size, ranks, name, store, ranksOnHost }: EngineInit) {
    super(`shm group ${name}`);
    this.rank = rank;
    this.size = size;
    this.#native = native();
    const onHost = ranksOnHost ?? Math.max(size, ...ranks.map((world) => world + 1));
    this.#group = new this.#native.binding.CollectiveGroup(rank, size, nonceOf(name), onHost);
    this.#memory = new GroupMemory(this.#group);
    this.#connecting = new Connecting(this.#group, store, rank, size);
    this.#view = { epoch: 1, active: Array.from({ length: size }, (_, member) => member) };
    this.#end = { contributors: this.#view.active };
  }

  /** The addon's object, for native measurements. */
  get nativeGroup(): NativeCollectiveGroup {
    return this.#group;
  }

  readonly run = (call: EngineCall): EngineEnd | Promise<EngineEnd> => {
    if (this.#poison !== undefined) return Promise.reject(this.#poisoned(call, this.#poison));
    if (call.signal?.aborted) {
      // The others make this call: they must hear that this rank does not.
      const cancelled = this.#start(call, false);
      this.#native.binding.cancel(cancelled);
      return this.#follow(call, cancelled, call.signal);
    }
    const id = this.#start(call, true);
    if (id !== 0) return this.#follow(call, id);
    return this.#endIn(this.#native.frame.epoch);
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
    if (outcome.status !== 0) throw messageError('send', call, outcome);
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
    if (outcome.status !== 0) throw messageError('recv', call, outcome);
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
    const names = [...KINDS, 'send', 'recv'] as const;
    return Object.fromEntries(
      names.flatMap((name, i) => {
        const [calls, bytes, writes, signals] = numbers.subarray(4 * i, 4 * i + 4);
        return calls === 0 ? [] : [[name, { calls: calls!, bytes: bytes!, writes: writes!, signals: signals! }]];
      }),
    );
  };

  readonly connections = () => {
    const attached = this.#group.attached();
    return Array.from({ length: this.size }, (_, rank) => {
      const { state, detail } = this.#connecting.stateOf(rank);
      const gone = state === 'connected' && attached[rank] === 0;
      return {
        rank,
        state: gone ? ('lost' as const) : state,
        ...(gone ? { detail: 'it died or closed the group' } : detail !== undefined && { detail }),
      };
    });
  };

  protected override async release(): Promise<void> {
    await this.#connecting.close();
    this.#group.close();
    this.#memory.release();
  }

  /** Hands the call to the addon: 0 if it has ended. */
  #start(call: EngineCall, attempt: boolean): OperationId {
    const { kind, inputs, outputs } = call;
    const input = inputs[0];
    const output = outputs[0];
    const block = input ?? output;
    this.#native.frame.collective(
      KIND_CODES[kind],
      TYPE_CODES[call.dtype],
      reductionCode(call.reduceOp),
      factorOf(call.reduceOp),
      call.root,
      kind === 'all-to-all' || block === undefined ? 0 : block.byteLength,
      call.sequence,
      limitOf(call.timeoutMs),
    );
    if (kind === 'barrier') return this.#group.call(attempt);
    if (kind !== 'all-reduce' && kind !== 'broadcast' && kind !== 'reduce') return this.#startLists(call, attempt);
    const from = input === undefined ? NO_ALLOCATION : this.#memory.allocationOf(input);
    if (output === undefined || output === input) {
      const offset = input === undefined ? 0 : input.byteOffset;
      this.#native.frame.places(from, offset, from, offset);
      return from === NO_ALLOCATION ? this.#group.call(attempt, input) : this.#group.call(attempt);
    }
    const to = this.#memory.allocationOf(output);
    this.#native.frame.places(from, input?.byteOffset ?? 0, to, output.byteOffset);
    return from === NO_ALLOCATION || to === NO_ALLOCATION
      ? this.#group.call(attempt, input, output)
      : this.#group.call(attempt);
  }

  #startLists({ inputs, outputs }: EngineCall, attempt: boolean): OperationId {
    const placesOf = (all: readonly Elements[]): Float64Array => {
      const places = new Float64Array(3 * all.length);
      for (let i = 0; i < all.length; i++) {
        const elements = all[i]!;
        places[3 * i] = this.#memory.allocationOf(elements);
        places[3 * i + 1] = elements.byteOffset;
        places[3 * i + 2] = elements.byteLength;
      }
      return places;
    };
    return this.#group.callLists(attempt, placesOf(inputs), inputs, placesOf(outputs), outputs);
  }

  /** The end of a call that the group's thread carries on. `cancelled`: by a signal that had fired before. */
  async #follow(call: EngineCall, id: OperationId, cancelled?: AbortSignal): Promise<EngineEnd> {
    let outcome: Outcome;
    try {
      outcome = await this.#native.operations.run(() => id, cancelled === undefined ? call.signal : undefined);
      if (outcome.status !== 0) cancelled?.throwIfAborted();
    } catch (error) {
      this.#poison ??= this.#abortedHere(call, error);
      if (!this.closed) this.#group.failure(id);
      throw error;
    }
    if (outcome.status === 0) {
      const targets = call.outputs.map((output) => ordinary(output, this.#memory.allocationOf(output)));
      if (!this.closed && targets.some((target) => target !== undefined)) this.#group.collect(id, targets);
      return this.#endIn(outcome.stage);
    }
    throw this.#failed(call, outcome, id);
  }

  #failed(call: EngineCall, outcome: Outcome, id: OperationId): EpError {
    const details = this.#group.failure(id);
    if (codeOfStatus(outcome.status) === 'EP_BUSY' && this.#poison !== undefined)
      return this.#poisoned(call, this.#poison);
    const error = callError(call, outcome, details);
    if (error.code !== 'EP_PEER_LOST' && error.code !== 'EP_CLOSED') this.#poison ??= error;
    return error;
  }

  #poisoned(call: EngineCall, cause: EpError): EpError {
    return new EpError(
      'EP_POISONED',
      `call ${call.sequence}: ${call.kind}: an earlier call failed, so that the ranks no longer agree where they are; open a new group: ${cause.message}`,
      { cause, context: cause.context },
    );
  }

  #abortedHere(call: EngineCall, reason: unknown): EpError {
    return new EpError('EP_ABORTED', `call ${call.sequence}: ${call.kind}: this rank gave it up`, {
      cause: reason,
      context: { sequence: call.sequence, ranks: [this.rank] },
    });
  }

  #endIn(epoch: number): EngineEnd {
    if (epoch !== this.#view.epoch) {
      this.#view = { epoch, active: [...this.#group.active(epoch)] };
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
export function openShmEngine(init: EngineInit): GroupEngine {
  return new ShmEngine(init);
}
