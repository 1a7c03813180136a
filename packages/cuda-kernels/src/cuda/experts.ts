/** SwiGLU experts on a GPU, over rows as a `DeviceMoeBuffer` hands them out. The kernel is a plain one, to compare with. */
import {
  type AbortOptions,
  checkInteger,
  type DeviceTensor,
  type DType,
  EpError,
  elementCount,
  invalid,
  Resource,
} from '@ep/core';
import type { GpuExpertsDescription } from '@ep/native';
import { scaledChannels } from '@ep/plan/moe';
import { checkObject } from '../check-spec.js';
import { dtypeCode, payloadCode } from '../moe/codes.js';
import { MOE_DTYPES, type ResolvedMoe } from '../moe/options.js';
import { deviceSource, packedSource } from './operand.js';
import { CudaStream, throwOutcome } from './stream.js';

/** f32, packed. */
export interface CudaExpertWeights {
  /** [experts, intermediate, hidden]: at most 256 experts. */
  readonly gate: DeviceTensor;
  /** Shaped as gate. */
  readonly up: DeviceTensor;
  /** [experts, hidden, intermediate]. */
  readonly down: DeviceTensor;
}

/** `x`, `scales`, `counts` and `blockStart` are those of a `DeviceMoeReceived`. Only rows of blocks are read and written. */
export interface CudaExpertRows {
  /** f32, f16, bf16 or f8e4m3: [experts, rows of each, hidden], or [rows, hidden], rows possibly apart. */
  readonly x: DeviceTensor;
  /** Of f8e4m3, and of nothing else: f32 or ue8m0 [ceil(hidden / 128), at least the rows of x], packed. */
  readonly scales?: DeviceTensor;
  /** f32, f16 or bf16, shaped as x or [rows, hidden], rows possibly apart. In other memory than x, scales and weights. */
  readonly y: DeviceTensor;
  /** By expert: its rows are `blockStart .. blockStart + count` of x and y. `blockStart` may be longer than there are experts. */
  readonly counts: Int32Array;
  readonly blockStart: Int32Array;
}

/** As `CudaExpertRows`, of a `DeviceMoeCaptured`: each replay finds its rows on the device. */
export interface CudaExpertCapturedRows extends Omit<CudaExpertRows, 'counts' | 'blockStart'> {
  /** i32 [experts], packed, as `CudaExpertRows.counts`. What of a block lies beyond the rows of x is left out. */
  readonly counts: DeviceTensor;
  /** i32, at least [experts]. */
  readonly blockStart: DeviceTensor;
}

type Weights = Pick<
  GpuExpertsDescription,
  'gate' | 'gateOffset' | 'up' | 'upOffset' | 'down' | 'downOffset' | 'experts' | 'intermediate' | 'hidden'
>;

/** Whose blocks one launch takes as arguments. */
const MOST_EXPERTS = 256;

export class CudaExperts extends Resource {
  readonly #device: number;
  readonly #weights: Weights;

  /** Made by `CudaDevice.experts`. */
  constructor(device: number, weights: CudaExpertWeights) {
    super(`experts of GPU ${device}`);
    this.#device = device;
    this.#weights = weightsOf('experts', device, weights);
  }

