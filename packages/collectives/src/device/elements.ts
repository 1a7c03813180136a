/** Elements in device memory, with those members of a typed array that calls are checked by. */
import { type DeviceTensor, type DType, elementBytes, elementCount, invalid } from '@ep/core';
import { gpuPlaceOf, type NativeGpuOperand } from '@ep/native';

interface Place {
  readonly operand: NativeGpuOperand;
  /** From `operand` on. */
  readonly byteOffset: number;
}

/** Stands for all memory of a device where overlaps are looked for: there, offsets are addresses. */
const memories = new Map<number, object>();

function memoryOf(device: number): object {
  let made = memories.get(device);
  if (made === undefined) {
    made = Object.freeze({ device });
    memories.set(device, made);
  }
  return made;
}

/** Contiguous elements on a GPU. */
export class DeviceElements {
  readonly dtype: DType;
  /** Ordinal of the GPU. */
  readonly device: number;
  readonly address: bigint;
  readonly length: number;
  readonly BYTES_PER_ELEMENT: number;
  readonly place: Place;

  constructor(dtype: DType, device: number, address: bigint, length: number, place: Place) {
    this.dtype = dtype;
    this.device = device;
    this.address = address;
    this.length = length;
    this.BYTES_PER_ELEMENT = elementBytes(dtype);
    this.place = place;
  }

  get byteLength(): number {
    return this.length * this.BYTES_PER_ELEMENT;
  }

  get buffer(): object {
    return memoryOf(this.device);
  }

  get byteOffset(): number {
    return Number(this.address);
  }

  subarray(begin: number, end: number): DeviceElements {
    const skipped = begin * this.BYTES_PER_ELEMENT;
    const { operand, byteOffset } = this.place;
    return new DeviceElements(this.dtype, this.device, this.address + BigInt(skipped), end - begin, {
      operand,
      byteOffset: byteOffset + skipped,
    });
  }
}

const made = new WeakMap<DeviceTensor, DeviceElements>();

const isPacked = (strides: readonly number[], shape: readonly number[]): boolean => {
  let packed = 1;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    if (shape[axis] !== 1 && strides[axis] !== packed) return false;
    packed *= shape[axis]!;
  }
  return true;
};

/** Of a tensor that says where it lies; undefined for any other. Throws `EP_INVALID_ARGUMENT`. */
export function deviceElements(source: unknown, what: string, where: string): DeviceElements | undefined {
  const tensor = source as DeviceTensor | undefined;
  if (typeof tensor?.address !== 'bigint' || tensor.device === undefined) return undefined;
  const found = made.get(tensor);
  if (found !== undefined) return found;
  const { dtype, shape, strides, device, address } = tensor;
  if (device.kind !== 'cuda') throw invalid(what, { where, expected: 'a tensor of a GPU', found: device });
  const size = elementBytes(dtype);
  const length = elementCount(shape);
  if (strides !== undefined && !isPacked(strides, shape)) {
    throw invalid(what, { where, expected: 'contiguous', found: `strides ${strides} for shape ${shape}` });
  }
  if (address % BigInt(size) !== 0n) {
    throw invalid(what, { where, expected: `at a multiple of ${size} bytes`, found: `address ${address}` });
  }
  const place = gpuPlaceOf(tensor) ?? { operand: address, byteOffset: 0 };
  const elements = new DeviceElements(dtype, device.index, address, length, place);
  if (Object.isFrozen(tensor) && Object.isFrozen(shape)) made.set(tensor, elements);
  return elements;
}
