/** Core attention of one attention server on a GPU: as `attentionForward` and `attentionBackward`, of tensors on the device. The kernel is a plain one, to compare with. */
import { type AbortOptions, checkInteger, type DeviceTensor, EpError, invalid, Resource } from '@ep/core';
import { type NativeGpuAttention, type NativeGpuLibrary, type NativeGpuRows, native } from '@ep/native';
import { checkObject } from '../check-spec.js';
import { ATTENTION_DTYPES, type AttentionDType, type AttentionGroups, listsOf } from '../core-attention.js';
import { deviceSource } from './operand.js';
import { CudaStream, throwOutcome } from './stream.js';

export interface CudaAttentionShape {
  /** Of Q, K, V, O and their gradients. */
  readonly dtype: AttentionDType;
  readonly queryRows: number;
  readonly kvRows: number;
  /** A multiple of `kvHeads`. */
  readonly queryHeads: number;
  readonly kvHeads: number;
  /** 1 to 256. Blocks of the backward pass need 800 bytes of shared memory for each, and 10 KiB. */
  readonly headDim: number;
  /** Default 1 / sqrt(head dimension). */
  readonly scale?: number;
}

/** Q, O: [query rows, heads, head dimension]. K, V: [key-value rows, kv heads, head dimension]. lse: f32 [query rows, heads]. */
export interface CudaAttentionForwardTensors {
  readonly q: DeviceTensor;
  readonly k: DeviceTensor;
  readonly v: DeviceTensor;
  readonly o: DeviceTensor;
  readonly lse: DeviceTensor;
}

/** `o` and `lse` are those of the forward pass; dQ, dK and dV are written, shaped like q, k and v. */
export interface CudaAttentionBackwardTensors extends CudaAttentionForwardTensors {
  readonly dO: DeviceTensor;
  readonly dQ: DeviceTensor;
  readonly dK: DeviceTensor;
  readonly dV: DeviceTensor;
}

const PER_QUERY_ROW = ['q', 'o', 'dO', 'dQ'];

export class CudaAttention extends Resource {
  readonly #attention: NativeGpuAttention;
  readonly #device: number;
  readonly #shape: CudaAttentionShape;

  /** Made by `CudaDevice.attention`. */
  constructor(library: NativeGpuLibrary, device: number, groups: AttentionGroups, shape: CudaAttentionShape) {
    super(`attention of GPU ${device}`);
    const where = 'attention';
    checkObject(shape, 'shape', 'an object with dtype, queryRows, kvRows, queryHeads, kvHeads and headDim', where);
    const { dtype, queryRows: qRows, kvRows, queryHeads: qHeads, kvHeads, headDim } = shape;
    if (!Object.hasOwn(ATTENTION_DTYPES, dtype))
      throw invalid('dtype', { where, expected: 'f32 or bf16', found: dtype });
    checkInteger(qRows, 'queryRows', where);
    checkInteger(kvRows, 'kvRows', where);
    checkInteger(headDim, 'headDim', where, 1, 256);
    const scale = shape.scale ?? 1 / Math.sqrt(headDim);
    if (!Number.isFinite(scale)) throw invalid('scale', { where, expected: 'a finite number', found: scale });
    this.#attention = new (native().binding.GpuAttention)(library, device, {
      ...{ qRows, kvRows, qHeads, kvHeads, headDim, scale, threads: 1 },
      dtype: ATTENTION_DTYPES[dtype],
      ...listsOf(where, groups, qRows, kvRows),
    });
    this.#device = device;
    this.#shape = shape;
  }

  /** Writes `o` and `lse` for the query rows of the groups, and no other row, in the order of the stream. Resolves when they are written. Errors as `attentionForward`. */
  async forward(
    stream: CudaStream,
    { q, k, v, o, lse }: CudaAttentionForwardTensors,
    options: AbortOptions = {},
  ): Promise<void> {
    const where = 'attention forward';
    const rows = this.#rows(where, stream, { q, k, v, o, lse }, false);
    const outcome = await stream.follow((on) => on.attentionForward(this.#attention, rows), options.signal);
    throwOutcome(where, outcome);
  }

  /** Writes dQ for the query rows of the groups, and every row of dK and dV: zero where no group reads. Otherwise as `forward`. */
  async backward(
    stream: CudaStream,
    { q, k, v, o, lse, dO, dQ, dK, dV }: CudaAttentionBackwardTensors,
    options: AbortOptions = {},
  ): Promise<void> {
    const where = 'attention backward';
    const rows = this.#rows(where, stream, { q, k, v, o, lse, dO, dQ, dK, dV }, false);
    const outcome = await stream.follow((on) => on.attentionBackward(this.#attention, rows), options.signal);
    throwOutcome(where, outcome);
  }

  /**
   * `forward` as a part of the graph that the stream is being captured into: each replay reads what the tensors hold then. They stay alive with the graph. Throws `EP_INVALID_ARGUMENT` where the stream is
   * not being captured, and as `forward` does.
   */
  captureForward(stream: CudaStream, { q, k, v, o, lse }: CudaAttentionForwardTensors): void {
    const where = 'attention captureForward';
    const rows = this.#rows(where, stream, { q, k, v, o, lse }, true);
    stream.nativeStream(where).attentionForward(this.#attention, rows);
  }

  /** `backward` in a graph, as `captureForward`. */
  captureBackward(stream: CudaStream, { q, k, v, o, lse, dO, dQ, dK, dV }: CudaAttentionBackwardTensors): void {
    const where = 'attention captureBackward';
    const rows = this.#rows(where, stream, { q, k, v, o, lse, dO, dQ, dK, dV }, true);
    stream.nativeStream(where).attentionBackward(this.#attention, rows);
  }

  #rows(
    where: string,
    stream: CudaStream,
    tensors: Readonly<Record<string, DeviceTensor>>,
    captured: boolean,
  ): Readonly<Record<string, NativeGpuRows>> {
    this.checkOpen(where);
    if (!(stream instanceof CudaStream)) throw invalid('stream', { where, expected: 'a CudaStream', found: stream });
    if (stream.capturing !== captured) {
      const why = captured
        ? 'not being captured; forward() and backward() run on it'
        : 'being captured; captureForward() and captureBackward() put attention into its graph';
      throw new EpError('EP_INVALID_ARGUMENT', `${where}: the stream is ${why}`);
    }
    const { dtype, queryRows, kvRows, queryHeads, kvHeads, headDim } = this.#shape;
    const specOf = (name: string) => {
      if (name === 'lse') return { dtype: 'f32' as const, rows: queryRows, rowShape: [queryHeads] };
      if (PER_QUERY_ROW.includes(name)) return { dtype, rows: queryRows, rowShape: [queryHeads, headDim] };
      return { dtype, rows: kvRows, rowShape: [kvHeads, headDim] };
    };
    return Object.fromEntries(
      Object.entries(tensors).map(([name, tensor]) => [
        name,
        deviceSource(tensor, { ...specOf(name), where: `${where}: ${name}`, device: this.#device }),
      ]),
    );
  }

  protected override release(): void {
    this.#attention.release();
  }
}
