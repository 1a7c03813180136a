/** The tensors of a call: checked, and copied where native code cannot read them in place. */
import { checkFixed, checkObject, elementCount, invalid, isContiguous, type Tensor, tensor } from '@ep/core';
import { type MoeCombineHalf, nativePlaceOf } from '@ep/native';
import { type SourceOperand, sourceOperand, sourceSpec } from '../operand.js';
import type { MoeCombineOptions, MoeDType, ResolvedMoe } from './options.js';
import type { HeldCall } from './received.js';
import { hostStorage, placeOfStorage } from './slot.js';

export interface DispatchOperand extends SourceOperand {
  readonly tokens: number;
}

/** Throws `EP_INVALID_ARGUMENT`, or `EP_CAPACITY` for too many tokens. */
export function dispatchOperand(x: Tensor, { dtype, hidden, maxTokens }: ResolvedMoe, where: string): DispatchOperand {
  const tokens = x?.shape?.[0];
  if (typeof tokens !== 'number') throw invalid('x', { where, expected: `a tensor [tokens, ${hidden}]`, found: x });
  if (tokens > maxTokens) {
    throw invalid('x', { where, expected: `at most maxTokens = ${maxTokens} tokens`, found: tokens });
  }
  return { ...sourceOperand(x, sourceSpec(`${where}, x`, dtype, tokens, [hidden])), tokens };
}

type CombineOperands = Pick<
  MoeCombineHalf,
  | 'y'
  | 'yOffset'
  | 'yStride'
  | 'yRows'
  | 'out'
  | 'outOffset'
  | 'weights'
  | 'weightsOffset'
  | 'bias0'
  | 'bias0Offset'
  | 'bias1'
  | 'bias1Offset'
>;

/** Rows packed and in native memory: copied where they are not. */
function packed(source: Tensor, dtype: Tensor['dtype'], rows: number, columns: number, where: string): SourceOperand {
  const spec = sourceSpec(where, dtype, rows, [columns]);
  const made = sourceOperand(source, spec);
  if (rows <= 1 || made.strideBytes * rows === source.data.BYTES_PER_ELEMENT * rows * columns) return made;
  return sourceOperand({ dtype, shape: [rows, columns], data: compact(source, rows, columns) } as Tensor, spec);
}

function compact(source: Tensor, rows: number, columns: number): Tensor['data'] {
  const stride = source.strides![0]!;
  const Carrier = source.data.constructor as new (length: number) => Tensor['data'];
  const made = new Carrier(rows * columns);
  for (let row = 0; row < rows; row++) {
    made.set(source.data.subarray(row * stride, row * stride + columns) as never, row * columns);
  }
  return made;
}

export interface PreparedCombine {
  readonly half: CombineOperands;
  readonly stagedBytes: number;
  /** The result, once it has been written. */
  readonly finish: () => Tensor<MoeDType>;
}

/** [experts, rows of each, channels] as rows, which may lie apart. */
function rowsOfBlocks(y: Tensor, rows: number, where: string): Tensor {
  const [, ofExpert = 0, hidden = 0] = y.shape;
  const flat = { dtype: y.dtype, shape: [rows, hidden], data: y.data };
  if (isContiguous(y)) return flat as Tensor;
  const [block, row, channel] = y.strides ?? [];
  if (channel === 1 && row !== undefined && block === ofExpert * row) return { ...flat, strides: [row, 1] } as Tensor;
  throw invalid('y', { where, expected: 'blocks that follow each other where it has three axes', found: y.strides });
}

/** Throws `EP_INVALID_ARGUMENT`. */
export function combineOperands(
  y: Tensor,
  call: HeldCall,
  options: MoeCombineOptions,
  moe: ResolvedMoe,
  locals: number,
  where: string,
): PreparedCombine {
  const { hidden, dtype, topK } = moe;
  const { tokens, rows } = call;
  const low = moe.mode === 'low-latency';
  const rowShape = low && y?.shape?.length === 3;
  if (rowShape && (y.shape[0] !== locals || y.shape[1] !== moe.worldSize * moe.maxTokens)) {
    throw invalid('y', {
      where,
      expected: `[${locals}, ${moe.worldSize * moe.maxTokens}, ${hidden}]`,
      found: y.shape,
    });
  }
  const flat = rowShape ? rowsOfBlocks(y, rows, where) : y;
  const source = sourceOperand(flat, sourceSpec(`${where}, y`, dtype, rows, [hidden]));
  let stagedBytes = source.stagedBytes;
  const out = outOperand(options.out, tokens, moe, where);
  const half: { -readonly [K in keyof CombineOperands]: CombineOperands[K] } = {
    y: source.operand,
    yOffset: source.byteOffset,
    yStride: source.strideBytes,
    yRows: rows,
    ...out.place,
  };
  if (options.weights !== undefined) {
    if (!(options.weights instanceof Float32Array) || options.weights.length !== tokens * topK) {
      const expected = `a Float32Array of ${tokens * topK} (${tokens} tokens * ${topK})`;
      throw invalid('weights', { where, expected, found: options.weights });
    }
    const weights = packed(tensor('f32', [tokens, topK], options.weights), 'f32', tokens, topK, `${where}, weights`);
    stagedBytes += weights.stagedBytes;
    half.weights = weights.operand;
    half.weightsOffset = weights.byteOffset;
  }
  const bias = options.bias ?? [];
  if (!Array.isArray(bias) || bias.length > 2)
    throw invalid('bias', { where, expected: 'a list of at most two tensors', found: bias });
  bias.forEach((one, i) => {
    const found = packed(one, dtype, tokens, hidden, `${where}, bias ${i}`);
    stagedBytes += found.stagedBytes;
    if (i === 0) {
      half.bias0 = found.operand;
      half.bias0Offset = found.byteOffset;
    } else {
      half.bias1 = found.operand;
      half.bias1Offset = found.byteOffset;
    }
  });
  return { half, stagedBytes, finish: out.finish };
}

/** Where the result goes, and how it gets to the caller's tensor if that is not in native memory. */
function outOperand(wanted: Tensor<MoeDType> | undefined, tokens: number, moe: ResolvedMoe, where: string) {
  const { hidden, dtype } = moe;
  const elements = tokens * hidden;
  if (wanted !== undefined) {
    checkObject(wanted, 'out', 'a tensor', where);
    const sound =
      wanted.dtype === dtype &&
      Array.isArray(wanted.shape) &&
      wanted.shape[0] === tokens &&
      elementCount(wanted.shape) === elements &&
      isContiguous(wanted);
    if (!sound) {
      const expected = `a packed ${dtype} tensor [${tokens}, ${hidden}]`;
      throw invalid('out', { where, expected, found: `${wanted.dtype} [${String(wanted.shape)}]` });
    }
    checkFixed(wanted.data, `${where}, out`);
    if (nativePlaceOf(wanted.data) !== undefined) {
      const { operand, offset } = placeOfStorage(wanted.data);
      return { place: { out: operand, outOffset: offset }, finish: () => wanted };
    }
  }
  const made = hostStorage(dtype, elements);
  const { operand, offset } = placeOfStorage(made);
  return {
    place: { out: operand, outOffset: offset },
    finish: (): Tensor<MoeDType> => {
      if (wanted === undefined) return tensor(dtype, [tokens, hidden], made);
      wanted.data.set(made as never);
      return wanted;
    },
  };
}
