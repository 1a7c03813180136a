/** A batch of documents: the rows that each rank begins with, and single-rank attention to compare with. */
import type { Member, Tensor } from '@ep/core';
import {
  type AttentionGroups,
  type AttentionShape,
  attentionBackward,
  attentionForward,
  HostStream,
} from '@ep/cuda-kernels';
import type { AttentionPlan } from '@ep/plan';
import type { HomeRows } from './machine.js';
import { partsOfDocuments, tokensOfDocuments, verifierOf } from './parts.js';
import { add, COMPARED, type Compared, type ComparedTensor, compare, type Results } from './results.js';
import { asFloats, generate, hostRows, type RowKind, type RowSource } from './rows.js';
import type { DemoTransport } from './transports.js';

export interface BatchInput {
  readonly plan: AttentionPlan;
  readonly shape: AttentionShape;
  readonly source: RowSource;
  /** Of this rank's attention on the host. */
  readonly threads?: number;
}

/** The rows whose home is this rank. */
export function homeRows(input: BatchInput, rank: number): HomeRows {
  const home = partsOfDocuments(input.plan)
    .flatMap((document, d) => document.map((part) => ({ ...part, document: d })))
    .filter((part) => part.rank === rank)
    .sort((a, b) => a.row - b.row)
    .map((part) => ({ document: part.document, from: part.token, count: part.tokens }));
  const made = (kind: RowKind) => generate(input, kind, home);
  return { q: made('q'), k: made('k'), v: made('v'), dO: made('dO') };
}

/** Single-rank attention over one whole document in f32, from the same (rounded) inputs. */
async function referenceOf(input: BatchInput, document: number, tokens: number, stream: HostStream) {
  const { shape } = input;
  const whole = [{ document, from: 0, count: tokens }];
  const widen = (kind: RowKind): Tensor<'f32'> => {
    const rounded = generate(input, kind, whole);
    const wide = hostRows('f32', rounded.shape);
    wide.data.set(asFloats(shape.dtype, rounded.data));
    return wide;
  };
  const [q, k, v, dO] = [widen('q'), widen('k'), widen('v'), widen('dO')];
  const like = (other: Tensor<'f32'>) => hostRows('f32', other.shape);
  const [o, dQ, dK, dV] = [like(q), like(q), like(k), like(v)];
  const lse = hostRows('f32', [tokens, shape.queryHeads]);
  const groups: AttentionGroups = {
    qRow: Int32Array.of(0),
    qLength: Int32Array.of(tokens),
    kvRow: Int32Array.of(0),
    kvLength: Int32Array.of(tokens),
  };
  const threads = input.threads ?? 1;
  await attentionForward(stream, groups, { q, k, v, o, lse }, { threads });
  await attentionBackward(stream, groups, { q, k, v, o, lse, dO, dQ, dK, dV }, { threads });
  return { o, dQ, dK, dV };
}

const NONE: Compared = { elements: 0, squaredError: 0, squaredReference: 0, largest: 0 };

/** Of the documents that fall to this rank, wherever their rows were computed. All ranks have published theirs. */
export async function compareDocuments(
  input: BatchInput,
  { rank, worldSize }: Pick<Member, 'rank' | 'worldSize'>,
  transport: DemoTransport,
  results: Results,
): Promise<Record<ComparedTensor, Compared>> {
  const parts = partsOfDocuments(input.plan);
  const verifier = verifierOf(parts, worldSize);
  const compared: Record<ComparedTensor, Compared> = { o: NONE, dQ: NONE, dK: NONE, dV: NONE };
  const stream = new HostStream();
  for (const [document, tokens] of tokensOfDocuments(parts).entries()) {
    if (verifier[document] !== rank || tokens === 0) continue;
    const reference = await referenceOf(input, document, tokens, stream);
    for (const name of COMPARED) {
      const found = asFloats(input.shape.dtype, await results.fetch(transport, name, parts[document]!));
      compared[name] = add(compared[name], compare(found, reference[name].data));
    }
  }
  await stream.close();
  return compared;
}
