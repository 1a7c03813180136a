/** Operations towards one peer: each is handed to the engine, which runs it when it pleases. */
import {
  checkInteger,
  createWork,
  type Endpoint,
  EpError,
  formatRanks,
  invalid,
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
import { codeOfStatus, type NativeHostileEngine, native, type OperationId } from '@ep/native';
import { HostileMemory } from './memory.js';
import type { HostileNeeds } from './probe.js';

const NO_SLOT = -1;
type Options = { readonly signal?: SignalUpdate<HostileNeeds> };

/** Slot and addend. What this transport does not offer is refused although it does not compile: JavaScript calls it too. */
function addend(update: SignalUpdate<HostileNeeds> | undefined): readonly [number, bigint] {
  if (update === undefined) return [NO_SLOT, 0n];
  const { op, value, order } = update;
  const slot = checkInteger(update.slot, 'slot', 'signal');
  if (order !== undefined && order !== 'bundled') {
    throw new EpError(
      'EP_UNSUPPORTED',
      `signal: order ${order} is not offered: puts overtake each other; use bundled and count`,
    );
  }
  if (op === 'inc') return [slot, 1n];
  if (op !== 'add')
    throw new EpError('EP_UNSUPPORTED', `signal: op ${op as string} is not offered; use inc or add and count`);
  if (typeof value !== 'bigint') throw invalid('value', { where: 'signal add', expected: 'a bigint', found: value });
  return [slot, value];
}

export interface HostileEndpointInit {
  readonly peer: Rank;
  readonly engine: NativeHostileEngine;
  readonly timeoutMs: number;
  /** The transport can no longer keep its promises. */
  readonly onFailed: (error: EpError) => void;
}

export class HostileEndpoint extends Resource implements Endpoint<HostileNeeds> {
  readonly peer: Rank;
  readonly #init: HostileEndpointInit;
  readonly #owner: WorkOwner;
  #sequence = 0;

  constructor(init: HostileEndpointInit) {
    super(`hostile endpoint to rank ${init.peer}`);
    this.peer = init.peer;
    this.#init = init;
    this.#owner = new WorkOwner(`hostile endpoint to rank ${init.peer}`);
  }

  readonly put = (from: Region, to: RemoteRegion, options?: Options): Work => {
    this.#owner.check();
    return this.#put(from, to, options);
  };

  readonly putValue = (to: RemoteRegion, value: bigint, options?: Options): Work => {
    this.#owner.check();
    return this.#putValue(to, value, options);
  };

  readonly signal = (memory: SymmetricMemory, update: SignalUpdate<HostileNeeds>): Work => {
    this.#owner.check();
    return this.#signal(memory, update);
  };

  readonly get = (_from: RemoteRegion, _to: Region): Work =>
    this.#run('get', () => {
      throw new EpError(
        'EP_UNSUPPORTED',
        'get: the hostile transport has no one-sided reads; let the owner put the bytes',
      );
    });

  /** Earlier failures are reported before the batch, its own by its Works: one must not cut the rest of it off. */
  readonly submit = (batch: readonly Request<HostileNeeds>[]): readonly Work[] => {
    this.#owner.check();
    return batch.map((request) => {
      switch (request.kind) {
        case 'put':
          return this.#put(request.from, request.to, request.signal && { signal: request.signal });
        case 'put-value':
          return this.#putValue(request.to, request.value, request.signal && { signal: request.signal });
        case 'signal':
          return this.#signal(request.memory, request.signal);
        default:
          return this.#run('submit', () => {
            const found = (request as { readonly kind: unknown }).kind;
            throw invalid('kind', { where: 'submit', expected: 'put, put-value or signal', found });
          });
      }
    });
  };

  readonly flush = (options: WaitOptions = {}): Promise<void> =>
    this.guard('flush', async () => {
      const { engine, timeoutMs: fallback } = this.#init;
      const timeoutMs = options.timeoutMs ?? fallback;
      // A cancel flag does not wake the engine by itself.
      const nudge = (): void => engine.nudge();
      const ended = native().operations.run(
        () => engine.flush(this.peer, Number.isFinite(timeoutMs) ? timeoutMs : -1),
        options.signal,
      );
      options.signal?.addEventListener('abort', nudge, { once: true });
      const end = await ended.finally(() => options.signal?.removeEventListener('abort', nudge));
      if (end.status !== 0) throw this.#failure('flush', end.status, timeoutMs);
      const violation = engine.violation();
      if (violation !== '') {
        const error = new EpError('EP_TRANSPORT_FAILED', `flush: ${violation}`);
        this.#init.onFailed(error);
        throw error;
      }
      this.#owner.check();
    });

  /** Drains at once instead of at the engine's leisure; what cannot land any more is reported by its own Work. */
  protected override async release(): Promise<void> {
    if (this.#owner.pending > 0) await native().operations.run(() => this.#init.engine.flush(this.peer, -1));
    await this.#owner.close();
  }

  #put(from: Region, to: RemoteRegion, options?: Options): Work {
    return this.#run('put', (engine) => {
      const target = this.#remote(to);
      if (from.byteLength !== to.byteLength) {
        throw invalid('to', {
          where: 'put',
          expected: `${from.byteLength} bytes, as the source has`,
          found: to.byteLength,
        });
      }
      const source = this.#memory(from.memory);
      const [slot, add] = addend(options?.signal);
      return engine.put(target, this.peer, to.byteOffset, source, from.byteOffset, from.byteLength, slot, add);
    });
  }

  #putValue(to: RemoteRegion, value: bigint, options?: Options): Work {
    return this.#run('putValue', (engine) => {
      const target = this.#remote(to);
      const [slot, add] = addend(options?.signal);
      return engine.putValue(target, this.peer, to.byteOffset, to.byteLength, value, slot, add);
    });
  }

  #signal(memory: SymmetricMemory, update: SignalUpdate<HostileNeeds>): Work {
    return this.#run('signal', (engine) => {
      const [slot, add] = addend(update);
      return engine.signal(this.#memory(memory), this.peer, slot, add);
    });
  }

  #run(op: string, post: (engine: NativeHostileEngine) => OperationId): Work {
    this.checkOpen(op);
    const control = createWork({ op, sequence: this.#sequence++, owner: this.#owner });
    try {
      const id = post(this.#init.engine);
      native().operations.track(id, (end) => {
        if (end.status === 0) control.resolve();
        else control.reject(this.#failure(op, end.status));
      });
    } catch (error) {
      control.reject(error);
    }
    return control.work;
  }

  #failure(op: string, status: number, timeoutMs?: number): EpError {
    const code = codeOfStatus(status);
    const context = {
      op,
      awaited: [this.peer],
      lost: code === 'EP_PEER_LOST' ? [this.peer] : [],
      ...(timeoutMs === undefined ? {} : { timeoutMs }),
    };
    const why = {
      EP_TIMEOUT: `timed out after ${timeoutMs} ms`,
      EP_PEER_LOST: `${formatRanks([this.peer])} died`,
      EP_CLOSED: 'the transport was closed before it had landed',
    }[code as string];
    const error = new EpError(code, `${op} to rank ${this.peer}: ${why ?? 'cut off'}`, { context });
    if (code === 'EP_PEER_LOST') this.#init.onFailed(error);
    return error;
  }

  #memory(memory: unknown) {
    if (memory instanceof HostileMemory) return memory.nativeMemory('endpoint');
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
