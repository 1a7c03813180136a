/** Device memory, and tensors that lie in it. */
import {
  checkAttached,
  checkInteger,
  type Device,
  type DeviceTensor,
  type DType,
  EpError,
  elementBytes,
  elementCount,
  invalid,
  Resource,
  type Storage,
  type SymmetricMemory,
} from '@ep/core';
import {
  type GpuCopier,
  type GpuPlace,
  gpuPlaceOf,
  type NativeGpuMemory,
  type NativeGpuOperand,
  type NativeGpuPinned,
  registerGpuTensor,
} from '@ep/native';
import { DeviceMemory } from '@ep/native/ranks';

export interface TensorPlace {
  /** Elements from row to row, where rows lie apart: those of the last axis. Blocks of them follow each other. */
  readonly rowElements?: number;
  readonly device: Device;
  readonly address: bigint;
  readonly place: GpuPlace;
}

function rowStrides(shape: readonly number[], rowElements: number): number[] {
  const strides = [rowElements, 1];
  for (let axis = shape.length - 2; axis > 0; axis--) strides.unshift(strides[0]! * shape[axis]!);
  return strides;
}

/** A tensor at a place in memory of ours. */
export function deviceTensor<D extends DType>(dtype: D, shape: readonly number[], at: TensorPlace): DeviceTensor<D> {
  const tensor: DeviceTensor<D> = Object.freeze({
    dtype,
    shape: Object.freeze([...shape]),
    ...(at.rowElements === undefined ? {} : { strides: Object.freeze(rowStrides(shape, at.rowElements)) }),
    address: at.address + BigInt(at.place.byteOffset),
    device: at.device,
  });
  registerGpuTensor(tensor, at.place);
  return tensor;
}

const pinned = new WeakMap<ArrayBufferLike, NativeGpuPinned>();

/** All of a piece of pinned memory as an array, which can be copied from and to. */
export function pinnedBytes(memory: NativeGpuPinned): Uint8Array<ArrayBuffer> {
  const buffer = memory.window();
  pinned.set(buffer, memory);
  return new Uint8Array(buffer);
}

/** Either end of a copy: a packed tensor of ours, or an array over pinned memory. */
export interface CopyEnd {
  readonly operand: NativeGpuOperand;
  readonly byteOffset: number;
  readonly byteLength: number;
}

export function copyEnd(end: DeviceTensor | ArrayBufferView, where: string): CopyEnd {
  if (ArrayBuffer.isView(end)) {
    const memory = pinned.get(end.buffer);
    if (memory === undefined) {
      throw invalid('array', {
        where,
        expected: 'one over memory of CudaDevice.pinned(): a GPU copies no other host memory while JS goes on',
        found: end,
      });
    }
    return { operand: memory, byteOffset: end.byteOffset, byteLength: end.byteLength };
  }
  const { operand, byteOffset } = packedPlace(end, where);
  return { operand, byteOffset, byteLength: bytesOf(end) };
}

const bytesOf = (tensor: DeviceTensor): number => elementCount(tensor.shape) * elementBytes(tensor.dtype);

function ownPlace(tensor: DeviceTensor, where: string): GpuPlace {
  const place = gpuPlaceOf(tensor);
  if (place === undefined) {
    throw new EpError('EP_UNSUPPORTED', `${where}: the tensor lies in memory of others; copy it with what owns it`);
  }
  return place;
}

function packedPlace(tensor: DeviceTensor, where: string): GpuPlace {
  const place = ownPlace(tensor, where);
  if (tensor.strides === undefined) return place;
  throw new EpError('EP_UNSUPPORTED', `${where}: the rows of the tensor lie apart, and copies are of one run of bytes`);
}

/** Where the rows of a tensor of ours lie, if they lie apart. */
function rowsApart({ shape, strides, dtype }: DeviceTensor) {
  const rows = elementCount(shape.slice(0, -1));
  if (strides === undefined || rows === 0) return undefined;
  const size = elementBytes(dtype);
  return { rows, rowBytes: shape.at(-1)! * size, strideBytes: strides.at(-2)! * size };
}

/** Copies a tensor of ours out of the device, packed. */
export async function readTensor(tensor: DeviceTensor): Promise<Uint8Array<ArrayBuffer>> {
  const { operand, byteOffset, copier } = ownPlace(tensor, 'readTensor');
  const bytes = new Uint8Array(bytesOf(tensor));
  const apart = rowsApart(tensor);
  if (apart === undefined) {
    await copier.read(operand, byteOffset, bytes);
    return bytes;
  }
  const { rows, rowBytes, strideBytes } = apart;
  const extent = new Uint8Array((rows - 1) * strideBytes + rowBytes);
  await copier.read(operand, byteOffset, extent);
  for (let row = 0; row < rows; row++) {
    bytes.set(extent.subarray(row * strideBytes, row * strideBytes + rowBytes), row * rowBytes);
  }
  return bytes;
}

