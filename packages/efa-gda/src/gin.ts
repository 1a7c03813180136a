/** Contexts of the GIN device API: signals and counters of their own, for kernels that put between memories of a transport. */
import {
  checkInteger,
  type DeviceHandle,
  EpError,
  invalid,
  type Rank,
  Resource,
  type SymmetricMemory,
  type WaitOptions,
} from '@ep/core';
import {
  EP_LIFE_ALIVE,
  type GinCall,
  type NativeEfaGin,
  type NativeEfaNic,
  type NativeHostStream,
  type NativeRankContext,
  native,
  type OperationId,
  type Outcome,
} from '@ep/native';
import { EP_EFA_SHARE_BLOCK, EP_EFA_SHARE_DEVICE, EP_EFA_SHARE_THREAD } from '@ep/native/abi';
import {
  checkAgreement,
  checkLimits,
  nativeTimeout,
  RankMemory,
  reportStep,
  runWait,
  type WorldTeam,
  waitError,
  withClosing,
} from '@ep/native/ranks';
import { GinProgram } from './gin-program.js';
import type { EfaNeeds } from './probe.js';

/**
 * Who may post in a context at a time: any lane of the device, the lanes of one block, or one lane. The narrower, the cheaper; a kernel that uses it more widely loses puts.
 */
export type GinSharing = 'device' | 'block' | 'thread';

const sharings: Readonly<Record<GinSharing, number>> = {
  device: EP_EFA_SHARE_DEVICE,
  block: EP_EFA_SHARE_BLOCK,
  thread: EP_EFA_SHARE_THREAD,
};

/** What `EfaTransport.openGin` makes; signals and counters alike on all ranks. */
export interface GinOptions extends WaitOptions {
  /** Each takes a completion counter of the device; 0 to 1024. */
  readonly signals: number;
  /** Likewise. */
  readonly counters: number;
  /** `device` unless given. */
  readonly sharing?: GinSharing;
}

const mostIds = 1024;

export interface GinInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly nic: NativeEfaNic;
  readonly world: WorldTeam;
  readonly timeoutMs: number;
  readonly onRelease: (gin: EfaGin) => void;
}

export interface ValuesOutcome {
  /** Rounds in which this rank saw the last value of a burst before another one. */
  readonly behind: number;
}

/** Collective over the world. Rejects with `EP_CAPACITY` on all ranks where one has too few counters or endpoints left. */
export async function openGin(init: GinInit, options: GinOptions, closing: AbortSignal): Promise<EfaGin> {
  const where = 'openGin';
  if (typeof options !== 'object' || options === null) {
    throw invalid('options', { where, expected: 'an object with signals and counters', found: options });
  }
  checkLimits(options, where, init.worldSize);
  const signals = checkInteger(options.signals, 'signals', where, 0, mostIds);
  const counters = checkInteger(options.counters, 'counters', where, 0, mostIds);
  const { sharing = 'device' } = options;
  if (!Object.hasOwn(sharings, sharing)) {
    throw invalid('sharing', { where, expected: 'device, block or thread', found: sharing });
  }
  return withClosing(options, closing, (limits) => makeGin(init, { signals, counters, sharing }, limits));
}

type GinShape = Required<Pick<GinOptions, 'signals' | 'counters' | 'sharing'>>;

async function makeGin(init: GinInit, shape: GinShape, options: WaitOptions): Promise<EfaGin> {
  const where = 'openGin';
  const { signals, counters, sharing } = shape;
  const { world, nic } = init;
  const asked = new Uint8Array(Uint32Array.of(signals, counters).buffer);
  checkAgreement(where, world, await world.allGather(asked, options), (bytes) => {
    const [ofSignals, ofCounters] = new Uint32Array(bytes.buffer, 0, 2);
    return `${ofSignals} signals and ${ofCounters} counters`;
  });
  // From here on a rank that fails still takes part: the others must hear of it instead of waiting for it.
  let made: NativeEfaGin | undefined;
  let address = new Uint8Array(nic.ginAddressBytes(signals));
  let failure: unknown;
  try {
    made = new (native().binding.EfaGin)(nic, { signals, counters, sharing: sharings[sharing] });
    address = made.address();
  } catch (error) {
    failure = error;
  }
  const step = (what: string) => ({ where, what, code: 'EP_CAPACITY' }) as const;
  try {
    const addresses = await reportStep(world, step('make a context'), address, failure, options);
    try {
      made!.connect(addresses);
    } catch (error) {
      failure = error;
    }
    // Also the barrier before which nobody may signal: all have made theirs.
    const done = Uint8Array.of(failure === undefined ? 1 : 0);
    await reportStep(world, step('reach the others'), done, failure, options);
  } catch (error) {
    made?.close();
    throw error;
  }
  return new EfaGin(init, made!, shape);
}

/**
 * A context of the GIN facade (`native/include/ep/device/efa_gin.h`). HAZARD: `close()` takes its queue pairs away: meet before it, and let no kernel use
 * the context after it.
 */
