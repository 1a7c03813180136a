/** What a call reads on the device: checked before anything moves. */
import { checkInteger, type DeviceTensor, type DType, elementBytes, elementCount, invalid } from '@ep/core';
import { gpuPlaceOf, type NativeGpuOperand } from '@ep/native';

export interface DeviceSource {
  readonly operand: NativeGpuOperand;
  readonly byteOffset: number;
  readonly strideBytes: number;
}

export interface DeviceSourceSpec {
  readonly where: string;
  readonly dtype: DType;
  readonly rows: number;
  readonly rowShape: readonly number[];
  /** Where the tensor may have one axis more: rows of each block, and blocks follow each other. */
  readonly blockRows?: number;
  /** Ordinal of the GPU. */
  readonly device: number;
}

const equal = (a: readonly number[], b: readonly number[]): boolean =>
  a.length === b.length && a.every((extent, axis) => extent === b[axis]);

/** Elements from row to row. Rows must be packed in themselves: a device has nobody who would copy them together. */
function rowStride(source: Pick<DeviceTensor, 'shape' | 'strides'>, where: string): number {
  const inner = elementCount(source.shape.slice(1));
  if (source.strides === undefined) return inner;
  const { strides, shape } = source;
  let packed = 1;
  for (let axis = shape.length - 1; axis > 0; axis--) {
    if (shape[axis] !== 1 && strides[axis] !== packed) {
      throw invalid('strides', { where, expected: 'rows that are contiguous in themselves', found: strides });
    }
    packed *= shape[axis]!;
  }
  return checkInteger(strides[0] ?? inner, 'strides[0]', where, shape[0]! > 1 ? inner : 0);
}

/** [blocks, rows of each, …] as rows. */
function rowsOfBlocks(source: DeviceTensor, where: string): Pick<DeviceTensor, 'shape' | 'strides'> {
  const [blocks = 0, ofBlock = 0, ...rowShape] = source.shape;
  const shape = [blocks * ofBlock, ...rowShape];
  if (source.strides === undefined) return { shape };
  const [block, row, ...inner] = source.strides;
  if (blocks > 1 && block !== ofBlock * row!) {
    throw invalid('strides', { where, expected: 'blocks that follow each other', found: source.strides });
  }
  return { shape, strides: [row!, ...inner] };
}

/** Throws `EP_INVALID_ARGUMENT`. Tensors of others are given by their address: the addon asks the driver how far their memory goes. */
export function deviceSource(source: DeviceTensor | undefined, spec: DeviceSourceSpec): DeviceSource {
  const { where, rows, rowShape } = spec;
  if (source?.shape === undefined || typeof source.address !== 'bigint') {
    throw invalid('source', { where, expected: 'a tensor of a device', found: source });
  }
  if (source.dtype !== spec.dtype) throw invalid('dtype', { where, expected: spec.dtype, found: source.dtype });
  const { device } = source;
  if (device?.kind !== 'cuda' || device.index !== spec.device) {
    throw invalid('device', { where, expected: `GPU ${spec.device}`, found: device });
  }
  const { blockRows } = spec;
  const blocks = blockRows === undefined ? [] : [[rows / blockRows, blockRows, ...rowShape]];
  const shapes = [[rows, ...rowShape], [rows, elementCount(rowShape)], ...blocks];
  if (!Array.isArray(source.shape) || !shapes.some((shape) => equal(shape, source.shape))) {
    const expected = shapes.map((shape) => `[${shape.join(', ')}]`).join(' or ');
    throw invalid('shape', { where, expected, found: source.shape });
  }
  if (source.strides !== undefined && source.strides.length !== source.shape.length) {
    throw invalid('strides', { where, expected: 'one for each extent', found: source.strides });
  }
  const isBlocks = blocks.some((shape) => equal(shape, source.shape));
  const flat = isBlocks && source.shape.length > rowShape.length + 1 ? rowsOfBlocks(source, where) : source;
  const strideBytes = rowStride(flat, where) * elementBytes(source.dtype);
  const place = gpuPlaceOf(source);
  if (place !== undefined) return { operand: place.operand, byteOffset: place.byteOffset, strideBytes };
  return { operand: source.address, byteOffset: 0, strideBytes };
}

/** As `deviceSource`, of rows without gaps. */
export function packedSource(source: DeviceTensor | undefined, spec: DeviceSourceSpec): DeviceSource {
  const found = deviceSource(source, spec);
  if (spec.rows > 1 && found.strideBytes !== elementCount(spec.rowShape) * elementBytes(spec.dtype)) {
    throw invalid('strides', { where: spec.where, expected: 'packed rows', found: source?.strides });
  }
  return found;
}
