/** Operations towards one peer. With shared memory each is done when it returns: the peer's memory is mapped here. */
import {
  createWork,
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
import { ShmMemory } from './memory.js';

interface NativeSignal {
  readonly op: number;
  readonly slot: number;
  readonly value: bigint;
}

const NO_SIGNAL: NativeSignal = { op: 0, slot: 0, value: 0n };

function nativeSignal(update: SignalUpdate<Need> | undefined): NativeSignal {
  if (update === undefined) return NO_SIGNAL;
  const { op, slot, value } = update;
  if (op === 'inc') return { op: 1, slot, value: 1n };
  if (op !== 'add' && op !== 'set') throw invalid('op', { where: 'signal', expected: 'inc, add or set', found: op });
  if (typeof value !== 'bigint') throw invalid('value', { where: `signal ${op}`, expected: 'a bigint', found: value });
  return { op: op === 'add' ? 1 : 2, slot, value };
}

export class ShmEndpoint extends Resource implements Endpoint<Need> {
  readonly peer: Rank;
  readonly #owner: WorkOwner;
  #sequence = 0n;

  constructor(peer: Rank) {
    super(`endpoint to rank ${peer}`);
    this.peer = peer;
    this.#owner = new WorkOwner(`endpoint to rank ${peer}`);
  }

  readonly put = (from: Region, to: RemoteRegion, options?: { readonly signal?: SignalUpdate<Need> }): Work =>
    this.#run('put', () => {
      const target = this.#remote(to);
      if (from.byteLength !== to.byteLength) {
        throw invalid('to', {
          where: 'put',
          expected: `${from.byteLength} bytes, as the source has`,
          found: to.byteLength,
        });
      }
      if (!(from.memory instanceof ShmMemory)) {
        throw new EpError('EP_UNSUPPORTED', 'put: the source must lie in a symmetric memory of this transport');
      }
      const signal = nativeSignal(options?.signal);
      target.put(
        this.peer,
        to.byteOffset,
        from.memory.nativeMemory('put'),
        from.byteOffset,
        from.byteLength,
        signal.op,
        signal.slot,
        signal.value,
      );
    });

  readonly putValue = (to: RemoteRegion, value: bigint, options?: { readonly signal?: SignalUpdate<Need> }): Work =>
    this.#run('putValue', () => {
      const target = this.#remote(to);
      const signal = nativeSignal(options?.signal);
      target.putValue(this.peer, to.byteOffset, to.byteLength, value, signal.op, signal.slot, signal.value);
    });

  readonly signal = (memory: SymmetricMemory, update: SignalUpdate<Need>): Work =>
    this.#run('signal', () => {
      const { op, slot, value } = nativeSignal(update);
      this.#memory(memory).signal(this.peer, op, slot, value);
    });

  readonly get = (from: RemoteRegion, to: Region): Work =>
    this.#run('get', () => {
      const source = this.#remote(from);
      if (from.byteLength !== to.byteLength) {
        throw invalid('to', {
          where: 'get',
          expected: `${from.byteLength} bytes, as the source has`,
          found: to.byteLength,
        });
      }
      if (!(to.memory instanceof ShmMemory)) {
        throw new EpError('EP_UNSUPPORTED', 'get: the target must lie in a symmetric memory of this transport');
      }
      source.get(this.peer, from.byteOffset, to.memory.nativeMemory('get'), to.byteOffset, to.byteLength);
    });

  readonly submit = (batch: readonly Request<Need>[]): readonly Work[] =>
    batch.map((request) => {
      const options = request.kind !== 'signal' && request.signal ? { signal: request.signal } : undefined;
      switch (request.kind) {
        case 'put':
          return this.put(request.from, request.to, options);
        case 'put-value':
          return this.putValue(request.to, request.value, options);
        case 'signal':
          return this.signal(request.memory, request.signal);
        default:
          return this.#run('submit', () => {
            throw invalid('kind', {
              where: 'submit',
              expected: 'put, put-value or signal',
              found: (request as { kind: unknown }).kind,
            });
          });
      }
    });

  readonly flush = async (options?: WaitOptions): Promise<void> => {
    this.checkOpen('flush');
    options?.signal?.throwIfAborted();
    // Nothing to wait for: every operation had landed when its call returned. What failed unseen is reported here.
    this.#owner.check();
  };

  protected override release(): Promise<void> {
    return this.#owner.close();
  }

  /** A wrong call throws at once; what can only fail later is carried by the Work. */
  #run(op: string, body: () => void): Work {
    this.checkOpen(op);
    this.#owner.check();
    const control = createWork({ op, sequence: this.#sequence++, owner: this.#owner });
    try {
      body();
      control.resolve();
    } catch (error) {
      control.reject(error);
    }
    return control.work;
  }

  #memory(memory: SymmetricMemory) {
    if (memory instanceof ShmMemory) return memory.nativeMemory('endpoint');
    throw new EpError('EP_INVALID_ARGUMENT', 'the memory belongs to another transport');
  }

  #remote(region: RemoteRegion) {
    if (region.peer !== this.peer) {
      throw invalid('region', {
        where: `endpoint to rank ${this.peer}`,
        expected: `one of rank ${this.peer}`,
        found: region.peer,
      });
    }
    return this.#memory(region.memory);
  }
}
