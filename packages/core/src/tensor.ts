/** Tensors in host memory: a dtype, a shape, and rows that may lie apart. */
import { checkAttached } from './buffers.js';
import { createStorage, type DType, elementBytes, isStorageOf, type Storage } from './dtype.js';
import { checkInteger, checkObject, invalid } from './errors.js';

/**
 * `data[sum(index[i] * strides[i])]` is the element at `index`. Strides count elements, are not negative, and are those of row-major order if
 * absent. `data` starts at the first element and may be longer than the tensor.
 */
export interface Tensor<D extends DType = DType> {
  readonly dtype: D;
  readonly shape: readonly number[];
  readonly strides?: readonly number[];
  readonly data: Storage[D];
}

/** Elements, not bytes. */
export function elementCount(shape: readonly number[]): number {
  if (!Array.isArray(shape))
    throw invalid('shape', { where: 'elementCount', expected: 'an array of extents', found: shape });
  let count = 1;
  for (let axis = 0; axis < shape.length; axis++) count *= shape[axis]!;
  return count;
}

/** Two comparisons, because every dispatch asks; `tensor` and `asTensor` are what checks a tensor. */
function checkForm(source: Pick<Tensor, 'shape' | 'strides'>, where: string): void {
  if (!Array.isArray(source?.shape)) {
    throw invalid('tensor', { where, expected: 'an object with dtype, shape and data', found: source });
  }
  if (source.strides !== undefined && !Array.isArray(source.strides)) {
    throw invalid('strides', { where, expected: 'an array of strides, one per axis', found: source.strides });
  }
}

function rowMajor(shape: readonly number[]): number[] {
  const strides = new Array<number>(shape.length);
  let step = 1;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    strides[axis] = step;
    step *= shape[axis]!;
  }
  return strides;
}

function stridesOf(tensor: Pick<Tensor, 'shape' | 'strides'>): readonly number[] {
  return tensor.strides ?? rowMajor(tensor.shape);
}

/** Elements from the first to behind the last that the tensor touches; 0 for an empty tensor. */
function extentOf({ shape, strides }: Pick<Tensor, 'shape' | 'strides'>): number {
  const count = elementCount(shape);
  if (count === 0 || strides === undefined) return count;
  let end = 1;
  for (let axis = 0; axis < shape.length; axis++) end += strides[axis]! * (shape[axis]! - 1);
  return end;
}

/**
 * A checked, frozen tensor. `data` is zeroed storage if absent. Throws `EP_INVALID_ARGUMENT` for extents or strides that are not safe
 * integers, for data of another carrier or shorter than shape and strides reach, and `EP_DETACHED` for a buffer that is gone.
 */
export function tensor<D extends DType>(
  dtype: D,
  shape: readonly number[],
  data?: Storage[D],
  strides?: readonly number[],
): Tensor<D> {
  const bytes = elementBytes(dtype);
  const where = `tensor ${dtype}`;
  if (!Array.isArray(shape)) throw invalid('shape', { where, expected: 'an array of extents', found: shape });
  shape.forEach((extent, axis) => {
    checkInteger(extent, `shape[${axis}]`, where);
  });
  checkInteger(elementCount(shape) * bytes, 'byte length', where);
  if (strides !== undefined) {
    if (!Array.isArray(strides) || strides.length !== shape.length) {
      throw invalid('strides', {
        where,
        expected: `an array of ${shape.length} strides, one per axis`,
        found: strides,
      });
    }
    strides.forEach((stride, axis) => {
      checkInteger(stride, `strides[${axis}]`, where);
    });
  }
  const layout = { shape: Object.freeze([...shape]), ...(strides && { strides: Object.freeze([...strides]) }) };
  const extent = checkInteger(extentOf(layout), 'extent of shape and strides', where);
  const storage = data ?? createStorage(dtype, extent);
  if (!isStorageOf(dtype, storage)) {
    throw invalid('data', {
      where,
      expected: `the carrier of ${dtype}, ${createStorage(dtype, 0)[Symbol.toStringTag]}`,
      found: storage,
    });
  }
  checkAttached(storage, where);
  if (storage.length < extent) {
    throw invalid('data', {
      where,
      expected: `at least ${extent} elements for shape [${shape.join(', ')}]${strides ? ` and strides [${strides.join(', ')}]` : ''}`,
      found: storage.length,
    });
  }
  return Object.freeze({ dtype, ...layout, data: storage });
}

/** Typed arrays whose dtype is plain to see. Uint8Array and Uint16Array are not among them: they also carry raw floats. */
export type PlainArray =
  | Float64Array
  | Float32Array
  | BigInt64Array
  | BigUint64Array
  | Int32Array
  | Uint32Array
  | Int16Array
  | Int8Array;

const PLAIN_DTYPES: Readonly<Record<string, DType>> = {
  Float64Array: 'f64',
  Float32Array: 'f32',
  BigInt64Array: 'i64',
  BigUint64Array: 'u64',
  Int32Array: 'i32',
  Uint32Array: 'u32',
  Int16Array: 'i16',
  Int8Array: 'i8',
};

