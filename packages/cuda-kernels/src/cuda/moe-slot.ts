/** The memory of one call slot of a buffer on a GPU, all of it made when the buffer is opened. */
import { type Device, type DeviceTensor, type DType, elementBytes, type Rank } from '@ep/core';
import { type NativeGpuMoeBuffer, type NativeGpuOperand, native } from '@ep/native';
import type { DeviceMemory } from '@ep/native/ranks';
import { localExperts, scaledChannels } from '@ep/plan/moe';
import type { ResolvedMoe } from '../moe/options.js';
import { moeParts } from '../moe/place.js';
import type { HeldCall } from '../moe/received.js';
import { codesOf } from '../moe/slot.js';
import { CudaBuffer, deviceTensor, pinnedBytes } from './buffer.js';
import type { DeviceMoeCaptured } from './moe-received.js';
import { DeviceRouting } from './moe-routing.js';

export interface DeviceMoePlace {
  readonly rank: Rank;
  readonly moe: ResolvedMoe;
  readonly memory: DeviceMemory;
  readonly native: NativeGpuMoeBuffer;
}

/** Zeroed pinned memory: JS and kernels see the same bytes. */
export interface Pinned {
  readonly operand: NativeGpuOperand;
  readonly bytes: ArrayBuffer;
}

/** HAZARD: page-locking may wait for kernels that run, and a peer's may wait for this rank: only while none can. */
export function pinnedMemory({ library, device }: DeviceMemory, byteLength: number): Pinned {
  const operand = new (native().binding.GpuPinned)(library, device, Math.max(64, byteLength));
  return { operand, bytes: pinnedBytes(operand).buffer };
}

export class DeviceMoeSlot {
  readonly index: number;
  held: HeldCall | undefined;
  /** Of the call that is held, or was last: it is over. */
  ended: () => void = () => {};
  readonly routing: DeviceRouting;
  readonly weights: Pinned;
  /** Rows that a receive tensor has room for. */
  readonly room: number;
  readonly out: CudaBuffer | undefined;
  readonly scales: CudaBuffer | undefined;
  readonly #init: DeviceMoePlace;
  readonly #locals: number;
  readonly #device: Device;

  constructor(index: number, init: DeviceMoePlace) {
    const { moe, memory, rank } = init;
    const { mode, hidden, worldSize, maxTokens, topK } = moe;
    const { codes, scale } = codesOf(moe);
    this.index = index;
    this.#init = init;
    this.#locals = localExperts(moe.map, rank);
    this.#device = Object.freeze({ kind: 'cuda', index: memory.device });
    this.room = mode === 'low-latency' ? this.#locals * worldSize * maxTokens : moe.recvRows;
    this.routing = new DeviceRouting(init.native, memory);
    this.weights = pinnedMemory(memory, maxTokens * topK * Float32Array.BYTES_PER_ELEMENT);
    const allocate = (dtype: DType, elements: number): CudaBuffer => {
      const byteLength = Math.max(64, elements * elementBytes(dtype));
      const block = new (native().binding.GpuMemory)(memory.library, memory.device, byteLength);
      return new CudaBuffer({ memory: block, byteLength, device: this.#device, copier: memory.copier });
    };
    this.out = mode === 'low-latency' ? allocate(codes, this.room * hidden) : undefined;
    this.scales = scale === undefined ? undefined : allocate(scale, this.room * Math.ceil(hidden / scaledChannels));
  }

  /** The received tensors of a call with so many rows. */
  tensors(rows: number): { readonly x: DeviceTensor; readonly scales?: DeviceTensor } {
    const { moe } = this.#init;
    const { mode, hidden, worldSize, maxTokens } = moe;
    const { codes, scale } = codesOf(moe);
    const blocks = Math.ceil(hidden / scaledChannels);
    return {
      x:
        mode === 'low-latency'
          ? this.out!.tensor(codes, [this.#locals, worldSize * maxTokens, hidden])
          : this.#inPlace(codes, [rows, hidden], 0, moe.rowBytes),
      ...(scale === undefined ? {} : { scales: this.scales!.tensor(scale, [blocks, this.room]) }),
    };
  }

  /** Rows of the receive tensor, padding included: what a dispatch has written behind the blocks. */
  rowsOf(routing: DeviceRouting): number {
    return this.#init.moe.mode === 'low-latency' ? this.room : routing.blockStart[this.#locals]!;
  }

  /** Where experts may write the results of so many rows for their sources to read; nothing where a buffer has no such room. */
  results(rows: number): DeviceTensor | undefined {
    const { mode, hidden, worldSize, maxTokens, dtype, resultRowBytes, zeroCopyCombine } = this.#init.moe;
    if (!zeroCopyCombine) return undefined;
    const shape = mode === 'low-latency' ? [this.#locals, worldSize * maxTokens, hidden] : [rows, hidden];
    return this.#inPlace(dtype, shape, 3, resultRowBytes);
  }

  /** What a captured dispatch leaves on the device, besides the rows. */
  captured(
    routing: DeviceRouting,
  ): Pick<DeviceMoeCaptured, 'counts' | 'blockStart' | 'layoutRange' | 'sourceToken' | 'sourceChoice'> {
    return {
      counts: routing.tensor('i32', 6, [this.#locals]),
      blockStart: routing.tensor('i32', 7, [this.#locals + 1]),
      layoutRange: routing.tensor('i64', 8, [this.#locals, this.#init.moe.worldSize]),
      sourceToken: routing.tensor('i32', 9, [this.room]),
      sourceChoice: routing.tensor('i32', 10, [this.room]),
    };
  }

  async close(): Promise<void> {
    await this.out?.close();
    await this.scales?.close();
    await this.routing.close();
  }

  /** A tensor in this slot of a part of the symmetric memory, its rows so many bytes from each other. */
  #inPlace(dtype: DType, shape: readonly number[], part: number, rowBytes: number): DeviceTensor {
    const { moe, memory, rank } = this.#init;
    const parts = moeParts(moe);
    const byteOffset = parts[2 * part]! + this.index * parts[2 * part + 1]!;
    const rowElements = rowBytes / elementBytes(dtype);
    const operand = memory.nativeMemory('tensors');
    return deviceTensor(dtype, shape, {
      ...(rowElements === moe.hidden ? {} : { rowElements }),
      ...{ device: this.#device, address: memory.address(rank) },
      place: { operand, byteOffset, copier: memory.copier },
    });
  }
}
