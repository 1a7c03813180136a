/** The memory of one call slot on this rank's side: what a dispatch writes besides the symmetric memory. Made at the slot's first use. */
import {
  createStorage,
  type DType,
  elementBytes,
  type Storage,
  type SymmetricMemory,
  type Tensor,
  tensor,
} from '@ep/core';
import { allocateHost, type NativeMoeBuffer, type NativeOperand, nativePlaceOf } from '@ep/native';
import { localExperts, scaledChannels } from '@ep/plan/moe';
import type { MoeDType, ResolvedMoe } from './options.js';
import { moeParts } from './place.js';
import type { HeldCall } from './received.js';
import { RoutingArrays } from './routing.js';

/** Native memory for so many elements, as the typed array of a dtype. */
export function hostStorage<D extends DType>(dtype: D, elements: number): Storage[D] {
  const Carrier = createStorage(dtype, 0).constructor as new (
    buffer: ArrayBuffer,
    byteOffset: number,
    length: number,
  ) => Storage[D];
  return new Carrier(allocateHost(Math.max(64, elements * elementBytes(dtype))), 0, elements);
}

export interface OperandPlace {
  readonly operand: NativeOperand;
  readonly offset: number;
}

export function placeOfStorage(storage: Storage[DType]): OperandPlace {
  const { operand, byteOffset } = nativePlaceOf(storage)!;
  return { operand, offset: byteOffset };
}

/** Of what a receive tensor is made. */
export function codesOf(moe: ResolvedMoe): { readonly codes: DType; readonly scale?: 'f32' | 'ue8m0' } {
  switch (moe.payload) {
    case 'f8e4m3+f32':
      return { codes: 'f8e4m3', scale: 'f32' };
    case 'f8e4m3+ue8m0':
      return { codes: 'f8e4m3', scale: 'ue8m0' };
    default:
      return { codes: moe.payload };
  }
}

export class CallSlot {
  readonly index: number;
  held: HeldCall | undefined;
  readonly #moe: ResolvedMoe;
  readonly #memory: SymmetricMemory;
  readonly #native: NativeMoeBuffer;
  readonly #locals: number;
  /** Rows that a receive tensor has room for. */
  readonly room: number;
  #routing: RoutingArrays | undefined;
  #report: RoutingArrays | undefined;
  #out: Storage[DType] | undefined;
  #scales: Storage[DType] | undefined;

  constructor(index: number, moe: ResolvedMoe, memory: SymmetricMemory, rank: number, native: NativeMoeBuffer) {
    this.index = index;
    this.#moe = moe;
    this.#memory = memory;
    this.#native = native;
    this.#locals = localExperts(moe.map, rank);
    this.room = moe.mode === 'low-latency' ? this.#locals * moe.worldSize * moe.maxTokens : moe.recvRows;
  }

  /** The slot's own routing. `kept`: a new one, which outlives the call. */
  routing(kept: boolean): RoutingArrays {
    if (kept) return new RoutingArrays(this.#native);
    this.#routing ??= new RoutingArrays(this.#native);
    return this.#routing;
  }

  /** Whose `ranks` and `waitNs` belong to the slot's call, whatever routing it goes by. */
  get report(): RoutingArrays {
    this.#report ??= this.routing(false);
    return this.#report;
  }

  /** Where a dispatch writes what does not arrive in place. */
  outputs(): { readonly out?: OperandPlace; readonly scales?: OperandPlace } {
    const { mode, hidden } = this.#moe;
    const { codes, scale } = codesOf(this.#moe);
    if (mode === 'low-latency') this.#out ??= hostStorage(codes, this.room * hidden);
    if (scale !== undefined) this.#scales ??= hostStorage(scale, this.room * Math.ceil(hidden / scaledChannels));
    return {
      ...(this.#out === undefined ? {} : { out: placeOfStorage(this.#out) }),
      ...(this.#scales === undefined ? {} : { scales: placeOfStorage(this.#scales) }),
    };
  }

  /** The received tensors of a call with so many rows. */
  tensors(rows: number): { readonly x: Tensor; readonly scales?: Tensor } {
    const { mode, hidden, worldSize, maxTokens } = this.#moe;
    const { codes, scale } = codesOf(this.#moe);
    const blocks = Math.ceil(hidden / scaledChannels);
    if (mode === 'low-latency') {
      const shape = [this.#locals, worldSize * maxTokens];
      const strides = [worldSize * maxTokens, 1, this.room];
      return {
        x: tensor(codes, [...shape, hidden], this.#out as Storage[typeof codes]),
        ...(scale === undefined
          ? {}
          : { scales: tensor(scale, [...shape, blocks], this.#scales as Storage[typeof scale], strides) }),
      };
    }
    const parts = moeParts(this.#moe);
    const rowElements = this.#moe.rowBytes / elementBytes(codes);
    const at = parts[0]! + this.index * parts[1]!;
    const x = this.#memory.view(codes, at, Math.max(0, rows * rowElements));
    return {
      x: tensor(codes, [rows, hidden], x, [rowElements, 1]),
      ...(scale === undefined
        ? {}
        : { scales: tensor(scale, [rows, blocks], this.#scales as Storage[typeof scale], [1, this.room]) }),
    };
  }

  /** Where experts may write the results of so many rows for their sources to read; nothing where a buffer has no such room. */
  results(rows: number): Tensor<MoeDType> | undefined {
    const { mode, hidden, worldSize, maxTokens, dtype, resultRowBytes, zeroCopyCombine } = this.#moe;
    if (!zeroCopyCombine) return undefined;
    const rowElements = resultRowBytes / elementBytes(dtype);
    const parts = moeParts(this.#moe);
    const data = this.#memory.view(dtype, parts[6]! + this.index * parts[7]!, rows * rowElements);
    if (mode === 'high-throughput') return tensor(dtype, [rows, hidden], data, [rowElements, 1]);
    const ofExpert = worldSize * maxTokens;
    return tensor(dtype, [this.#locals, ofExpert, hidden], data, [ofExpert * rowElements, rowElements, 1]);
  }

  /** Rows of the receive tensor, padding included: what a dispatch has written behind the blocks. */
  rowsOf(routing: RoutingArrays): number {
    return this.#moe.mode === 'low-latency' ? this.room : routing.blockStart[this.#locals]!;
  }
}