/** A plain typed array as a tensor of one axis (no copy); a tensor is checked again, because nothing keeps callers from writing one by hand. */
export function asTensor(source: Tensor | PlainArray, where: string): Tensor {
  if (ArrayBuffer.isView(source)) {
    const dtype = PLAIN_DTYPES[source[Symbol.toStringTag]];
    if (dtype !== undefined) return tensor(dtype, [source.length], source);
    throw invalid('array', {
      where,
      expected:
        'one whose dtype is plain; Uint8Array may hold u8, f8e4m3, f8e5m2 or ue8m0 and Uint16Array u16, f16 or bf16: say which with tensor(dtype, shape, data)',
      found: source,
    });
  }
  if (typeof source !== 'object' || source === null) {
    throw invalid('tensor', { where, expected: 'a tensor or a typed array', found: source });
  }
  checkAttached(source.data, where);
  return tensor(source.dtype, source.shape, source.data, source.strides);
}

/** Columns and rows to take; extents in elements. */
export interface RowsWindow {
  readonly firstColumn?: number;
  readonly columns: number;
  readonly firstRow?: number;
  readonly rows?: number;
}

/**
 * Some columns (and rows) of a matrix, without a copy: Q, K and V of one projection `[tokens, q + k + v]` are three windows on it, whose rows
 * lie a whole projection row apart.
 */
export function rowsOf<D extends DType>(matrix: Tensor<D>, window: RowsWindow): Tensor<D> {
  const where = 'rowsOf';
  checkForm(matrix, where);
  checkObject(window, 'window', 'an object with columns', where);
  if (matrix.shape.length !== 2)
    throw invalid('tensor', { where, expected: 'a matrix of 2 axes', found: matrix.shape });
  const [height, width] = matrix.shape as readonly [number, number];
  const [rowStride, columnStride] = stridesOf(matrix) as readonly [number, number];
  const firstColumn = checkInteger(window.firstColumn ?? 0, 'firstColumn', where, 0, width);
  const columns = checkInteger(window.columns, 'columns', where, 0, width - firstColumn);
  const firstRow = checkInteger(window.firstRow ?? 0, 'firstRow', where, 0, height);
  const rows = checkInteger(window.rows ?? height - firstRow, 'rows', where, 0, height - firstRow);
  checkAttached(matrix.data, where);
  const begin = rows * columns === 0 ? 0 : firstRow * rowStride + firstColumn * columnStride;
  const data = matrix.data.subarray(begin) as Storage[D];
  return tensor(matrix.dtype, [rows, columns], data, [rowStride, columnStride]);
}

/** True if the elements lie in row-major order without gaps. Strides of axes of extent 1, and of empty tensors, do not matter. */
export function isContiguous(source: Pick<Tensor, 'shape' | 'strides'>): boolean {
  checkForm(source, 'isContiguous');
  if (source.strides === undefined || elementCount(source.shape) === 0) return true;
  const wanted = rowMajor(source.shape);
  return source.shape.every((extent, axis) => extent === 1 || source.strides?.[axis] === wanted[axis]);
}

/** Rows along axis 0, each contiguous: what the kernels take without a copy. */
export interface RowLayout {
  readonly rows: number;
  readonly rowBytes: number;
  /** From the start of one row to the start of the next. */
  readonly strideBytes: number;
}

/** `undefined` if the elements of a row do not lie together, or if rows overlap: such a tensor has to be copied first. */
export function rowLayout(source: Tensor): RowLayout | undefined {
  checkForm(source, 'rowLayout');
  const { shape, strides, dtype } = source;
  // Every dispatch asks this of its sources: no arrays are made here.
  const rows = shape[0] ?? 1;
  let rowElements = 1;
  for (let axis = shape.length - 1; axis >= 1; axis--) rowElements *= shape[axis]!;
  let packed = 1;
  for (let axis = shape.length - 1; axis >= 1 && rowElements > 0; axis--) {
    if (strides !== undefined && shape[axis] !== 1 && strides[axis] !== packed) return undefined;
    packed *= shape[axis]!;
  }
  const rowStride = strides?.[0] ?? rowElements;
  if (rows > 1 && rowStride < rowElements) return undefined;
  const bytes = elementBytes(dtype);
  return { rows, rowBytes: rowElements * bytes, strideBytes: (rows > 1 ? rowStride : rowElements) * bytes };
}

/** The bytes of `data.buffer` that the tensor touches, gaps included. */
export function byteRange(source: Tensor): { readonly byteOffset: number; readonly byteLength: number } {
  if (!ArrayBuffer.isView(source?.data)) {
    throw invalid('tensor', { where: 'byteRange', expected: 'an object with dtype, shape and data', found: source });
  }
  checkForm(source, 'byteRange');
  return { byteOffset: source.data.byteOffset, byteLength: extentOf(source) * elementBytes(source.dtype) };
}

/** The elements in row-major order, in storage of their own. Throws what `tensor` throws: nothing keeps callers from writing a tensor by hand. */
export function toContiguous<D extends DType>(source: Tensor<D>): Tensor<D> {
  const where = 'toContiguous';
  checkForm(source, where);
  checkAttached(source.data, where);
  const { dtype, shape } = tensor(source.dtype, source.shape, source.data, source.strides);
  const count = elementCount(shape);
  if (isContiguous(source)) return tensor(dtype, shape, source.data.slice(0, count) as Storage[D]);
  const out = createStorage(dtype, count);
  const strides = stridesOf(source);
  const index = new Array<number>(shape.length).fill(0);
  for (let i = 0, at = 0; i < count; i++) {
    out[i] = source.data[at]!;
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      at += strides[axis]!;
      if (++index[axis]! < shape[axis]!) break;
      at -= strides[axis]! * shape[axis]!;
      index[axis] = 0;
    }
  }
  return tensor(dtype, shape, out);
}