/** Copies into a tensor of ours, rows that lie apart one by one. HAZARD: at once, whatever streams do: what still reads the tensor must have ended. */
export async function writeTensor(bytes: Storage[DType], tensor: DeviceTensor): Promise<void> {
  const { operand, byteOffset, copier } = ownPlace(tensor, 'writeTensor');
  checkAttached(bytes, 'writeTensor');
  if (bytes.byteLength !== bytesOf(tensor)) {
    throw invalid('bytes', { where: 'writeTensor', expected: `${bytesOf(tensor)} bytes`, found: bytes.byteLength });
  }
  const source = new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const apart = rowsApart(tensor);
  if (apart === undefined) return copier.write(source, operand, byteOffset);
  const { rows, rowBytes, strideBytes } = apart;
  for (let row = 0; row < rows; row++) {
    await copier.write(source.subarray(row * rowBytes, (row + 1) * rowBytes), operand, byteOffset + row * strideBytes);
  }
}

function checkFit(dtype: DType, shape: readonly number[], byteOffset: number, byteLength: number, where: string): void {
  const width = elementBytes(dtype);
  checkInteger(byteOffset, 'byteOffset', where, 0, byteLength);
  if (byteOffset % width !== 0) {
    throw invalid('byteOffset', { where, expected: `a multiple of ${width}`, found: byteOffset });
  }
  checkInteger(elementCount(shape) * width, 'bytes of the shape', where, 0, byteLength - byteOffset);
}

/**
 * A packed tensor that begins `byteOffset` bytes into this rank's part of symmetric device memory. What a software NIC sends for kernels of a GPU has to lie there. Throws
 * `EP_UNSUPPORTED` for memory of the host.
 */
export function symmetricTensor<D extends DType>(
  memory: SymmetricMemory,
  dtype: D,
  shape: readonly number[],
  byteOffset = 0,
): DeviceTensor<D> {
  const where = 'symmetricTensor';
  if (!(memory instanceof DeviceMemory)) {
    throw new EpError('EP_UNSUPPORTED', `${where}: the memory is none that a transport allocated in space 'device'`);
  }
  checkFit(dtype, shape, byteOffset, memory.byteLength, where);
  const { copier, rank } = memory;
  return deviceTensor(dtype, shape, {
    device: Object.freeze({ kind: 'cuda', index: memory.device }),
    address: memory.address(rank),
    place: { operand: memory.nativeMemory(where), byteOffset, copier },
  });
}

/**
 * Part of a packed tensor as a tensor, of the same dtype and memory: `shape`, which begins `elementOffset` elements into it. So the rows of one expert can be read, copied or handed on. One of ours
 * stays one of ours, with all that this may do; one of others is an address, as before. Throws `EP_INVALID_ARGUMENT` for what reaches behind the tensor, `EP_UNSUPPORTED` for one whose rows lie apart.
 */
export function viewTensor<D extends DType>(
  tensor: DeviceTensor<D>,
  shape: readonly number[],
  elementOffset = 0,
): DeviceTensor<D> {
  const where = 'viewTensor';
  if (typeof tensor?.address !== 'bigint') {
    throw invalid('tensor', { where, expected: 'a tensor of a device', found: tensor });
  }
  const { dtype, device, address } = tensor;
  if (tensor.strides !== undefined) {
    throw new EpError('EP_UNSUPPORTED', `${where}: the rows of the tensor lie apart, and views are of packed ones`);
  }
  const wanted = elementCount(shape);
  for (const extent of shape) checkInteger(extent, 'extent of the shape', where, 0);
  const elements = elementCount(tensor.shape);
  checkInteger(elementOffset, 'elementOffset', where, 0, elements);
  checkInteger(wanted, 'elements of the shape', where, 0, elements - elementOffset);
  const bytes = elementOffset * elementBytes(dtype);
  const place = gpuPlaceOf(tensor);
  if (place === undefined) {
    return Object.freeze({ dtype, shape: Object.freeze([...shape]), address: address + BigInt(bytes), device });
  }
  const byteOffset = place.byteOffset + bytes;
  return deviceTensor(dtype, shape, {
    device,
    address: address - BigInt(place.byteOffset),
    place: { ...place, byteOffset },
  });
}

export interface CudaBufferInit {
  readonly memory: NativeGpuMemory;
  readonly byteLength: number;
  readonly device: Device;
  readonly copier: GpuCopier;
}

/** Device memory of one rank, zeroed if this process allocated it. Freed by `close()`, once no kernel uses it any more. */
export class CudaBuffer extends Resource {
  readonly byteLength: number;
  readonly address: bigint;
  readonly device: Device;
  readonly #init: CudaBufferInit;

  constructor(init: CudaBufferInit) {
    super('device memory');
    this.#init = init;
    this.byteLength = init.byteLength;
    this.device = Object.freeze({ kind: init.device.kind, index: init.device.index });
    this.address = init.memory.address();
  }

  /** The addon's object. @internal */
  get operand(): NativeGpuMemory {
    this.checkOpen('operand');
    return this.#init.memory;
  }

  /** A packed tensor that begins `byteOffset` bytes into this memory. */
  tensor<D extends DType>(dtype: D, shape: readonly number[], byteOffset = 0): DeviceTensor<D> {
    this.checkOpen('tensor');
    checkFit(dtype, shape, byteOffset, this.byteLength, 'tensor');
    const { memory, copier } = this.#init;
    return deviceTensor(dtype, shape, {
      device: this.device,
      address: this.address,
      place: { operand: memory, byteOffset, copier },
    });
  }

  protected override release(): void {
    this.#init.memory.release();
  }
}