  /**
   * y = down (silu(gate x) * (up x)) for the rows of each expert, and no other row, in the order of the stream; products and sums in fp32, rounded once to the dtype of y. Resolves
   * when they are written. Rejects with `EP_INVALID_ARGUMENT` (shapes, dtypes, another device, blocks that reach beyond the rows of x: nothing was written), `EP_CLOSED`, or the
   * caller's `signal.reason`.
   */
  async forward(stream: CudaStream, rows: CudaExpertRows, options: AbortOptions = {}): Promise<void> {
    const where = 'experts forward';
    this.#checkStream(where, stream, false);
    const described = this.#describe(where, rows);
    const { counts, blockStart } = rows;
    checkBlocks(where, rows, this.#weights.experts, described.rows);
    const description = { ...described, counts, blockStart };
    options.signal?.throwIfAborted();
    if (counts.every((count) => count === 0)) return;
    const outcome = await stream.follow((on) => on.expertsForward(description), options.signal);
    throwOutcome(where, outcome);
  }

  /**
   * `forward` as a part of the graph that the stream is being captured into: each replay reads counts, blocks and rows as they are on the device then, those of a `captureDispatch` before it, and leaves all
   * other rows alone. A launch has blocks for as many rows as x has. The tensors and weights stay alive with the graph. Throws `EP_INVALID_ARGUMENT` where the stream is not being captured, and as `forward` does.
   */
  captureForward(stream: CudaStream, rows: CudaExpertCapturedRows): void {
    const where = 'experts captureForward';
    this.#checkStream(where, stream, true);
    const described = this.#describe(where, rows);
    const counted = (name: 'counts' | 'blockStart', count: number) =>
      packedSource(rows[name], {
        ...{ where: `${where}: ${name}`, dtype: 'i32', rows: count, rowShape: [], device: this.#device },
      });
    const { experts } = this.#weights;
    const counts = counted('counts', experts);
    const starts = counted(
      'blockStart',
      checkInteger(rows.blockStart?.shape?.[0], 'rows of blockStart', where, experts),
    );
    stream.nativeStream(where).expertsForward({
      ...described,
      ...{ countsAt: counts.operand, countsOffset: counts.byteOffset },
      ...{ startsAt: starts.operand, startsOffset: starts.byteOffset },
    });
  }

  #checkStream(where: string, stream: CudaStream, captured: boolean): void {
    this.checkOpen(where);
    if (!(stream instanceof CudaStream)) throw invalid('stream', { where, expected: 'a CudaStream', found: stream });
    if (stream.device.index !== this.#device) {
      const expected = `a stream of GPU ${this.#device}`;
      throw invalid('stream', { where, expected, found: `one of GPU ${stream.device.index}` });
    }
    if (stream.capturing === captured) return;
    const why = captured
      ? 'not being captured; forward() runs on it'
      : 'being captured; captureForward() puts experts into its graph';
    throw new EpError('EP_INVALID_ARGUMENT', `${where}: the stream is ${why}`);
  }

  #describe(where: string, given: CudaExpertRows | CudaExpertCapturedRows): GpuExpertsDescription {
    checkObject(given, 'rows', 'an object with x, y, counts and blockStart', where);
    const { x, y } = given;
    const { hidden } = this.#weights;
    const shape: readonly number[] | undefined = x?.shape;
    if (!Array.isArray(shape) || (shape.length !== 2 && shape.length !== 3) || shape.at(-1) !== hidden) {
      const expected = `[experts, rows of each, ${hidden}] or [rows, ${hidden}]`;
      throw invalid('shape', { where: `${where}: x`, expected, found: shape });
    }
    const rows = checkInteger(elementCount(shape.slice(0, -1)), 'rows of x', where);
    const blockRows = shape.length === 3 && shape[1]! > 0 ? { blockRows: shape[1]! } : {};
    const spec = { rows, rowShape: [hidden], device: this.#device, ...blockRows };
    const dtype = MOE_DTYPES.find((one) => one === y?.dtype);
    if (dtype === undefined) {
      throw invalid('dtype', { where: `${where}: y`, expected: MOE_DTYPES.join(', '), found: y?.dtype });
    }
    return {
      ...this.#weights,
      ...{ payload: payloadOf(where, given), dtype: dtypeCode(dtype), rows },
      x: deviceSource(x, { ...spec, where: `${where}: x`, dtype: x.dtype }),
      y: deviceSource(y, { ...spec, where: `${where}: y`, dtype }),
      ...this.#scales(where, given, rows),
    };
  }

  #scales(where: string, { scales }: Pick<CudaExpertRows, 'scales'>, rows: number) {
    if (scales === undefined) return {};
    const at = `${where}: scales`;
    const blocks = Math.ceil(this.#weights.hidden / scaledChannels);
    const room = checkInteger(scales.shape?.[1], 'shape[1]', at, rows);
    const spec = { where: at, dtype: scales.dtype, rows: blocks, rowShape: [room], device: this.#device };
    const { operand, byteOffset } = packedSource(scales, spec);
    return { scales: operand, scalesOffset: byteOffset, scaleRoom: room };
  }

  protected override release(): void {}
}

function weightsOf(where: string, device: number, weights: CudaExpertWeights): Weights {
  checkObject(weights, 'weights', 'an object with gate, up and down', where);
  const shape: readonly number[] | undefined = weights.gate?.shape;
  if (!Array.isArray(shape) || shape.length !== 3) {
    throw invalid('shape', { where: `${where}: gate`, expected: '[experts, intermediate, hidden]', found: shape });
  }
  const [experts, intermediate, hidden] = shape as [number, number, number];
  checkInteger(experts, 'experts', where, 1, MOST_EXPERTS);
  checkInteger(intermediate, 'intermediate', where, 1);
  checkInteger(hidden, 'hidden', where, 1);
  const placed = (name: keyof CudaExpertWeights, rowShape: readonly number[]) =>
    packedSource(weights[name], { where: `${where}: ${name}`, dtype: 'f32', rows: experts, rowShape, device });
  const [gate, up] = [placed('gate', [intermediate, hidden]), placed('up', [intermediate, hidden])];
  const down = placed('down', [hidden, intermediate]);
  return {
    ...{ gate: gate.operand, gateOffset: gate.byteOffset, up: up.operand, upOffset: up.byteOffset },
    ...{ down: down.operand, downOffset: down.byteOffset, experts, intermediate, hidden },
  };
}

/** Rows as a payload of the buffer that they came by. */
function payloadOf(where: string, { x, scales }: Pick<CudaExpertRows, 'x' | 'scales'>): number {
  const plain = MOE_DTYPES.find((one) => one === x.dtype);
  if (plain === undefined && x.dtype !== 'f8e4m3') {
    throw invalid('dtype', { where: `${where}: x`, expected: `${MOE_DTYPES.join(', ')} or f8e4m3`, found: x.dtype });
  }
  const expected: readonly (DType | undefined)[] = plain === undefined ? ['f32', 'ue8m0'] : [undefined];
  if (!expected.includes(scales?.dtype)) {
    const text = plain === undefined ? 'f32 or ue8m0 beside rows of f8e4m3' : `none beside rows of ${plain}`;
    throw invalid('scales', { where, expected: text, found: scales?.dtype });
  }
  const payload = plain ?? (`f8e4m3+${scales!.dtype}` as ResolvedMoe['payload']);
  return payloadCode({ payload, roundScales: false });
}

function checkBlocks(where: string, { counts, blockStart }: CudaExpertRows, experts: number, rows: number): void {
  if (!(counts instanceof Int32Array) || counts.length !== experts) {
    throw invalid('counts', { where, expected: `an Int32Array of ${experts} experts`, found: counts });
  }
  if (!(blockStart instanceof Int32Array) || blockStart.length < experts) {
    throw invalid('blockStart', { where, expected: `an Int32Array of at least ${experts} experts`, found: blockStart });
  }
  for (let expert = 0; expert < experts; expert++) {
    const first = checkInteger(blockStart[expert], `blockStart[${expert}]`, where, 0, rows);
    checkInteger(counts[expert], `counts[${expert}]`, where, 0, rows - first);
  }
}
