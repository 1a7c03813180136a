/** Memory of the hostile transport: peers write into it through their engines; nobody sees another rank's bytes. */
import {
  type Comparison,
  checkAttached,
  checkInteger,
  type DType,
  EpError,
  elementBytes,
  formatRanks,
  invalid,
  type Rank,
  type Region,
  type RemoteRegion,
  Resource,
  type SignalPad,
  type SlotId,
  type Storage,
  type SymmetricMemory,
  viewStorage,
  type WaitOptions,
} from '@ep/core';
import { codeOfStatus, type NativeSymmetricMemory, native, registerWindow } from '@ep/native';

const COMPARISONS: readonly Comparison[] = ['eq', 'ne', 'lt', 'le', 'gt', 'ge'];
const LARGEST_WINDOW = 2 ** 32;
export interface HostileMemoryInit {
  readonly rank: Rank;
  readonly worldSize: number;
  readonly memory: NativeSymmetricMemory;
  readonly byteLength: number;
  readonly signalSlots: number;
  readonly timeoutMs: number;
  readonly onFailed: (error: EpError) => void;
  readonly onRelease: () => void;
}

class HostileSignalPad implements SignalPad {
  readonly slots: number;
  readonly #init: HostileMemoryInit;

  constructor(init: HostileMemoryInit) {
    this.slots = init.signalSlots;
    this.#init = init;
  }

  peek(slot: SlotId): bigint {
    return this.#init.memory.peek(slot);
  }

  async until(
    slot: SlotId,
    test: { readonly cmp: Comparison; readonly value: bigint },
    options: WaitOptions = {},
  ): Promise<bigint> {
    options.signal?.throwIfAborted();
    const { memory, rank, worldSize } = this.#init;
    const cmp = COMPARISONS.indexOf(test.cmp);
    if (cmp < 0) {
      throw invalid('cmp', { where: 'signal wait', expected: `one of ${COMPARISONS.join(', ')}`, found: test.cmp });
    }
    const seen = memory.waitTry(slot, cmp, test.value, true);
    if (seen !== undefined) return seen;
    const timeoutMs = options.timeoutMs ?? this.#init.timeoutMs;
    for (const peer of options.peers ?? []) checkInteger(peer, 'peer', 'signal wait', 0, worldSize - 1);
    const awaited = options.peers?.filter((peer) => peer !== rank);
    const { operations } = native();
    const end = await operations.run(
      () =>
        memory.waitWatch(
          slot,
          cmp,
          test.value,
          Number.isFinite(timeoutMs) ? timeoutMs : -1,
          awaited && Int32Array.from(awaited),
        ),
      options.signal,
    );
    if (end.status === 0) return end.found;
    const code = codeOfStatus(end.status);
    const lost = code === 'EP_PEER_LOST' && end.rank >= 0 ? [end.rank] : [];
    const who = lost.length > 0 ? lost : (options.peers ?? []);
    const why = {
      EP_TIMEOUT: `timed out after ${timeoutMs} ms`,
      EP_PEER_LOST: `${formatRanks(lost)} died or closed`,
      EP_CLOSED: 'the transport was closed while waiting',
    }[code as string];
    const error = new EpError(
      code,
      `signal slot ${slot} of rank ${rank}: ${why ?? 'cut off'}; awaited a value ${test.cmp} ${test.value}${who.length > 0 ? ` from ${formatRanks(who)}` : ''}, found ${end.found}`,
      { context: { awaited: options.peers ?? [], lost, expected: test.value, found: end.found, timeoutMs } },
    );
    if (lost.length > 0) this.#init.onFailed(error);
    throw error;
  }
}

export class HostileMemory extends Resource implements SymmetricMemory {
  readonly byteLength: number;
  readonly space = 'host' as const;
  readonly signals: SignalPad;
  readonly #init: HostileMemoryInit;
  readonly #windows = new Set<ArrayBuffer>();

  constructor(init: HostileMemoryInit) {
    super('hostile memory');
    this.#init = init;
    this.byteLength = init.byteLength;
    this.signals = new HostileSignalPad(init);
  }

  /** The addon's object; throws `EP_CLOSED` after close(). */
  nativeMemory(operation: string): NativeSymmetricMemory {
    this.checkOpen(operation);
    return this.#init.memory;
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
    this.checkOpen('view');
    const { memory, rank } = this.#init;
    const width = elementBytes(dtype);
    checkInteger(length, 'length', 'view');
    this.#checkBytes('view', byteOffset, length * width);
    if (byteOffset % width !== 0) {
      throw invalid('byteOffset', {
        where: 'view',
        expected: `a multiple of ${width} for ${dtype}`,
        found: byteOffset,
      });
    }
    if (length * width > LARGEST_WINDOW) {
      throw invalid('length', { where: 'view', expected: `at most ${LARGEST_WINDOW} bytes`, found: length * width });
    }
    const buffer = memory.window(rank, byteOffset, length * width);
    this.#windows.add(buffer);
    if (buffer.byteLength > 0) registerWindow(buffer, memory, byteOffset);
    return viewStorage(dtype, buffer, 0, length);
  }

  async read(from: Region, into: Uint8Array): Promise<void> {
    this.checkOpen('read');
    this.#checkOwn('read', from, into);
    this.#init.memory.getBytes(this.#init.rank, from.byteOffset, into);
  }

  async write(from: Uint8Array, into: Region): Promise<void> {
    this.checkOpen('write');
    this.#checkOwn('write', into, from);
    this.#init.memory.putBytes(this.#init.rank, into.byteOffset, from);
  }

  protected override release(): void {
    const { binding } = native();
    for (const buffer of this.#windows) binding.detach(buffer);
    this.#windows.clear();
    this.#init.memory.release();
    this.#init.onRelease();
  }

  #checkOwn(where: string, region: Region, bytes: Uint8Array): void {
    if (region.memory !== this)
      throw new EpError('EP_INVALID_ARGUMENT', `${where}: the region belongs to another memory`);
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
