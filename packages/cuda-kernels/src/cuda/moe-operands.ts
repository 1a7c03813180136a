/** What calls of a buffer for experts on a GPU are given on the device: checked before anything moves. */
import { type DeviceTensor, type DType, invalid } from '@ep/core';
import { EP_MOE_RENORMALISE } from '@ep/native';
import { dtypeCode } from '../moe/codes.js';
import type { ResolvedMoe } from '../moe/options.js';
import type { HeldCall } from '../moe/received.js';
import type { DeviceMoeCombineOptions } from './moe-received.js';
import { type DeviceSource, deviceSource, packedSource } from './operand.js';

/** All of its methods throw `EP_INVALID_ARGUMENT`, which names the tensor. */
export class MoeOperands {
  readonly #moe: ResolvedMoe;
  /** Ordinal of the GPU. */
  readonly #device: number;

  constructor(moe: ResolvedMoe, device: number) {
    this.#moe = moe;
    this.#device = device;
  }

  /** Rows to dispatch, which may lie apart, and how many there are. */
  tokens(where: string, x: DeviceTensor): { readonly from: DeviceSource; readonly tokens: number } {
    const { maxTokens, hidden, dtype } = this.#moe;
    const tokens = x?.shape?.[0];
    if (typeof tokens !== 'number' || tokens > maxTokens) {
      throw invalid('x', { where, expected: `[at most ${maxTokens} tokens, ${hidden}]`, found: x?.shape });
    }
    const spec = { where: `${where}, x`, dtype, rows: tokens, rowShape: [hidden], device: this.#device };
    return { from: deviceSource(x, spec), tokens };
  }

  /** Rows without gaps. */
  packed(where: string, tensor: DeviceTensor | undefined, dtype: DType, rows: number, elements: number): DeviceSource {
    return packedSource(tensor, { where, dtype, rows, rowShape: [elements], device: this.#device });
  }

  /** What a combine reads and writes besides weights, as the addon takes it. */
  combine(
    where: string,
    { tokens, rows }: HeldCall,
    y: DeviceTensor,
    options: Pick<DeviceMoeCombineOptions, 'out' | 'bias' | 'renormalise'>,
  ) {
    const { dtype, hidden } = this.#moe;
    const from = this.#results(`${where}, y`, y, rows);
    const packed = (tensor: DeviceTensor | undefined, name: string) =>
      this.packed(`${where}, ${name}`, tensor, dtype, tokens, hidden);
    const out = packed(options?.out, 'out');
    const bias = options.bias ?? [];
    if (bias.length > 2) throw invalid('bias', { where, expected: 'at most two tensors', found: bias.length });
    const [first, second] = bias.map((one, i) => packed(one, `bias ${i}`));
    return {
      ...{ flags: options.renormalise === true ? EP_MOE_RENORMALISE : 0, dtype: dtypeCode(dtype) },
      ...{ y: from.operand, yOffset: from.byteOffset, yStride: from.strideBytes, yRows: rows },
      ...{ out: out.operand, outOffset: out.byteOffset },
      ...(first && { bias0: first.operand, bias0Offset: first.byteOffset }),
      ...(second && { bias1: second.operand, bias1Offset: second.byteOffset }),
    };
  }

  /** Rows of the receive tensor, in the low-latency form also by expert. */
  #results(where: string, y: DeviceTensor, rows: number): DeviceSource {
    const { mode, hidden, dtype, worldSize, maxTokens } = this.#moe;
    const spec = { where, dtype, rows, rowShape: [hidden], device: this.#device };
    return deviceSource(y, mode === 'low-latency' ? { ...spec, blockRows: worldSize * maxTokens } : spec);
  }
}
