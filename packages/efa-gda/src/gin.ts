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
  type NativeEfaGin,
  type NativeEfaNic,
  type NativeHostStream,
  type NativeRankContext,
  native,
} from '@ep/native';
import {
  checkAgreement,
  checkLimits,
  nativeTimeout,
  RankMemory,
  type RankTeam,
  reportStep,
  runWait,
  waitError,
  withClosing,
} from '@ep/native/ranks';
import type { EfaNeeds } from './probe.js';

/** What `EfaTransport.openGin` makes; alike on all ranks. */
export interface GinOptions extends WaitOptions {
  /** Each takes a completion counter of the device; 0 to 1024. */
  readonly signals: number;
  /** Likewise. */
  readonly counters: number;
}

const mostIds = 1024;

export interface GinInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly nic: NativeEfaNic;
  readonly world: RankTeam;
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
  return withClosing(options, closing, (limits) => makeGin(init, signals, counters, limits));
}

async function makeGin(init: GinInit, signals: number, counters: number, options: WaitOptions): Promise<EfaGin> {
  const where = 'openGin';
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
    made = new (native().binding.EfaGin)(nic, { signals, counters });
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
  return new EfaGin(init, made!, signals, counters);
}

/**
 * A context of the GIN facade (`native/include/ep/device/efa_gin.h`). HAZARD: `close()` takes its queue pairs away: meet before it, and let no kernel use
 * the context after it.
 */
export class EfaGin extends Resource {
  readonly signals: number;
  readonly counters: number;
  readonly #init: GinInit;
  readonly #native: NativeEfaGin;

  /** By `EfaTransport.openGin`. */
  constructor(init: GinInit, made: NativeEfaGin, signals: number, counters: number) {
    super('GIN context');
    this.#init = init;
    this.#native = made;
    this.signals = signals;
    this.counters = counters;
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
   * The test of values of `native/include/ep/device/gin_putvalue.h`, for both ranks of a world of two at once, on a stream of its own. The context has a signal that was never
   * ticked, the memory begins with 80 bytes of zeros. Rejects with `EP_MISMATCH` where a signal came before its value.
   */
  readonly testValues = (memory: SymmetricMemory, rounds: number, options?: WaitOptions): Promise<ValuesOutcome> =>
    this.guard('testValues', async () => {
      const where = 'testValues';
      checkLimits(options, where, this.#init.worldSize);
      const timeoutMs = nativeTimeout(options, this.#init.timeoutMs, where);
      const description = { gin: this.#native, memory: this.#own(memory, where), rounds, timeoutMs };
      const { binding, operations } = native();
      const stream: NativeHostStream = new binding.HostStream(0);
      try {
        const start = () => stream.ginPutvalue(description);
        const outcome = await runWait(operations, start, this.closing, options?.signal);
        if (outcome.status === 0) return { behind: Number(outcome.found) };
        const progress = `expected ${outcome.expected}, found ${outcome.found}`;
        throw waitError(where, outcome, { timeoutMs, progress });
      } finally {
        stream.close();
      }
    });

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
