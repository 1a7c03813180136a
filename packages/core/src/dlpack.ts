/** Tensors of other libraries by the fields of DLPack's `DLTensor`, of which JS has no pointer. */
import { type DType, elementBytes } from './dtype.js';
import { checkInteger, checkObject, EpError, invalid } from './errors.js';
import type { Device, DeviceTensor } from './stream.js';

/** `DLTensor`, and what `DLManagedTensorVersioned` says beside it: the fields and numbers of dlpack.h 1.1. */
export interface DlpackTensor {
  /** An address in this process: what another one shares was mapped here first, and lies elsewhere. */
  readonly data: bigint | number;
  /** `DLDevice`. The ordinal of a GPU is that of this process: `CUDA_VISIBLE_DEVICES` may give it another in the producer's. */
  readonly device: { readonly type: number; readonly id: number };
  readonly dtype: { readonly code: number; readonly bits: number; readonly lanes: number };
  readonly shape: readonly number[];
  /** In elements; row-major if absent. */
  readonly strides?: readonly number[] | null;
  readonly byte_offset?: bigint | number;
  readonly version?: { readonly major: number; readonly minor: number };
  readonly flags?: bigint | number;
}

/** What `adopt` takes, and, of a GPU, a tensor that a dispatch sends from as it is. */
export interface DlpackMemory extends DeviceTensor {
  readonly byteLength: number;
  /** Nobody may write there, says who made it. */
  readonly readOnly: boolean;
}

const MAJOR = 1;
const READ_ONLY = 1n;
const END_OF_ADDRESSES = 1n << 64n;

/** Devices by `DLDeviceType`; the rest for messages. */
const HOSTS: Readonly<Record<number, string>> = { 1: 'kDLCPU', 3: 'kDLCUDAHost' };
const GPUS: Readonly<Record<number, string>> = { 2: 'kDLCUDA', 13: 'kDLCUDAManaged' };
const OTHERS: Readonly<Record<number, string>> = {
  4: 'kDLOpenCL',
  7: 'kDLVulkan',
  8: 'kDLMetal',
  9: 'kDLVPI',
  10: 'kDLROCM',
  11: 'kDLROCMHost',
  12: 'kDLExtDev',
  14: 'kDLOneAPI',
  15: 'kDLWebGPU',
  16: 'kDLHexagon',
  17: 'kDLMAIA',
  18: 'kDLTrn',
};

/** By `DLDataTypeCode` and bits. A bool is a byte. */
const DTYPE_OF: Readonly<Record<string, DType>> = {
  '0/8': 'i8',
  '0/16': 'i16',
  '0/32': 'i32',
  '0/64': 'i64',
  '1/8': 'u8',
  '1/16': 'u16',
  '1/32': 'u32',
  '1/64': 'u64',
  '2/16': 'f16',
  '2/32': 'f32',
  '2/64': 'f64',
  '4/16': 'bf16',
  '6/8': 'u8',
  '10/8': 'f8e4m3',
  '12/8': 'f8e5m2',
  '14/8': 'ue8m0',
};
const CODE_NAMES: readonly string[] = [
  'kDLInt',
  'kDLUInt',
  'kDLFloat',
  'kDLOpaqueHandle',
  'kDLBfloat',
  'kDLComplex',
  'kDLBool',
  'kDLFloat8_e3m4',
  'kDLFloat8_e4m3',
  'kDLFloat8_e4m3b11fnuz',
  'kDLFloat8_e4m3fn',
  'kDLFloat8_e4m3fnuz',
  'kDLFloat8_e5m2',
  'kDLFloat8_e5m2fnuz',
  'kDLFloat8_e8m0fnu',
  'kDLFloat6_e2m3fn',
  'kDLFloat6_e3m2fn',
  'kDLFloat4_e2m1fn',
];

const WHERE = 'dlpackTensor';

function checkUnsigned(value: unknown, what: string): bigint {
  if (typeof value === 'bigint' && value >= 0n && value < END_OF_ADDRESSES) return value;
  if (typeof value === 'number' && Number.isSafeInteger(value) && value >= 0) return BigInt(value);
  throw invalid(what, { where: WHERE, expected: 'a bigint of 64 bits without sign, or a safe integer', found: value });
}

function deviceOf(device: DlpackTensor['device']): Device {
  checkObject(device, 'device', '{type, id}', WHERE);
  const type = checkInteger(device.type, 'device.type', WHERE);
  const id = checkInteger(device.id, 'device.id', WHERE);
  if (Object.hasOwn(GPUS, type)) return Object.freeze({ kind: 'cuda', index: id });
  if (Object.hasOwn(HOSTS, type)) return Object.freeze({ kind: 'host', index: 0 });
  const known = Object.entries({ ...HOSTS, ...GPUS }).map(([number, name]) => `${name} (${number})`);
  throw new EpError(
    'EP_UNSUPPORTED',
    `${WHERE}: the tensor lies on a device of type ${type}${OTHERS[type] ? ` (${OTHERS[type]})` : ''}; known are ${known.join(', ')}`,
    { context: { type, id } },
  );
}

