/**
 * The layer that `ep demo moe` computes: token rows, a router and SwiGLU experts. Every number is a function of (seed, token, position, channel) or (seed,
 * expert, weight), so that each rank makes its own rows and experts, and a check can make any of them again.
 *
 * A row is its token's embedding (variance 1), plus what all rows have in common (variance 1/16: hidden states of language models are not centred), plus noise
 * of its place in the text (variance 1/16). Frequent tokens, and the common part, prefer the same experts again and again: the imbalance of the routing is that of
 * the text and the router, not one that was drawn. Router logits have a variance of about 1; an expert computes W2 (silu(W1 x) * (W3 x)) in fp32, with weights of
 * variance 1 / fan-in.
 */
import { decode, encode } from '@ep/core';
import { type Topk, topkExperts } from '@ep/plan/moe';
import { draw } from '../demo/inputs.js';

export interface MoeShape {
  readonly hidden: number;
  readonly intermediate: number;
  readonly experts: number;
  readonly topK: number;
}

export const moeShape: MoeShape = { hidden: 256, intermediate: 64, experts: 32, topK: 4 };

/** Streams keep the uses of one seed apart, also from those of the attention demo. */
const stream = { embedding: 11, place: 12, common: 17, router: 13, gate: 14, up: 15, down: 16 } as const;

/** Of an expert. */
export interface ExpertWeights {
  /** [intermediate, hidden], as `up`. */
  readonly gate: Float32Array;
  readonly up: Float32Array;
  /** [hidden, intermediate]. */
  readonly down: Float32Array;
}

export class MoeModel {
  readonly shape: MoeShape;
  readonly #seed: number;
  readonly #router: Float32Array;
  readonly #experts = new Map<number, ExpertWeights>();
  /** A text uses few of its vocabulary's tokens, each many times. */
  readonly #embeddings = new Map<number, Float32Array>();

  constructor(seed: number, shape: MoeShape = moeShape) {
    this.shape = shape;
    this.#seed = seed;
    this.#router = this.#matrix(stream.router, 0, shape.experts, shape.hidden);
  }

  /** bf16 rows [tokens.length, hidden] of tokens whose places in the text are `place`, `place + 1`, … */
  rows(tokens: Int32Array, place: number): Uint16Array {
    const { hidden } = this.shape;
    const rows = new Float32Array(tokens.length * hidden);
    for (const [t, token] of tokens.entries()) {
      const embedding = this.#embedding(token);
      for (let h = 0; h < hidden; h++) {
        rows[t * hidden + h] = embedding[h]! + 0.25 * draw(this.#seed, stream.place, place + t, h);
      }
    }
    return encode('bf16', rows);
  }

  /** Experts of each row and their weights: softmax over all experts, the best taken, their weights divided by their sum. */
  route(rows: Uint16Array): Topk {
    const { hidden, experts, topK } = this.shape;
    const x = decode('bf16', rows);
    const scores = new Float32Array((rows.length / hidden) * experts);
    for (let t = 0; t * hidden < x.length; t++) {
      const row = scores.subarray(t * experts, (t + 1) * experts);
      matrixVector(this.#router, x.subarray(t * hidden, (t + 1) * hidden), row);
      softmax(row);
    }
    return topkExperts(scores, { experts, topK, normalise: true });
  }

  /** One expert over `count` fp32 rows, into rows of the same form. */
  apply(expert: number, x: Float32Array, out: Float32Array, count: number): void {
    const { hidden, intermediate } = this.shape;
    const { gate, up, down } = this.weights(expert);
    const [a, b] = [new Float32Array(intermediate), new Float32Array(intermediate)];
    for (let row = 0; row < count; row++) {
      const from = x.subarray(row * hidden, (row + 1) * hidden);
      matrixVector(gate, from, a);
      matrixVector(up, from, b);
      for (let i = 0; i < intermediate; i++) a[i] = (a[i]! / (1 + Math.exp(-a[i]!))) * b[i]!;
      matrixVector(down, a, out.subarray(row * hidden, (row + 1) * hidden));
    }
  }

  weights(expert: number): ExpertWeights {
    let made = this.#experts.get(expert);
    if (made === undefined) {
      const { hidden, intermediate } = this.shape;
      made = {
        gate: this.#matrix(stream.gate, expert, intermediate, hidden),
        up: this.#matrix(stream.up, expert, intermediate, hidden),
        down: this.#matrix(stream.down, expert, hidden, intermediate),
      };
      this.#experts.set(expert, made);
    }
    return made;
  }

  #embedding(token: number): Float32Array {
    let made = this.#embeddings.get(token);
    if (made === undefined) {
      made = Float32Array.from(
        { length: this.shape.hidden },
        (_, h) => draw(this.#seed, stream.embedding, token, h) + 0.25 * draw(this.#seed, stream.common, 0, h),
      );
      this.#embeddings.set(token, made);
    }
    return made;
  }

  #matrix(use: number, which: number, rows: number, columns: number): Float32Array {
    const scale = 1 / Math.sqrt(columns);
    return Float32Array.from({ length: rows * columns }, (_, i) => scale * draw(this.#seed, use, which, i));
  }
}

/** out[r] = sum over c of matrix[r, c] * x[c], in fp64 and rounded once. */
function matrixVector(matrix: Float32Array, x: Float32Array, out: Float32Array): void {
  const columns = x.length;
  for (let r = 0; r < out.length; r++) {
    let sum = 0;
    const first = r * columns;
    for (let c = 0; c < columns; c++) sum += matrix[first + c]! * x[c]!;
    out[r] = sum;
  }
}

function softmax(row: Float32Array): void {
  const largest = row.reduce((a, b) => Math.max(a, b), Number.NEGATIVE_INFINITY);
  let sum = 0;
  for (let i = 0; i < row.length; i++) {
    row[i] = Math.exp(row[i]! - largest);
    sum += row[i]!;
  }
  for (let i = 0; i < row.length; i++) row[i]! /= sum;
}
