/** From what callers pass to contiguous elements that live as long as the call needs them. */
import {
  asTensor,
  checkAttached,
  type DType,
  EpError,
  elementCount,
  invalid,
  isContiguous,
  type PlainArray,
  type Tensor,
} from '@ep/core';
import { DeviceElements, deviceElements } from './device/elements.js';
import type { Data, Elements, GroupEngine } from './engine.js';
import type { Operand } from './options.js';

const PLAIN: Readonly<Record<string, DType>> = {
  Float64Array: 'f64',
  Float32Array: 'f32',
  BigInt64Array: 'i64',
  BigUint64Array: 'u64',
  Int32Array: 'i32',
  Uint32Array: 'u32',
  Int16Array: 'i16',
  Int8Array: 'i8',
};

/** Tensors that can no longer change, once looked at, and their buffers: checking one anew would cost more than a small all-reduce. */
const checked = new WeakMap<Tensor, Elements>();

/**
 * The last two arrays whose buffers have a fixed length, as they then always will: asking a typed array for its buffer takes 50 ns, and calls have up to two. Not of
 * large buffers, because they are kept from the garbage collector; but of those that small allocations of group memory share.
 */
let lastFixed: Elements | undefined;
let fixedBefore: Elements | undefined;
const KEPT_BYTES = 2 ** 22;

/** Whether checks may remember an array, and so keep it from the garbage collector. */
export const isKept = (elements: Data): boolean =>
  !(elements instanceof DeviceElements) && elements.buffer.byteLength <= KEPT_BYTES;

/** HAZARD: shrinking a buffer unmaps pages under the peer or thread that reads them. */
function checkLiving(elements: Elements, where: string): void {
  if (elements.length === 0) checkAttached(elements, where);
  if (elements === lastFixed || elements === fixedBefore) return;
  if ((elements.buffer as { readonly resizable?: boolean }).resizable === true) {
    throw new EpError(
      'EP_DETACHED',
      `${where}: the buffer of the ${elements[Symbol.toStringTag]} can be resized while it is in use; pass one of fixed length`,
      { context: { where } },
    );
  }
  if (!isKept(elements)) return;
  fixedBefore = lastFixed;
  lastFixed = elements;
}

function elementsOfTensor(source: Tensor, what: string, where: string): Elements {
  const found = checked.get(source);
  if (found !== undefined) {
    checkStillLiving(found, where);
    return found;
  }
  const tensor = asTensor(source, where);
  if (!isContiguous(tensor)) {
    throw invalid(what, {
      where,
      expected: 'contiguous: copy it with toContiguous',
      found: `strides ${tensor.strides} for shape ${tensor.shape}`,
    });
  }
  const count = elementCount(tensor.shape);
  const elements = tensor.data.length === count ? tensor.data : tensor.data.subarray(0, count);
  checkLiving(elements, where);
  if (Object.isFrozen(source) && Object.isFrozen(source.shape)) checked.set(source, elements);
  return elements;
}

/** The elements of `source`; `what` names it in messages. Throws `EP_INVALID_ARGUMENT` or `EP_DETACHED`. */
export function dataOf(source: Operand, what: string, where: string): Data {
  return ArrayBuffer.isView(source)
    ? elementsOf(source, what, where)
    : (deviceElements(source, what, where) ?? elementsOf(source, what, where));
}

/** As `dataOf`, of a message. */
export function messageData(tensor: Operand, where: string, { device }: GroupEngine): Data {
  return device === undefined ? elementsOf(tensor, 'tensor', where) : dataOf(tensor, 'tensor', where);
}

/** As `dataOf`, of what lies in host memory. */
export function elementsOf(source: Operand, what: string, where: string): Elements {
  if (ArrayBuffer.isView(source) && PLAIN[source[Symbol.toStringTag]] !== undefined) {
    checkLiving(source as PlainArray, where);
    return source as PlainArray;
  }
  if (deviceElements(source, what, where) !== undefined) {
    throw new EpError(
      'EP_UNSUPPORTED',
      `${where}: ${what} lies on a GPU, and this takes tensors in host memory: copy it, or open the group with the option device, over nvshmem.cuda or by nccl`,
      {
        context: { where },
      },
    );
  }
  return elementsOfTensor(source as Tensor, what, where);
}

/** Of an operand that `elementsOf` has accepted. */
export function dtypeOf(source: Operand): DType {
  return (source as Tensor).dtype ?? PLAIN[(source as PlainArray)[Symbol.toStringTag]]!;
}

/** Extent of axis 0, and elements of each of its rows; a scalar is one row. */
export function rowsOf(source: Operand): { readonly rows: number; readonly rowElements: number } {
  if (ArrayBuffer.isView(source)) return { rows: source.length, rowElements: 1 };
  const [rows = 1, ...rest] = source.shape;
  return { rows, rowElements: elementCount(rest) };
}

/** Throws `EP_DETACHED` if the array was taken away while a call used it. */
export function checkStillLiving(elements: Data, where: string): void {
  if (elements.length === 0 && !(elements instanceof DeviceElements)) checkAttached(elements, where);
}
