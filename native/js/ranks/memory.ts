/** Symmetric memory whose own part lies in a shared segment; peers' parts are mapped, or reached by a NIC only. */
import {
  type Comparison,
  checkAttached,
  checkInteger,
  type DType,
  EpError,
  elementBytes,
  invalid,
  type PartAddresses,
  type Rank,
  type Region,
  type RemoteRegion,
  Resource,
  type SeenWord,
  type SignalPad,
  type SlotId,
  type Storage,
  type SymmetricMemory,
  turnLoopIfDue,
  viewStorage,
  type WaitOptions,
} from '@ep/core';
import { EP_LIFE_ABSENT } from '../abi.gen.js';
import type { NativeRankContext, NativeSymmetricMemory } from '../binding.js';
import { LARGEST_WINDOW, registerWindow } from '../host-memory.js';
import { native } from '../native.js';
import type { NativeLocal } from './adopted.js';
import { emptyPlace, type Liveness } from './liveness.js';
import { checkLimits, nativeTimeout, runWait, waitError } from './outcome.js';

const COMPARISONS: Record<Comparison, number> = { eq: 0, ne: 1, lt: 2, le: 3, gt: 4, ge: 5 };

export function comparisonCode(cmp: Comparison): number {
  if (typeof cmp !== 'string' || !Object.hasOwn(COMPARISONS, cmp)) {
    throw invalid('cmp', { where: 'wait', expected: `one of ${Object.keys(COMPARISONS).join(', ')}`, found: cmp });
  }
  return COMPARISONS[cmp];
}

export interface RankMemoryInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly context: NativeRankContext;
  readonly liveness: Liveness;
  readonly memory: NativeSymmetricMemory;
  readonly byteLength: number;
  readonly signalSlots: number;
  readonly timeoutMs: number;
  /** The part is that of a memory of another transport, whose waits these are. */
  readonly isOver?: boolean;
  /** Where the part lies, for other transports that can register it. */
  readonly addresses?: PartAddresses;
  /** Called once, when the memory is closed and before the native one is dropped. */
  readonly onRelease: (memory: NativeSymmetricMemory) => void;
}

/** The ranks, checked before, whose death ends a wait; undefined: any. An empty list is this rank alone, which cannot be lost to itself. */
export function awaitedRanks(
  options: WaitOptions | undefined,
  world: { readonly rank: Rank; readonly worldSize: number },
): Int32Array | undefined {
  const peers = options?.peers ?? undefined;
  if (peers === undefined) return undefined;
  return peers.length > 0 ? Int32Array.from(peers) : Int32Array.of(world.rank);
}

class RankSignalPad implements SignalPad {
  readonly slots: number;
  readonly #init: RankMemoryInit;
  readonly #closing: () => AbortSignal;

  constructor(init: RankMemoryInit, closing: () => AbortSignal) {
    this.slots = init.signalSlots;
    this.#init = init;
    this.#closing = closing;
  }

  peek(slot: SlotId): bigint {
    if (!(Number.isInteger(slot) && slot >= 0 && slot < this.slots)) this.#refuse('peek', slot);
    return this.#init.memory.peek(slot);
  }

  readonly hold = (seen: readonly SeenWord[]): boolean => {
    const slots = Float64Array.from(seen, ({ slot }) => slot);
    const values = BigUint64Array.from(seen, ({ value }) => value);
    return this.#init.memory.changedTry(slots, values);
  };