function dtypeOf(dtype: DlpackTensor['dtype']): DType {
  checkObject(dtype, 'dtype', '{code, bits, lanes}', WHERE);
  const code = checkInteger(dtype.code, 'dtype.code', WHERE, 0, 255);
  const bits = checkInteger(dtype.bits, 'dtype.bits', WHERE, 1, 255);
  const lanes = checkInteger(dtype.lanes, 'dtype.lanes', WHERE, 1, 65535);
  const found = DTYPE_OF[`${code}/${bits}`];
  if (found !== undefined && lanes === 1) return found;
  const name = CODE_NAMES[code] ?? 'unknown';
  throw new EpError(
    'EP_UNSUPPORTED',
    `${WHERE}: elements of code ${code} (${name}), ${bits} bits and ${lanes} lanes are of no dtype here`,
    { context: { code, bits, lanes } },
  );
}

function checkContiguous(strides: unknown, shape: readonly number[], elements: number): void {
  if (strides === undefined || strides === null) return;
  if (!Array.isArray(strides) || strides.length !== shape.length) {
    const expected = `an array of ${shape.length} strides, one per axis`;
    throw invalid('strides', { where: WHERE, expected, found: strides });
  }
  for (const [axis, stride] of strides.entries()) {
    checkInteger(stride, `strides[${axis}]`, WHERE, Number.MIN_SAFE_INTEGER);
  }
  if (elements === 0) return;
  let step = 1;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    // Where an axis has one element nobody takes a step.
    if (shape[axis] !== 1 && strides[axis] !== step) {
      throw new EpError(
        'EP_UNSUPPORTED',
        `${WHERE}: the tensor is not contiguous: strides [${strides.join(', ')}] of shape [${shape.join(', ')}]; have its library copy it (contiguous())`,
        { context: { shape, strides } },
      );
    }
    step *= shape[axis]!;
  }
}

/**
 * The memory of a contiguous tensor. Throws `EP_INVALID_ARGUMENT` for fields that are none, and for bytes that no address space has; `EP_UNSUPPORTED` for devices, dtypes and versions that are not known here, and
 * for strides. Whether there is such memory `adopt` finds out. HAZARD: its owner keeps it while it is used, and has finished what it writes there: a capsule's deleter and streams are the producer's.
 */
export function dlpackTensor(source: DlpackTensor): DlpackMemory {
  checkObject(source, 'source', 'an object with the fields of DLTensor', WHERE);
  const { version } = source;
  if (version !== undefined) {
    checkObject(version, 'version', '{major, minor}', WHERE);
    const major = checkInteger(version.major, 'version.major', WHERE);
    if (major !== MAJOR) {
      throw new EpError('EP_UNSUPPORTED', `${WHERE}: DLPack ${major} is not known here, ${MAJOR} is`, {
        context: { major },
      });
    }
  }
  const flags = checkUnsigned(source.flags ?? 0, 'flags');
  const device = deviceOf(source.device);
  const dtype = dtypeOf(source.dtype);
  if (!Array.isArray(source.shape)) {
    throw invalid('shape', { where: WHERE, expected: 'an array of extents', found: source.shape });
  }
  const shape = Object.freeze([...source.shape]) as readonly number[];
  let elements = 1;
  for (const [axis, extent] of shape.entries()) elements *= checkInteger(extent, `shape[${axis}]`, WHERE);
  const width = elementBytes(dtype);
  const byteLength = checkInteger(elements * width, 'byte length', WHERE);
  checkContiguous(source.strides, shape, elements);
  const address = checkUnsigned(source.data, 'data') + checkUnsigned(source.byte_offset ?? 0, 'byte_offset');
  if (byteLength > 0 && address === 0n) {
    throw invalid('data', { where: WHERE, expected: 'an address, unless the tensor is empty', found: source.data });
  }
  if (address % BigInt(width) !== 0n) {
    throw invalid('address', { where: WHERE, expected: `a multiple of ${width}, as ${dtype} has`, found: address });
  }
  if (address + BigInt(byteLength) > END_OF_ADDRESSES) {
    const expected = `such that ${byteLength} bytes end within 64 bits`;
    throw invalid('address', { where: WHERE, expected, found: address });
  }
  return Object.freeze({ dtype, shape, address, device, byteLength, readOnly: (flags & READ_ONLY) !== 0n });
}
