/** What the step has computed, where every rank can read it, and how far it is from the reference. */
import { elementBytes, type Storage, type SymmetricMemory } from '@ep/core';
import type { AttentionDType, AttentionShape } from '@ep/cuda-kernels';
import type { AttentionPlan } from '@ep/plan';
import { type Part, partsOfDocuments, tokensOfDocuments } from './parts.js';
import type { DemoTransport } from './transports.js';

/** Sums over elements: the relative error by norm of all ranks is sqrt(sum of `squaredError` / sum of `squaredReference`). */
export interface Compared {
  readonly elements: number;
  readonly squaredError: number;
  readonly squaredReference: number;
  readonly largest: number;
}

export const COMPARED = ['o', 'dQ', 'dK', 'dV'] as const;
export type ComparedTensor = (typeof COMPARED)[number];

/** Results of all ranks in symmetric memory, so that whoever verifies a document can read its rows wherever they live. */
export class Results {
  readonly memory: SymmetricMemory;
  readonly #shape: AttentionShape;
  readonly #offsets: Readonly<Record<ComparedTensor, number>>;
  readonly #scratch: number;

  private constructor(
    memory: SymmetricMemory,
    shape: AttentionShape,
    offsets: Record<ComparedTensor, number>,
    scratch: number,
  ) {
    this.memory = memory;
    this.#shape = shape;
    this.#offsets = offsets;
    this.#scratch = scratch;
  }

  static rowElements(shape: AttentionShape, name: ComparedTensor): number {
    return (name === 'o' || name === 'dQ' ? shape.queryHeads : shape.kvHeads) * shape.headDim;
  }

  /** Collective. For the results of a plan. */
  static async open(transport: DemoTransport, shape: AttentionShape, plan: AttentionPlan): Promise<Results> {
    const homeRows = Math.max(...plan.fwdQ.sendTokens);
    const longest = Math.max(0, ...tokensOfDocuments(partsOfDocuments(plan)));
    const offsets = { o: 0, dQ: 0, dK: 0, dV: 0 };
    let bytes = 0;
    for (const name of COMPARED) {
      offsets[name] = bytes;
      bytes += homeRows * Results.rowElements(shape, name) * elementBytes(shape.dtype);
    }
    const scratch = bytes;
    bytes += longest * Results.rowElements(shape, 'o') * elementBytes(shape.dtype);
    return new Results(await transport.allocate({ byteLength: bytes, signalSlots: 0 }), shape, offsets, scratch);
  }

  publish(name: ComparedTensor, rows: Storage[AttentionDType]): void {
    const { dtype } = this.#shape;
    this.memory.view(dtype, this.#offsets[name], rows.length).set(rows as never);
  }

  /** A whole document's rows, fetched part by part; a view that the next fetch overwrites. */
  async fetch(
    transport: DemoTransport,
    name: ComparedTensor,
    parts: readonly Part[],
  ): Promise<Storage[AttentionDType]> {
    const { dtype } = this.#shape;
    const rowElements = Results.rowElements(this.#shape, name);
    const rowBytes = rowElements * elementBytes(dtype);
    let rows = 0;
    for (const part of parts) {
      const endpoint = await transport.connect(part.rank);
      const bytes = part.tokens * rowBytes;
      await endpoint.get(
        this.memory.remote(part.rank, this.#offsets[name] + part.row * rowBytes, bytes),
        this.memory.local(this.#scratch + rows * rowBytes, bytes),
      );
      rows += part.tokens;
    }
    return this.memory.view(dtype, this.#scratch, rows * rowElements);
  }
}

export function compare(found: Float32Array, reference: Float32Array): Compared {
  let squaredError = 0;
  let squaredReference = 0;
  let largest = 0;
  for (let i = 0; i < reference.length; i++) {
    const error = Math.abs(found[i]! - reference[i]!);
    // A NaN fails every comparison: it must end up in the sums, not vanish in the maximum.
    if (!(error <= largest)) largest = error;
    squaredError += error * error;
    squaredReference += reference[i]! * reference[i]!;
  }
  return { elements: reference.length, squaredError, squaredReference, largest };
}

export const add = (a: Compared, b: Compared): Compared => ({
  elements: a.elements + b.elements,
  squaredError: a.squaredError + b.squaredError,
  squaredReference: a.squaredReference + b.squaredReference,
  largest: Number.isNaN(b.largest) || b.largest > a.largest ? b.largest : a.largest,
});
