/** Operations towards one peer: on device memory by NVSHMEM, on a stream of the transport; on host memory as those of `nvshmem:shm`. */
import {
  createWork,
  type Endpoint,
  EpError,
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
import {
  codeOfStatus,
  type NativeGpuOperand,
  type NativeGpuStream,
  type NativeGpuSymmetricMemory,
  type NativeNvshmemWorld,
  type NativeRankContext,
  native,
  type OperationId,
} from '@ep/native';
import {
  AdoptedDeviceMemory,
  checkLimits,
  checkRemote,
  checkSameSize,
  checkValue,
  DeviceMemory,
  type Liveness,
  nativeTimeout,
  RankMemory,
  runWait,
  signalWords,
  waitError,
} from '@ep/native/ranks';
import type { ShmEndpoint } from '../endpoint.js';
import type { NvshmemNeeds } from './probe.js';

export interface NvshmemEndpointInit {
  readonly peer: Rank;
  readonly host: ShmEndpoint;
  readonly world: NativeNvshmemWorld;
  readonly stream: NativeGpuStream;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly timeoutMs: number;
}

type Options = { readonly signal?: SignalUpdate<NvshmemNeeds> };

/** Requests of one transport run one after the other, so signals are of `prior` order whichever was asked for. */
export class NvshmemEndpoint extends Resource implements Endpoint<NvshmemNeeds> {
  readonly peer: Rank;
  readonly #init: NvshmemEndpointInit;
  readonly #owner: WorkOwner;
  #sequence = 0;

  constructor(init: NvshmemEndpointInit) {
    super(`endpoint to rank ${init.peer}`);
    this.peer = init.peer;
    this.#init = init;
    this.#owner = new WorkOwner(`endpoint to rank ${init.peer}`);
  }

  readonly put = (from: Region, to: RemoteRegion, options?: Options): Work => {
    this.#checkUsable('put');
    return this.#request({ kind: 'put', from, to, ...(options?.signal && { signal: options.signal }) });
  };

  readonly putValue = (to: RemoteRegion, value: bigint, options?: Options): Work => {
    this.#checkUsable('putValue');
    return this.#request({ kind: 'put-value', to, value, ...(options?.signal && { signal: options.signal }) });
  };

  readonly signal = (memory: SymmetricMemory, update: SignalUpdate<NvshmemNeeds>): Work => {
    this.#checkUsable('signal');
    return this.#request({ kind: 'signal', memory, signal: update });
  };

  readonly get = (from: RemoteRegion, to: Region): Work => {
    this.#checkUsable('get');
    if (from?.memory instanceof RankMemory) return this.#init.host.get(from, to);
    return this.#start('get', () => {
      const { world, stream } = this.#init;
      const source = this.#remote(from);
      const target = this.#local('get: the target', to);
      checkSameSize('get', from, to);
      return world.get(stream, source, this.peer, from.byteOffset, target, to.byteOffset, to.byteLength);
    });
  };

  readonly submit = (batch: readonly Request<NvshmemNeeds>[]): readonly Work[] => {
    this.#checkUsable('submit');
    if (!Array.isArray(batch))
      throw invalid('batch', { where: 'submit', expected: 'a list of requests', found: batch });
    return batch.map((request) => this.#request(request));
  };

  /** `EP_PEER_LOST` if the peer is dead: what was put there has landed in memory that nobody will read. */
  readonly flush = async (options?: WaitOptions): Promise<void> => {
    const { host, world, stream, liveness, timeoutMs, context } = this.#init;
    if (options !== undefined) checkLimits(options, 'flush', liveness.worldSize);
    options?.signal?.throwIfAborted();
    this.#checkUsable('flush');
    await host.flush(options);
    const limit = nativeTimeout(options, timeoutMs, 'flush');
    const wait = () => world.quiet(stream, limit);
    const outcome = await runWait(native().operations, wait, this.closing, options?.signal);
    if (outcome.status !== 0) {
      throw waitError('flush', outcome, {
        awaited: [this.peer],
        timeoutMs: limit,
        progress: `requests to rank ${this.peer} are under way`,
      });
    }
    this.#owner.check();
    if (liveness.isDead(this.peer) && context.life(this.peer) !== 0) {
      const lost = { lost: [this.peer] };
      throw liveness.notice(new EpError('EP_PEER_LOST', `flush: rank ${this.peer} died`, { context: lost }));
    }
  };

  protected override async release(): Promise<void> {
    await this.#owner.close();
  }

  #checkUsable(operation: string): void {
    this.checkOpen(operation);
    this.#owner.check();
  }

  #request(request: Request<NvshmemNeeds>): Work {
    const { host } = this.#init;
    switch (request?.kind) {
      case 'put':
        if (request.to?.memory instanceof RankMemory) return host.submit([request])[0]!;
        return this.#start('put', () => this.#put(request.from, request.to, request.signal));
      case 'put-value':
        if (request.to?.memory instanceof RankMemory) return host.submit([request])[0]!;
        return this.#start('putValue', () => this.#putValue(request.to, request.value, request.signal));
      case 'signal':
        if (request.memory instanceof RankMemory) return host.submit([request])[0]!;
        return this.#start('signal', () => this.#signal(request.memory, request.signal));
      default: {
        const found: unknown = (request as { kind?: unknown } | undefined)?.kind ?? request;
        return this.#start('submit', () => {
          throw invalid('kind', { where: 'submit', expected: 'put, put-value or signal', found });
        });
      }
    }
  }

  /** Whatever is wrong with a call is carried by its Work. */
  #start(op: string, begin: () => OperationId): Work {
    const control = createWork({ op, sequence: this.#sequence++, owner: this.#owner });
    try {
      native().operations.track(begin(), (outcome) => {
        if (outcome.status === 0) control.resolve();
        else {
          const why = outcome.message ?? 'cut off';
          control.reject(new EpError(codeOfStatus(outcome.status), `${op} to rank ${this.peer}: ${why}`));
        }
      });
    } catch (error) {
      control.reject(error);
    }
    return control.work;
  }

  #put(from: Region, to: RemoteRegion, update: SignalUpdate<NvshmemNeeds> | undefined): OperationId {
    const { world, stream } = this.#init;
    const target = this.#remote(to);
    const source = this.#local('put: the source', from);
    checkSameSize('put', from, to);
    const { op, slot, value } = signalWords(update);
    const { byteOffset } = from;
    return world.put(stream, target, this.peer, to.byteOffset, source, byteOffset, to.byteLength, op, slot, value);
  }

  #putValue(to: RemoteRegion, word: bigint, update: SignalUpdate<NvshmemNeeds> | undefined): OperationId {
    const { world, stream } = this.#init;
    const target = this.#remote(to);
    checkValue(word, to);
    const { op, slot, value } = signalWords(update);
    return world.putValue(stream, target, this.peer, to.byteOffset, to.byteLength, word, op, slot, value);
  }

  #signal(memory: SymmetricMemory, update: SignalUpdate<NvshmemNeeds>): OperationId {
    if (update === undefined)
      throw invalid('signal', { where: 'signal', expected: '{slot, op, value}', found: update });
    const { world, stream } = this.#init;
    const { op, slot, value } = signalWords(update);
    return world.signal(stream, this.#memory(memory), this.peer, op, slot, value);
  }

  #memory(memory: SymmetricMemory): NativeGpuSymmetricMemory {
    if (memory instanceof DeviceMemory && memory.context === this.#init.context) return memory.nativeMemory('endpoint');
    throw new EpError('EP_INVALID_ARGUMENT', 'the memory belongs to another transport');
  }

  #remote(region: RemoteRegion): NativeGpuSymmetricMemory {
    checkRemote(region, this.peer);
    return this.#memory(region.memory);
  }

  #local(what: string, region: Region): NativeGpuOperand {
    const memory: unknown = region?.memory;
    if (memory instanceof DeviceMemory) return memory.nativeMemory('endpoint');
    if (memory instanceof AdoptedDeviceMemory) {
      memory.region(region.byteOffset, region.byteLength);
      return memory.address;
    }
    if (typeof memory !== 'object' || memory === null) {
      throw invalid(what, { where: 'endpoint', expected: 'a region, which memory.local() makes', found: region });
    }
    throw new EpError('EP_UNSUPPORTED', `${what} must lie in memory of the GPU, as the other side does; copy it there`);
  }
}
