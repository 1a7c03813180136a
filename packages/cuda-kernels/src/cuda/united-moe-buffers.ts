/** Buffers for experts of ranks that share a GPU and a process: one launch makes the call of all of them. */
import { type DeviceTensor, EpError, formatRanks, invalid, type Work } from '@ep/core';
import { type NativeGpuMoeUnion, native, type OperationId } from '@ep/native';
import type { MoeCallOptions } from '../moe/options.js';
import type { MoeHandle } from '../moe/received.js';
import { type BegunMoeCall, BOTH_HALVES } from './moe-begun.js';
import { DeviceMoeBuffer } from './moe-buffer.js';
import type {
  DeviceMoeCaptureCombineOptions,
  DeviceMoeCaptured,
  DeviceMoeCaptureOptions,
  DeviceMoeCombined,
  DeviceMoeCombineOptions,
  DeviceMoeDispatchOptions,
  DeviceMoeReceived,
} from './moe-received.js';
import type { CudaStream } from './stream.js';

/** What a rank gives to a dispatch of all: as `DeviceMoeBuffer.dispatch`. */
export interface UnitedMoeDispatch extends Pick<DeviceMoeDispatchOptions, 'activeRanks'> {
  /** [tokens, hidden]. */
  readonly x: DeviceTensor;
  /** `topK` experts for each token, -1 for none. */
  readonly choices: Int32Array;
}

/** What a rank gives to a combine of all: as `DeviceMoeBuffer.combine`. */
export interface UnitedMoeCombine extends Omit<DeviceMoeCombineOptions, keyof MoeCallOptions> {
  readonly y: DeviceTensor;
  readonly handle: MoeHandle;
}

/** As `DeviceMoeBuffer.captureDispatch`. */
export interface UnitedMoeCaptureDispatch {
  readonly x: DeviceTensor;
  /** i32 [tokens, topK] on the device. */
  readonly choices: DeviceTensor;
}

/** As `DeviceMoeBuffer.captureCombine`. */
export interface UnitedMoeCaptureCombine extends Omit<DeviceMoeCaptureCombineOptions, 'timeoutMs'> {
  readonly y: DeviceTensor;
  readonly handle: MoeHandle;
}

/** Of one launch: EP_CUDA_MOST_MOE_RANKS of native/cuda/table.h. */
const MOST_RANKS = 8;

/**
 * Joins buffers for experts of ranks that share this process and a GPU, so that one launch makes the low-latency calls of all of them. They stay what they are: each may make calls by itself
 * between those, and is closed by itself, which ends this. Throws `EP_INVALID_ARGUMENT`, which names the buffer, for other than 1 to 8 of them, one twice, other GPUs, modes, blocks or lanes, and buffers that
 * were not opened with each other.
 */
export function uniteMoeBuffers(buffers: readonly DeviceMoeBuffer[]): UnitedMoeBuffers {
  const where = 'uniteMoeBuffers';
  const given: readonly unknown[] = Array.isArray(buffers) ? buffers : [];
  const odd = given.findIndex((one) => !(one instanceof DeviceMoeBuffer));
  if (given.length === 0 || given.length > MOST_RANKS || odd >= 0) {
    const expected = `an array of 1 to ${MOST_RANKS} buffers that openDeviceMoeBuffer has opened`;
    const found = odd < 0 && Array.isArray(buffers) ? `${given.length} of them` : odd < 0 ? buffers : given[odd];
    throw invalid(odd < 0 ? 'buffers' : `buffers[${odd}]`, { where, expected, found });
  }
  const [first] = buffers as readonly [DeviceMoeBuffer];
  for (const [i, buffer] of buffers.entries()) {
    const differs = (expected: string, found: unknown): EpError => invalid(`buffers[${i}]`, { where, expected, found });
    if (buffers.indexOf(buffer) < i)
      throw differs('another one than those before it', `that of rank ${buffer.rank} again`);
    if (buffer.mode !== 'low-latency') throw differs('a buffer in low-latency mode', buffer.mode);
    const { device } = buffer.stream;
    const of = first.stream.device;
    if (device.index !== of.index)
      throw differs(`one of GPU ${of.index}, as buffers[0] is`, `one of GPU ${device.index}`);
    const [{ blocks, lanes }, shape] = [first.shape, buffer.shape];
    if (shape.blocks !== blocks || shape.lanes !== lanes) {
      const found = `${shape.blocks} of ${shape.lanes}`;
      throw differs(`one of ${blocks} blocks of ${lanes} lanes, as buffers[0] is (options blocks, lanes)`, found);
    }
  }
  const union = new (native().binding.GpuMoeUnion)(buffers.map((buffer) => buffer.nativeBuffer(where)));
  return new UnitedMoeBuffers([...buffers], union);
}