  #refuse(where: string, slot: unknown): never {
    const expected =
      this.slots === 0 ? 'none, the memory has no signal slots' : `an integer from 0 to ${this.slots - 1}`;
    throw invalid('slot', { where, expected, found: slot });
  }

  async until(
    slot: SlotId,
    test: { readonly cmp: Comparison; readonly value: bigint },
    options?: WaitOptions,
  ): Promise<bigint> {
    if (options !== undefined) checkLimits(options, 'until', this.#init.worldSize);
    options?.signal?.throwIfAborted();
    if (!(Number.isInteger(slot) && slot >= 0 && slot < this.slots)) this.#refuse('until', slot);
    if (typeof test?.value !== 'bigint') {
      throw invalid('test', {
        where: 'until',
        expected: '{cmp, value} with a bigint value',
        found: test?.value ?? test,
      });
    }
    const { memory, rank, liveness, timeoutMs: fallback } = this.#init;
    const where = `signal slot ${slot} of rank ${rank}`;
    const cmp = comparisonCode(test.cmp);
    const seen = memory.waitTry(slot, cmp, test.value, true);
    if (seen !== undefined) {
      await turnLoopIfDue();
      return seen;
    }
    const timeoutMs = nativeTimeout(options, fallback, where);
    const ranks = awaitedRanks(options, this.#init);
    const outcome = await runWait(
      native().operations,
      () => memory.waitWatch(slot, cmp, test.value, timeoutMs, ranks),
      this.#closing(),
      options?.signal,
    );
    if (outcome.status === 0) return outcome.found;
    const progress = `awaited a value ${test.cmp} ${test.value}, found ${outcome.found}`;
    const absent = liveness.isAbsent(outcome.rank);
    throw liveness.notice(waitError(where, outcome, { awaited: options?.peers ?? [], timeoutMs, progress, absent }));
  }
}

/** Operands of native calls behind the public interface; the package's own files use them. */
export class RankMemory extends Resource implements SymmetricMemory {
  readonly byteLength: number;
  readonly space: 'host' | 'device' = 'host';
  readonly signals: SignalPad;
  readonly addresses?: PartAddresses;
  readonly #init: RankMemoryInit;
  /** Windows handed out, by place: detached at close(), so that a use after it is inert. */
  readonly #windows = new Map<string | Rank, ArrayBuffer>();

  constructor(init: RankMemoryInit) {
    super('symmetric memory');
    this.#init = init;
    this.byteLength = init.byteLength;
    this.signals = new RankSignalPad(init, () => this.closing);
    if (init.addresses !== undefined) this.addresses = init.addresses;
  }

  /** Names the transport that this memory belongs to. */
  get context(): NativeRankContext {
    return this.#init.context;
  }

  get liveness(): Liveness {
    return this.#init.liveness;
  }

  get rank(): Rank {
    return this.#init.rank;
  }

  get worldSize(): number {
    return this.#init.worldSize;
  }

  /** Whether kernels store to some peers, and reach others by a NIC. */
  get isOver(): boolean {
    return this.#init.isOver ?? false;
  }

  /** Fires when `close()` begins: waits on words of this memory end with it. */
  get ending(): AbortSignal {
    return this.closing;
  }

  /** The addon's object; throws `EP_CLOSED` after close(). */
  nativeMemory(operation: string): NativeSymmetricMemory {
    this.checkOpen(operation);
    return this.#init.memory;
  }

  /** What requests of a NIC are sent from, and read into. */
  localOperand(operation: string): NativeLocal {
    return this.nativeMemory(operation);
  }

  local(byteOffset: number, byteLength: number): Region {
    this.checkOpen('local');
    this.#checkBytes('local region', byteOffset, byteLength);
    return Object.freeze({ memory: this, byteOffset, byteLength });
  }

  remote(peer: Rank, byteOffset: number, byteLength: number): RemoteRegion {
    this.checkOpen('remote');
    checkInteger(peer, 'peer', 'remote region', 0, this.#init.worldSize - 1);
    this.#checkBytes('remote region', byteOffset, byteLength);
    return Object.freeze({ memory: this, peer, byteOffset, byteLength });
  }

  view<D extends DType>(dtype: D, byteOffset: number, length: number): Storage[D] {
    return this.peerView(this.#init.rank, dtype, byteOffset, length);
  }

  /** Load/store access to a peer's part (OpenSHMEM's `shmem_ptr`). Detached by close() like every view. `EP_NOT_READY` where nobody is in the peer's place. */
  peerView<D extends DType>(peer: Rank, dtype: D, byteOffset: number, length: number): Storage[D] {
    this.checkOpen('view');
    const width = elementBytes(dtype);
    checkInteger(length, 'length', 'view');
    checkInteger(peer, 'peer', 'view', 0, this.#init.worldSize - 1);
    if (peer !== this.#init.rank && this.#init.context.life(peer) === EP_LIFE_ABSENT) throw emptyPlace('view', peer);
    this.#checkBytes('view', byteOffset, length * width);
    if (byteOffset % width !== 0) {
      throw invalid('byteOffset', {
        where: 'view',
        expected: `a multiple of ${width} for ${dtype}`,
        found: byteOffset,
      });
    }
    if (this.byteLength <= LARGEST_WINDOW) {
      return viewStorage(dtype, this.#window(peer, peer, 0, this.byteLength), byteOffset, length);
    }
    const place = `${peer}/${byteOffset}/${length * width}`;
    return viewStorage(dtype, this.#window(place, peer, byteOffset, length * width), 0, length);
  }

  async read(from: Region, into: Uint8Array): Promise<void> {
    const { memory } = this.#init;
    this.checkOpen('read');
    this.checkOwn('read', from, into);
    memory.getBytes(this.#init.rank, from.byteOffset, into);
  }

  async write(from: Uint8Array, into: Region): Promise<void> {
    const { memory } = this.#init;
    this.checkOpen('write');
    this.checkOwn('write', into, from);
    memory.putBytes(this.#init.rank, into.byteOffset, from);
  }

  protected override release(): void {
    const { binding } = native();
    for (const buffer of this.#windows.values()) binding.detach(buffer);
    this.#windows.clear();
    this.#init.onRelease(this.#init.memory);
    this.#init.memory.release();
  }

  #window(place: string | Rank, peer: Rank, byteOffset: number, byteLength: number): ArrayBuffer {
    const known = this.#windows.get(place);
    if (known !== undefined) return known;
    const buffer = this.#init.memory.window(peer, byteOffset, byteLength);
    this.#windows.set(place, buffer);
    if (peer === this.#init.rank && byteLength > 0) registerWindow(buffer, this.#init.memory, byteOffset);
    return buffer;
  }

  /** The region is this rank's own, and the bytes are as many. */
  protected checkOwn(where: string, region: Region, bytes: Uint8Array): void {
    if (region?.memory !== this) {
      throw new EpError('EP_INVALID_ARGUMENT', `${where}: the region belongs to another memory`);
    }
    if (!(bytes instanceof Uint8Array)) throw invalid('bytes', { where, expected: 'a Uint8Array', found: bytes });
    checkAttached(bytes, where);
    if (bytes.byteLength !== region.byteLength) {
      throw invalid('bytes', {
        where,
        expected: `${region.byteLength} bytes, as the region has`,
        found: bytes.byteLength,
      });
    }
  }

  #checkBytes(where: string, byteOffset: number, byteLength: number): void {
    checkInteger(byteOffset, 'byteOffset', where, 0, this.byteLength);
    checkInteger(byteLength, 'byteLength', where, 0, this.byteLength - byteOffset);
  }
}
