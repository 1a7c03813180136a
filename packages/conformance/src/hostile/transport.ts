/** The hostile transport of one rank. */
import {
  type AdoptedMemory,
  type AllocateOptions,
  barrier,
  type Capabilities,
  checkInteger,
  type DeviceHandle,
  type Endpoint,
  EpError,
  exchange,
  formatRanks,
  invalid,
  type Rank,
  Resource,
  type Store,
  type SymmetricMemory,
  type Transport,
} from '@ep/core';
import { type NativeHostileEngine, type NativeRankContext, native } from '@ep/native';
import type { ResolvedHostileConfig } from './config.js';
import { HostileEndpoint } from './endpoint.js';
import { HostileMemory } from './memory.js';
import { type HostileNeeds, hostileCapabilities } from './probe.js';

/** `ep_segment_handle` in native/include/ep/abi/segment.h. */
export const SEGMENT_HANDLE_BYTES = 56;
const SIZES_BYTES = 16;

export interface HostileTransportInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly store: Store;
  readonly context: NativeRankContext;
  readonly engine: NativeHostileEngine;
  readonly config: ResolvedHostileConfig;
}

export class HostileTransport extends Resource implements Transport<HostileNeeds> {
  readonly name = 'hostile:engine';
  readonly rank: Rank;
  readonly worldSize: number;
  readonly capabilities: Capabilities = hostileCapabilities();
  readonly #init: HostileTransportInit;
  readonly #failed = new AbortController();
  readonly #endpoints = new Map<Rank, HostileEndpoint>();
  #allocations = 0;

  constructor(init: HostileTransportInit) {
    super('hostile transport');
    this.rank = init.rank;
    this.worldSize = init.worldSize;
    this.#init = init;
  }

  get failed(): AbortSignal {
    return this.#failed.signal;
  }

  /** What the engine did so far: tests make sure that it really delivered out of order. */
  counts(): { readonly landed: number; readonly overtakes: number; readonly pieces: number } {
    this.checkOpen('counts');
    return this.#init.engine.counts();
  }

  readonly allocate = (options: AllocateOptions): Promise<SymmetricMemory> =>
    this.guard('allocate', async () => {
      const byteLength = checkInteger(options.byteLength, 'byteLength', 'allocate');
      const slots = checkInteger(options.signalSlots, 'signalSlots', 'allocate', 0, this.capabilities.maxSignalSlots);
      if (options.space === 'device')
        throw new EpError('EP_UNSUPPORTED', 'allocate: the hostile transport has host memory only');
      if (options.near !== undefined && options.over === undefined)
        throw invalid('near', { where: 'allocate', expected: 'absent without over', found: options.near });
      if (options.over !== undefined || options.overFailure !== undefined)
        throw new EpError('EP_UNSUPPORTED', 'allocate: the hostile transport cannot register memory of another');
      options.signal?.throwIfAborted();
      return this.#allocate(byteLength, slots, options);
    });

  readonly adopt = async (_memory: {
    readonly address: bigint;
    readonly byteLength: number;
  }): Promise<AdoptedMemory> => {
    this.checkOpen('adopt');
    throw new EpError(
      'EP_UNSUPPORTED',
      'adopt: allocate() symmetric memory and let the data be written there, or copy it in',
    );
  };

  readonly connect = async (peer: Rank): Promise<Endpoint<HostileNeeds>> => {
    this.checkOpen('connect');
    checkInteger(peer, 'peer', 'connect', 0, this.worldSize - 1);
    let endpoint = this.#endpoints.get(peer);
    if (endpoint === undefined || endpoint.closed) {
      const { engine, config } = this.#init;
      endpoint = this.children.add(
        new HostileEndpoint({ peer, engine, timeoutMs: config.timeoutMs, onFailed: (error) => this.#fail(error) }),
      );
      this.#endpoints.set(peer, endpoint);
    }
    return endpoint;
  };

  readonly device = (memory: SymmetricMemory): DeviceHandle<HostileNeeds> => {
    this.checkOpen('device');
    if (!(memory instanceof HostileMemory))
      throw new EpError('EP_INVALID_ARGUMENT', 'device: the memory belongs to another transport');
    return { kind: 'memory:proxy', abi: native().binding.abi, bytes: memory.nativeMemory('device').deviceHandle() };
  };

  /** Endpoints have drained by now, so that the engine stops with nothing of JS under way. */
  protected override release(): void {
    this.#init.engine.close();
    this.#init.context.close();
  }

  async #allocate(byteLength: number, signalSlots: number, options: AllocateOptions): Promise<SymmetricMemory> {
    const { binding } = native();
    const { context, engine, config, store } = this.#init;
    const limits = {
      timeoutMs: options.timeoutMs ?? config.timeoutMs,
      ...(options.signal ? { signal: options.signal } : {}),
    };
    const meeting = { rank: this.rank, worldSize: this.worldSize, key: `hostile/allocate/${this.#allocations++}` };
    // A rank that cannot allocate still takes part: the others must hear why instead of waiting for it.
    let memory: InstanceType<typeof binding.SymmetricMemory> | undefined;
    let refusal: unknown;
    try {
      memory = new binding.SymmetricMemory(context, byteLength, signalSlots);
    } catch (error) {
      refusal = error;
    }
    const part = new Uint8Array(SIZES_BYTES + SEGMENT_HANDLE_BYTES);
    new Float64Array(part.buffer, 0, 2).set([byteLength, signalSlots]);
    if (memory) part.set(memory.handle(), SIZES_BYTES);
    const parts = await exchange(store, { ...meeting, bytes: part }, limits);
    const sizes = parts.map((bytes) => {
      const view = new DataView(bytes.buffer, bytes.byteOffset);
      return `${view.getFloat64(0, true)} bytes and ${view.getFloat64(8, true)} signal slots`;
    });
    const odd = sizes.flatMap((theirs, rank) => (theirs === sizes[this.rank] ? [] : [rank]));
    if (odd.length > 0) {
      memory?.release();
      throw new EpError(
        'EP_MISMATCH',
        `allocate: ranks differ; this rank: ${sizes[this.rank]}; ${odd.map((rank) => `rank ${rank}: ${sizes[rank]}`).join('; ')}`,
        { context: { odd } },
      );
    }
    if (refusal !== undefined) throw refusal;
    const without = parts.flatMap((bytes, rank) =>
      bytes.subarray(SIZES_BYTES).every((byte) => byte === 0) ? [rank] : [],
    );
    if (without.length > 0) {
      memory?.release();
      throw new EpError('EP_MEMORY_LIMIT', `allocate: ${formatRanks(without)} could not allocate ${byteLength} bytes`);
    }
    const handles = new Uint8Array(this.worldSize * SEGMENT_HANDLE_BYTES);
    for (const [rank, bytes] of parts.entries()) handles.set(bytes.subarray(SIZES_BYTES), rank * SEGMENT_HANDLE_BYTES);
    memory!.connect(handles);
    engine.attach(memory!);
    // Nobody may close its part, or die of it, before all have mapped it.
    await barrier(store, { ...meeting, key: `${meeting.key}/mapped` }, limits);
    const made: HostileMemory = new HostileMemory({
      rank: this.rank,
      worldSize: this.worldSize,
      memory: memory!,
      byteLength,
      signalSlots,
      timeoutMs: config.timeoutMs,
      onFailed: (error) => this.#fail(error),
      onRelease: () => this.children.remove(made),
    });
    if (!this.closed) this.children.add(made);
    return made;
  }

  #fail(error: EpError): void {
    if (!this.closed && !this.#failed.signal.aborted) this.#failed.abort(error);
  }
}