/**
 * Low-latency calls of several ranks of this process on one GPU, each launched as one kernel in which every rank has its own blocks. What a call means is what it means made by each
 * buffer for itself: slots, epochs, times and losses are those of each rank, and the bytes are the same. Ranks that are not among them make their part of a call by their own buffers.
 *
 * Launches go on the stream of the first buffer. Where buffers have streams of their own, a launch comes behind what lies on any of them, and what is put on any of them later comes behind it.
 */
export class UnitedMoeBuffers {
  /** In the order in which calls take what ranks give, and hand out. */
  readonly buffers: readonly DeviceMoeBuffer[];
  readonly #union: NativeGpuMoeUnion;
  readonly #stream: CudaStream;
  /** The other buffers' streams. */
  readonly #beside: readonly CudaStream[];

  /** Made by `uniteMoeBuffers`. */
  constructor(buffers: readonly DeviceMoeBuffer[], union: NativeGpuMoeUnion) {
    const [first, ...others] = new Set(buffers.map(({ stream }) => stream)) as Iterable<CudaStream> as [CudaStream];
    this.buffers = Object.freeze(buffers);
    this.#union = union;
    this.#stream = first;
    this.#beside = others;
  }

  /** Thread blocks of a launch, those of all ranks together; threads of a block; and how many such blocks the GPU runs at once. */
  get shape(): { readonly blocks: number; readonly lanes: number; readonly resident: number } {
    const { blocks, ...rest } = this.buffers[0]!.shape;
    return { blocks: blocks * this.buffers.length, ...rest };
  }