export class EfaGin extends Resource {
  readonly signals: number;
  readonly counters: number;
  readonly sharing: GinSharing;
  readonly #init: GinInit;
  readonly #native: NativeEfaGin;
  #running = 0;

  /** By `EfaTransport.openGin`. */
  constructor(init: GinInit, made: NativeEfaGin, shape: GinShape) {
    super('GIN context');
    this.#init = init;
    this.#native = made;
    this.signals = shape.signals;
    this.counters = shape.counters;
    this.sharing = shape.sharing;
  }

  /** What kernels hand to the facade: an `ep_efa_memory` that names this context. Valid until either of the two is closed. */
  device(memory: SymmetricMemory): DeviceHandle<EfaNeeds> {
    this.checkOpen('device');
    return { kind: 'gin:efa', abi: native().binding.abi, bytes: this.#native.memory(this.#own(memory, 'device')) };
  }

  /** Writes of peers, and of this rank to itself, that have arrived with the signal. */
  readSignal(id: number): bigint {
    this.checkOpen('readSignal');
    return this.#native.readSignal(checkInteger(id, 'signal', 'readSignal', 0, this.signals - 1));
  }

  /** Puts with the counter that have completed. */
  readCounter(id: number): bigint {
    this.checkOpen('readCounter');
    return this.#native.readCounter(checkInteger(id, 'counter', 'readCounter', 0, this.counters - 1));
  }

  /**
   * Carries the calls out, one after the other, as a kernel of one block on a stream of its own; resolves with what those that give a count gave, in their order. Ends with the first
   * that fails: `EP_INVALID_ARGUMENT` where an id, a rank or a range is none, before anything is posted for it; `EP_REMOTE_ACCESS`, `EP_PEER_LOST` or `EP_TRANSPORT_FAILED` where a queue
   * pair broke. Of a context that is not shared by the device one program runs at a time: `EP_BUSY`.
   * HAZARD: what no later call flushed, counted or signalled may still be under way when it resolves.
   */
  readonly run = (
    memory: SymmetricMemory,
    calls: readonly GinCall[],
    options?: WaitOptions,
  ): Promise<readonly bigint[]> =>
    this.guard('run', async () => {
      const where = 'run';
      const program = new GinProgram(calls, where);
      const part = this.#own(memory, where);
      const { context, timeoutMs } = this.#limits(options, where);
      const outcome = await this.#launch(where, options, (stream) =>
        this.#native.program(stream, part, program.memory, program.count, timeoutMs),
      );
      if (outcome.status === 0) return program.found();
      const { signals, counters } = this;
      throw program.error(where, outcome, {
        timeoutMs,
        life: (peer) => (peer < 0 ? EP_LIFE_ALIVE : context.life(peer)),
        limits: { signals, counters, worldSize: this.#init.worldSize, byteLength: memory.byteLength },
      });
    });

  /**
   * The test of values of `native/include/ep/device/gin_putvalue.h`, for both ranks of a world of two at once, on a stream of its own. The context has a signal that was never
   * ticked, the memory begins with 80 bytes of zeros. Rejects with `EP_MISMATCH` where a signal came before its value.
   */
  readonly testValues = (memory: SymmetricMemory, rounds: number, options?: WaitOptions): Promise<ValuesOutcome> =>
    this.guard('testValues', async () => {
      const where = 'testValues';
      const { timeoutMs } = this.#limits(options, where);
      const description = { gin: this.#native, memory: this.#own(memory, where), rounds, timeoutMs };
      const outcome = await this.#launch(where, options, (stream) => stream.ginPutvalue(description));
      if (outcome.status === 0) return { behind: Number(outcome.found) };
      const progress = `expected ${outcome.expected}, found ${outcome.found}`;
      throw waitError(where, outcome, { timeoutMs, progress });
    });

  #limits(options: WaitOptions | undefined, where: string) {
    checkLimits(options, where, this.#init.worldSize);
    return { context: this.#init.context, timeoutMs: nativeTimeout(options, this.#init.timeoutMs, where) };
  }

  /** HAZARD: lanes of two programs would post to one queue pair, which only the device's way of sharing has room for. */
  async #launch(
    where: string,
    options: WaitOptions | undefined,
    start: (stream: NativeHostStream) => OperationId,
  ): Promise<Outcome> {
    if (this.#running > 0 && this.sharing !== 'device') {
      throw new EpError('EP_BUSY', `${where}: a program runs in this context, which is shared by a ${this.sharing}`);
    }
    const { binding, operations } = native();
    const stream = new binding.HostStream(0);
    this.#running++;
    try {
      return await runWait(operations, () => start(stream), this.closing, options?.signal);
    } finally {
      this.#running--;
      stream.close();
    }
  }

  #own(memory: SymmetricMemory, where: string) {
    if (!(memory instanceof RankMemory) || memory.context !== this.#init.context) {
      throw new EpError('EP_INVALID_ARGUMENT', `${where}: the memory belongs to another transport`);
    }
    return memory.nativeMemory(where);
  }

  protected override release(): void {
    this.#native.close();
    this.#init.onRelease(this);
  }
}
