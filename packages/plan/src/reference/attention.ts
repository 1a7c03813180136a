import { checkInteger, checkNumber, checkNumbers, checkObject } from '../check.js';
import { invalidArgument } from '../error.js';

/**
 * Shape of one causal attention: `queries` rows against `keys` rows, the diagonal aligned to the end (query row i sees keys
 * 0 .. keys - queries + i). Head h of the queries reads key-value head floor(h / (heads / kvHeads)). Rows are row-major:
 * q and out (queries, heads, headDim), k and v (keys, kvHeads, headDim).
 */
export interface AttentionShape {
  readonly queries: number;
  readonly keys: number;
  readonly heads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  /** Default 1 / sqrt(headDim). */
  readonly scale?: number;
}

export interface AttentionForward {
  readonly out: Float64Array;
  /** log of the sum of exponentials of the scaled scores, (queries, heads). */
  readonly logSumExp: Float64Array;
}

export interface AttentionBackward {
  readonly dq: Float64Array;
  readonly dk: Float64Array;
  readonly dv: Float64Array;
}

type Numbers = ArrayLike<number>;

/** out = softmax(scale * q kᵀ, causal) v, in fp64, one query row and head at a time. */
export function attentionForward(shape: AttentionShape, q: Numbers, k: Numbers, v: Numbers): AttentionForward {
  const { queries, heads, headDim, kvRow, qRow, kvHead, first } = checkShape(shape, q, k, v);
  const out = new Float64Array(queries * qRow);
  const logSumExp = new Float64Array(queries * heads);
  for (let i = 0; i < queries; i++) {
    for (let h = 0; h < heads; h++) {
      const scores = scoresOf(shape, q, k, i, h);
      const largest = scores.reduce((a, b) => Math.max(a, b));
      let total = 0;
      for (const s of scores) total += Math.exp(s - largest);
      logSumExp[i * heads + h] = largest + Math.log(total);
      for (let j = 0; j <= first + i; j++) {
        const p = Math.exp(scores[j]! - largest) / total;
        for (let x = 0; x < headDim; x++)
          out[i * qRow + h * headDim + x]! += p * v[j * kvRow + kvHead(h) * headDim + x]!;
      }
    }
  }
  return { out, logSumExp };
}

/**
 * Gradients of `attentionForward` for the output gradient dOut, in fp64. With p the attention weights and
 * ds = p * (dOut · v - Σ p (dOut · v)): dv = Σ p dOut, dq = scale Σ ds k, dk = scale Σ ds q.
 */
export function attentionBackward(
  shape: AttentionShape,
  q: Numbers,
  k: Numbers,
  v: Numbers,
  dOut: Numbers,
): AttentionBackward {
  const { queries, keys, heads, headDim, kvRow, qRow, kvHead, first, scale } = checkShape(shape, q, k, v);
  checkNumbers(dOut, 'dOut', queries * qRow);
  const dq = new Float64Array(queries * qRow);
  const dk = new Float64Array(keys * kvRow);
  const dv = new Float64Array(keys * kvRow);
  for (let i = 0; i < queries; i++) {
    for (let h = 0; h < heads; h++) {
      const scores = scoresOf(shape, q, k, i, h);
      const largest = scores.reduce((a, b) => Math.max(a, b));
      let total = 0;
      for (const s of scores) total += Math.exp(s - largest);
      const weights = scores.map((s) => Math.exp(s - largest) / total);
      const atQ = i * qRow + h * headDim;
      const atKv = (j: number) => j * kvRow + kvHead(h) * headDim;
      const dWeights = weights.map((_, j) => {
        let dot = 0;
        for (let x = 0; x < headDim; x++) dot += dOut[atQ + x]! * v[atKv(j) + x]!;
        return dot;
      });
      let mean = 0;
      for (let j = 0; j <= first + i; j++) mean += weights[j]! * dWeights[j]!;
      for (let j = 0; j <= first + i; j++) {
        const ds = weights[j]! * (dWeights[j]! - mean) * scale;
        for (let x = 0; x < headDim; x++) {
          dv[atKv(j) + x]! += weights[j]! * dOut[atQ + x]!;
          dq[atQ + x]! += ds * k[atKv(j) + x]!;
          dk[atKv(j) + x]! += ds * q[atQ + x]!;
        }
      }
    }
  }
  return { dq, dk, dv };
}

function scoresOf(shape: AttentionShape, q: Numbers, k: Numbers, i: number, h: number): Float64Array {
  const { queries, keys, heads, kvHeads, headDim } = shape;
  const scale = shape.scale ?? 1 / Math.sqrt(headDim);
  const kvHead = Math.floor(h / (heads / kvHeads));
  const scores = new Float64Array(keys - queries + i + 1);
  for (let j = 0; j < scores.length; j++) {
    let dot = 0;
    for (let x = 0; x < headDim; x++)
      dot += q[(i * heads + h) * headDim + x]! * k[(j * kvHeads + kvHead) * headDim + x]!;
    scores[j] = dot * scale;
  }
  return scores;
}

function checkShape(shape: AttentionShape, q: Numbers, k: Numbers, v: Numbers) {
  checkObject(shape, 'shape');
  const queries = checkInteger(shape.queries, 'queries', 0, 2 ** 31 - 1);
  const keys = checkInteger(shape.keys, 'keys', queries, 2 ** 31 - 1);
  const heads = checkInteger(shape.heads, 'heads', 1, 2 ** 16);
  const kvHeads = checkInteger(shape.kvHeads, 'kvHeads', 1, heads);
  const headDim = checkInteger(shape.headDim, 'headDim', 1, 2 ** 16);
  if (heads % kvHeads !== 0)
    throw invalidArgument(`heads must be a multiple of kvHeads = ${kvHeads}, found ${heads}`, {
      name: 'heads',
      expected: `a multiple of ${kvHeads}`,
      found: heads,
    });
  if (shape.scale !== undefined) checkNumber(shape.scale, 'scale', -Number.MAX_VALUE, Number.MAX_VALUE);
  const qRow = heads * headDim;
  const kvRow = kvHeads * headDim;
  checkNumbers(q, 'q', queries * qRow);
  checkNumbers(k, 'k', keys * kvRow);
  checkNumbers(v, 'v', keys * kvRow);
  const group = heads / kvHeads;
  return {
    queries,
    keys,
    heads,
    headDim,
    qRow,
    kvRow,
    first: keys - queries,
    scale: shape.scale ?? 1 / Math.sqrt(headDim),
    kvHead: (h: number) => Math.floor(h / group),
  };
}