  /**
   * `DeviceMoeBuffer.dispatch` of every buffer, by one launch: `calls` has an element for each, in their order. Throws what any of them would throw, then nothing is launched and no call counts. How
   * each rank's call ends is its own: what comes back has a Work for each. `timeoutMs` is that of each rank, `signal` ends the calls of all of them.
   */
  dispatch(calls: readonly UnitedMoeDispatch[], options: MoeCallOptions = {}): readonly Work<DeviceMoeReceived>[] {
    const where = 'dispatch';
    const begun = this.#each(where, calls, (buffer, { x, choices, activeRanks }, named) => {
      if (!(choices instanceof Int32Array)) {
        throw invalid('choices', { where: named, expected: 'an Int32Array', found: choices });
      }
      return buffer.beginDispatch(x, choices, { ...options, ...(activeRanks && { activeRanks }) }, named);
    });
    return this.#run(where, begun, options, (halves) => this.#union.dispatch(this.#stream.nativeStream(where), halves));
  }

  /** `DeviceMoeBuffer.combine` of every buffer, by one launch, of calls that `dispatch` here or of the buffers themselves has begun. Otherwise as `dispatch`. */
  combine(calls: readonly UnitedMoeCombine[], options: MoeCallOptions = {}): readonly Work<DeviceMoeCombined>[] {
    const where = 'combine';
    const begun = this.#each(where, calls, (buffer, { y, handle, ...rest }, named) =>
      buffer.beginCombine(y, handle, { ...rest, ...options }, named),
    );
    return this.#run(where, begun, options, (halves) => this.#union.combine(this.#stream.nativeStream(where), halves));
  }

  /**
   * `DeviceMoeBuffer.captureDispatch` of every buffer, as one launch of the graph that their stream is being captured into: all of them were opened on it.
   */
  captureDispatch(
    calls: readonly UnitedMoeCaptureDispatch[],
    options: DeviceMoeCaptureOptions = {},
  ): readonly DeviceMoeCaptured[] {
    const where = 'captureDispatch';
    this.#checkOneStream(where);
    const begun = this.#each(where, calls, (buffer, { x, choices }, named) =>
      buffer.captures.beginDispatch(x, choices, named),
    );
    const halves = begun.map(({ half }) => half(BOTH_HALVES, options));
    this.#union.dispatch(this.#stream.nativeStream(where), halves);
    for (const { begun: counts } of begun) counts();
    return begun.map(({ ended }) => ended());
  }

  /** `DeviceMoeBuffer.captureCombine` of every buffer, as one launch of the graph. */
  captureCombine(calls: readonly UnitedMoeCaptureCombine[], options: DeviceMoeCaptureOptions = {}): void {
    const where = 'captureCombine';
    this.#checkOneStream(where);
    const begun = this.#each(where, calls, (buffer, { y, handle, ...rest }, named) =>
      buffer.captures.beginCombine(y, handle, rest, named),
    );
    const halves = begun.map(({ half }) => half(BOTH_HALVES, options));
    this.#union.combine(this.#stream.nativeStream(where), halves);
    for (const { ended } of begun) ended();
  }

  /** Begins the call of each buffer; `named` is what errors say of where. */
  #each<Call, Begun>(
    where: string,
    calls: readonly Call[],
    begin: (buffer: DeviceMoeBuffer, call: Call, named: string) => Begun,
  ): readonly Begun[] {
    const { length } = this.buffers;
    const given: readonly unknown[] = Array.isArray(calls) ? calls : [];
    const without = this.buffers.filter((_, i) => typeof given[i] !== 'object' || given[i] === null);
    if (without.length > 0 || given.length !== length) {
      const expected = `an array of ${length} objects, for ${formatRanks(this.buffers.map(({ rank }) => rank))}`;
      const lacks = without.length > 0 ? `, without ${formatRanks(without.map(({ rank }) => rank))}` : '';
      throw invalid('calls', { where, expected, found: Array.isArray(calls) ? `${given.length}${lacks}` : calls });
    }
    return this.buffers.map((buffer, i) => begin(buffer, calls[i]!, `${where}, rank ${buffer.rank}`));
  }

  #run<Half, Value>(
    where: string,
    begun: readonly BegunMoeCall<Half, Value>[],
    options: MoeCallOptions,
    launch: (halves: readonly Half[]) => readonly OperationId[],
  ): readonly Work<Value>[] {
    const captured = [this.#stream, ...this.#beside].some(({ capturing }) => capturing);
    if (captured) {
      const why =
        'a stream of these buffers is being captured: captureDispatch() and captureCombine() put calls into a graph';
      throw new EpError('EP_INVALID_ARGUMENT', `${where}: ${why}`);
    }
    const halves = begun.map(({ half }) => half(BOTH_HALVES, options));
    for (const other of this.#beside) this.#stream.wait(other.record());
    const operations = launch(halves);
    const works = begun.map(({ launched, follow }, i) => {
      launched();
      return follow(`${where}, rank ${this.buffers[i]!.rank}`, operations[i]!, options, this.#stream);
    });
    if (this.#beside.length > 0) {
      const after = this.#stream.record();
      for (const other of this.#beside) other.wait(after);
    }
    return works;
  }

  #checkOneStream(where: string): void {
    if (this.#beside.length === 0) return;
    const found = `${this.#beside.length + 1} streams`;
    const expected = 'opened on one stream, the one that is being captured';
    throw invalid('buffers', { where, expected, found });
  }
}
