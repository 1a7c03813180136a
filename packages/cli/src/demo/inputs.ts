/**
 * The rows that attention works on, made from tokens. Every number is a function of (seed, token, position, channel) and nothing else, so
 * that each rank makes its own rows, and a check can make any row again.
 *
 * Token embeddings e of width 64 and projection weights W are independent with mean 0 and variance 1; [q k v] = e W / 8 has variance 1.
 * Rotary position embedding (Su et al., 2021, base 10 000) then turns the pairs (i, i + headDim / 2) of q and k. dO is drawn for
 * each position. With a scale of 1 / sqrt(headDim) the scores have a standard deviation of about 1.
 */
import { EpError } from '@ep/core';
import type { AttentionShape } from '@ep/cuda-kernels';
import type { RowKind, RowSource } from './rows.js';

export const demoShape = { queryHeads: 8, kvHeads: 2, headDim: 64 } as const;

type Shape = Pick<AttentionShape, 'queryHeads' | 'kvHeads' | 'headDim'>;

const embeddingWidth = 64;
const rotaryBase = 10_000;

/** Streams keep the uses of one seed apart. */
const stream = { embedding: 1, weight: 2, gradient: 3 } as const;

/** A well-mixed 32-bit hash of four words (the finaliser of MurmurHash3 after each), as a number with mean 0 and variance 1. */
export function draw(seed: number, use: number, a: number, b: number): number {
  let h = mix((seed ^ Math.imul(use, 0x9e3779b1)) | 0);
  h = mix((h ^ Math.imul(a, 0x85ebca77)) | 0);
  h = mix((h + Math.imul(b, 0xc2b2ae3d)) | 0);
  // Uniform on [-sqrt 3, sqrt 3).
  return ((h >>> 0) / 2 ** 31 - 1) * Math.sqrt(3);
}

function mix(word: number): number {
  let h = word;
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return h ^ (h >>> 16);
}

/** Rows of documents, given as tokens. */
export class TokenRows implements RowSource {
  readonly #documents: readonly Int32Array[];
  readonly #seed: number;
  readonly #headDim: number;
  readonly #columns: Readonly<Record<'q' | 'k' | 'v', readonly [number, number]>>;
  readonly #queryElements: number;
  readonly #weights: Float32Array;
  readonly #width: number;
  readonly #frequencies: Float64Array;
  /** Projections before rotation, by token: a text uses few of its vocabulary's tokens, each many times. */
  readonly #projected = new Map<number, Float32Array>();

  constructor(seed: number, documents: readonly Int32Array[], shape: Shape = demoShape) {
    const { queryHeads, kvHeads, headDim } = shape;
    const q = queryHeads * headDim;
    const kv = kvHeads * headDim;
    this.#seed = seed;
    this.#documents = documents;
    this.#headDim = headDim;
    this.#columns = { q: [0, q], k: [q, q + kv], v: [q + kv, q + 2 * kv] };
    this.#queryElements = q;
    this.#width = q + 2 * kv;
    this.#weights = Float32Array.from({ length: embeddingWidth * this.#width }, (_, i) =>
      draw(seed, stream.weight, Math.floor(i / this.#width), i % this.#width),
    );
    this.#frequencies = Float64Array.from({ length: headDim / 2 }, (_, i) => rotaryBase ** ((-2 * i) / headDim));
  }

  fill(kind: RowKind, document: number, from: number, count: number, into: Float32Array): void {
    const tokens = this.#documents[document];
    const elements = kind === 'dO' ? this.#queryElements : this.#columns[kind][1] - this.#columns[kind][0];
    if (tokens === undefined || from < 0 || from + count > tokens.length || into.length !== count * elements) {
      throw new EpError(
        'EP_INVALID_ARGUMENT',
        `demo rows: tokens ${from} + ${count} of document ${document} into ${into.length} elements do not fit: it has ${tokens?.length ?? 0} tokens, a row of ${kind} ${elements} elements`,
      );
    }
    for (let row = 0; row < count; row++) {
      const position = from + row;
      const out = into.subarray(row * elements, (row + 1) * elements);
      if (kind === 'dO') {
        for (let i = 0; i < elements; i++) out[i] = draw(this.#seed + document, stream.gradient, position, i);
        continue;
      }
      const [first, end] = this.#columns[kind];
      out.set(this.#project(tokens[position]!).subarray(first, end));
      if (kind !== 'v') this.#rotate(out, position);
    }
  }

  #project(token: number): Float32Array {
    let projected = this.#projected.get(token);
    if (projected !== undefined) return projected;
    projected = new Float32Array(this.#width);
    for (let c = 0; c < embeddingWidth; c++) {
      const e = draw(this.#seed, stream.embedding, token, c) / Math.sqrt(embeddingWidth);
      const weights = this.#weights.subarray(c * this.#width, (c + 1) * this.#width);
      for (let j = 0; j < weights.length; j++) projected[j]! += e * weights[j]!;
    }
    this.#projected.set(token, projected);
    return projected;
  }

  /** Turns every head of a row to its position, in place. */
  #rotate(row: Float32Array, position: number): void {
    const half = this.#headDim / 2;
    for (let i = 0; i < half; i++) {
      const angle = position * this.#frequencies[i]!;
      const cos = Math.cos(angle);
      const sin = Math.sin(angle);
      for (let at = i; at < row.length; at += this.#headDim) {
        const a = row[at]!;
        const b = row[at + half]!;
        row[at] = a * cos - b * sin;
        row[at + half] = b * cos + a * sin;
      }
    }
  }
}
