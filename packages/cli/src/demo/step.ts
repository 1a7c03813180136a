/**
 * What one rank does in the demo: dispatches its queries, keys and values, computes attention for the queries it serves, returns outputs, goes back
 * the same way with gradients, then compares whole documents with single-rank attention.
 */
import {
  checkInteger,
  createStorage,
  decode,
  elementBytes,
  encode,
  type Member,
  type Storage,
  type SymmetricMemory,
  type Tensor,
  tensor,
} from '@ep/core';
import {
  type AttentionDType,
  type AttentionGroups,
  type AttentionShape,
  attentionBackward,
  attentionForward,
  attentionLeaseBytes,
  bindAttention,
  groupsOfServer,
  HostStream,
  openDispatcher,
} from '@ep/cuda-kernels';
import { allocateHost } from '@ep/native';
import { type AttentionPlan, serverLayout } from '@ep/plan';

import { type DemoTransport, type DemoTransportName, openDemoTransport } from './transports.js';
export type RowKind = 'q' | 'k' | 'v' | 'dO';

/** Rows of the demo's tensors, made from a seed: any rank can make any row of any document. */
export interface RowSource {
  /** Writes `count` rows of a document's tensor, from its token `from` on: [count, heads, head dimension]. */
  fill(kind: RowKind, document: number, from: number, count: number, into: Float32Array): void;
}

export interface StepInput {
  readonly plan: AttentionPlan;
  readonly shape: AttentionShape;
  readonly source: RowSource;
  readonly transport: DemoTransportName;
  /** Threads of this rank's attention kernel. */
  readonly threads?: number;
  /** Called when a phase begins. */
  readonly onPhase?: (phase: Phase) => void;
}

/** In order. Each begins with a barrier, so that a phase's time is its own and not the wait for a slower rank's last one. */
export const PHASES = [
  'set-up',
  'generate',
  'dispatch',
  'attention',
  'return',
  'dispatch dO',
  'attention backward',
  'return gradients',
  'verify',
] as const;
export type Phase = (typeof PHASES)[number];

/** Sums over elements: the relative error by norm of all ranks is sqrt(sum of `squaredError` / sum of `squaredReference`). */
export interface Compared {
  readonly elements: number;
  readonly squaredError: number;
  readonly squaredReference: number;
  readonly largest: number;
}

export const COMPARED = ['o', 'dQ', 'dK', 'dV'] as const;
export type ComparedTensor = (typeof COMPARED)[number];

export interface StepResult {
  readonly rank: number;
  readonly milliseconds: Readonly<Record<Phase, number>>;
  /** Sent by this rank, to itself included. */
  readonly bytesSent: { readonly forward: number; readonly backward: number };
  /** Copied because a source was not in native memory: 0 here. */
  readonly stagedBytes: number;
  readonly compared: Readonly<Record<ComparedTensor, Compared>>;
}

/** Where the parts of a document lie: home rank, first row there, first token, tokens. */
interface Part {
  readonly rank: number;
  readonly row: number;
  readonly token: number;
  readonly tokens: number;
}

function partsOfDocuments(plan: AttentionPlan): Part[][] {
  const { shards } = plan;
  const parts: Part[][] = Array.from({ length: shards.documents }, () => []);
  const byPosition: { document: number; position: number; rank: number; row: number; tokens: number }[] = [];
  for (let rank = 0; rank < shards.worldSize; rank++) {
    let row = 0;
    for (let g = shards.shardOffsets[rank]!; g < shards.shardOffsets[rank + 1]!; g++) {
      byPosition.push({
        document: shards.document[g]!,
        position: shards.position[g]!,
        rank,
        row,
        tokens: shards.lengths[g]!,
      });
      row += shards.lengths[g]!;
    }
  }
  byPosition.sort((a, b) => a.document - b.document || a.position - b.position);
  for (const { document, rank, row, tokens } of byPosition) {
    const before = parts[document]!.at(-1);
    parts[document]!.push({ rank, row, tokens, token: before === undefined ? 0 : before.token + before.tokens });
  }
  return parts;
}

/** Who verifies which document: longest first, each to the rank with the least work so far. Attention costs length squared. */
function verifierOf(parts: readonly (readonly Part[])[], worldSize: number): Int32Array {
  const cost = parts.map((document) => document.reduce((sum, part) => sum + part.tokens, 0) ** 2);
  const load = new Float64Array(worldSize);
  const verifier = new Int32Array(parts.length);
  for (const document of [...cost.keys()].sort((a, b) => cost[b]! - cost[a]!)) {
    const rank = load.indexOf(Math.min(...load));
    verifier[document] = rank;
    load[rank]! += cost[document]!;
  }
  return verifier;
}

/** Zeroed rows in memory that kernels use in place. */
function hostRows<D extends AttentionDType | 'f32'>(dtype: D, shape: readonly number[]): Tensor<D> {
  const count = shape.reduce((product, extent) => product * extent, 1);
  const empty = createStorage(dtype, 0);
  const Carrier = empty.constructor as new (buffer: ArrayBuffer, byteOffset: number, length: number) => Storage[D];
  return tensor(dtype, shape, new Carrier(allocateHost(Math.max(64, count * elementBytes(dtype))), 0, count));
}

function store(dtype: AttentionDType, values: Float32Array, into: Tensor<AttentionDType>, at: number): void {
  if (dtype === 'f32') (into.data as Float32Array).set(values, at);
  else (into.data as Uint16Array).set(encode('bf16', values), at);
}

function asFloats(dtype: AttentionDType, data: Storage[AttentionDType]): Float32Array {
  return dtype === 'f32' ? (data as Float32Array) : Float32Array.from(decode('bf16', data as Uint16Array));
}

const rowShapeOf = (shape: AttentionShape, kind: RowKind): readonly [number, number] =>
  kind === 'k' || kind === 'v' ? [shape.kvHeads, shape.headDim] : [shape.queryHeads, shape.headDim];

/** Rows of one document part after the other, as they lie on a home rank, or a whole document from its start. */
function generate(
  input: StepInput,
  kind: RowKind,
  pieces: readonly { document: number; from: number; count: number }[],
): Tensor<AttentionDType> {
  const { shape, source } = input;
  const rowShape = rowShapeOf(shape, kind);
  const rowElements = rowShape[0] * rowShape[1];
  const rows = pieces.reduce((sum, piece) => sum + piece.count, 0);
  const made = hostRows(shape.dtype, [rows, ...rowShape]);
  const block = 256;
  const values = new Float32Array(block * rowElements);
  let row = 0;
  for (const { document, from, count } of pieces) {
    for (let done = 0; done < count; done += block) {
      const some = Math.min(block, count - done);
      const window = values.subarray(0, some * rowElements);
      source.fill(kind, document, from + done, some, window);
      store(shape.dtype, window, made, row * rowElements);
      row += some;
    }
  }
  return made;
}

class Clock {
  readonly milliseconds: Record<string, number> = {};
  readonly #transport: DemoTransport;
  readonly #onPhase: ((phase: Phase) => void) | undefined;

  constructor(transport: DemoTransport, onPhase: ((phase: Phase) => void) | undefined) {
    this.#transport = transport;
    this.#onPhase = onPhase;
  }

  async phase<T>(name: Phase, body: () => Promise<T> | T): Promise<T> {
    await this.#transport.barrier();
    this.#onPhase?.(name);
    const begin = performance.now();
    const value = await body();
    this.milliseconds[name] = performance.now() - begin;
    return value;
  }
}

/** Results of all ranks in symmetric memory, so that whoever verifies a document can read its rows wherever they live. */
class Results {
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

  static async open(
    transport: DemoTransport,
    shape: AttentionShape,
    homeRows: number,
    longest: number,
  ): Promise<Results> {
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

  publish(name: ComparedTensor, rows: Tensor): void {
    const { dtype } = this.#shape;
    this.memory.view(dtype, this.#offsets[name], rows.data.length).set(rows.data as never);
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

function compare(found: Float32Array, reference: Float32Array): Compared {
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

const add = (a: Compared, b: Compared): Compared => ({
  elements: a.elements + b.elements,
  squaredError: a.squaredError + b.squaredError,
  squaredReference: a.squaredReference + b.squaredReference,
  largest: Number.isNaN(b.largest) || b.largest > a.largest ? b.largest : a.largest,
});

/** Single-rank attention over one whole document in f32, from the same (rounded) inputs. */
async function referenceOf(input: StepInput, document: number, tokens: number, stream: HostStream) {
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

/** Collective: all ranks of `member.worldSize` call it with equal inputs. */
export async function runStep(member: Member, input: StepInput): Promise<StepResult> {
  const { plan, shape } = input;
  const { rank, worldSize } = member;
  checkInteger(rank, 'rank', 'runStep', 0, worldSize - 1);
  const begin = performance.now();
  const transport = await openDemoTransport(input.transport, member);
  try {
    const stream = new HostStream();
    const dispatcher = await openDispatcher(transport, {
      leaseBytes: attentionLeaseBytes(plan, shape),
      leases: 4,
      stream,
    });
    const attention = await bindAttention(dispatcher, plan, shape);
    const parts = partsOfDocuments(plan);
    const tokensOf = parts.map((document) => document.reduce((sum, part) => sum + part.tokens, 0));
    const results = await Results.open(transport, shape, Math.max(...plan.fwdQ.sendTokens), Math.max(0, ...tokensOf));
    const clock = new Clock(transport, input.onPhase);
    clock.milliseconds['set-up'] = performance.now() - begin;

    const home = parts
      .flatMap((document, d) => document.map((part) => ({ ...part, document: d })))
      .filter((part) => part.rank === rank)
      .sort((a, b) => a.row - b.row)
      .map((part) => ({ document: part.document, from: part.token, count: part.tokens }));
    const made = await clock.phase('generate', () => ({
      q: generate(input, 'q', home),
      k: generate(input, 'k', home),
      v: generate(input, 'v', home),
      dO: generate(input, 'dO', home),
    }));

    const served = await clock.phase('dispatch', () => attention.queryKeyValue({ q: made.q, k: made.k, v: made.v }));
    const { q, k, v } = served.tensors as Record<'q' | 'k' | 'v', Tensor<AttentionDType>>;
    const groups = groupsOfServer(serverLayout(plan.layout, rank));
    const o = hostRows(shape.dtype, q.shape);
    const lse = hostRows('f32', [q.shape[0]!, shape.queryHeads]);
    const threads = input.threads ?? 1;
    await clock.phase('attention', () => attentionForward(stream, groups, { q, k, v, o, lse }, { threads }));
    const outputs = await clock.phase('return', () => attention.output({ o }));
    results.publish('o', outputs.tensors.o);
    outputs.release();

    const arrived = await clock.phase('dispatch dO', () => attention.outputGradient({ dO: made.dO }));
    const dO = arrived.tensors.dO as Tensor<AttentionDType>;
    const [dQ, dK, dV] = [
      hostRows(shape.dtype, q.shape),
      hostRows(shape.dtype, k.shape),
      hostRows(shape.dtype, v.shape),
    ];
    await clock.phase('attention backward', () =>
      attentionBackward(stream, groups, { q, k, v, o, lse, dO, dQ, dK, dV }, { threads }),
    );
    arrived.release();
    served.release();
    const gradients = await clock.phase('return gradients', () => attention.gradients({ dQ, dK, dV }));
    for (const name of ['dQ', 'dK', 'dV'] as const) results.publish(name, gradients.tensors[name]);
    gradients.release();

    const verifier = verifierOf(parts, worldSize);
    const none: Compared = { elements: 0, squaredError: 0, squaredReference: 0, largest: 0 };
    const compared: Record<ComparedTensor, Compared> = { o: none, dQ: none, dK: none, dV: none };
    await clock.phase('verify', async () => {
      for (const [document, tokens] of tokensOf.entries()) {
        if (verifier[document] !== rank || tokens === 0) continue;
        const reference = await referenceOf(input, document, tokens, stream);
        for (const name of COMPARED) {
          const found = asFloats(shape.dtype, await results.fetch(transport, name, parts[document]!));
          compared[name] = add(compared[name], compare(found, reference[name].data));
        }
      }
    });
    // Peers may still be reading this rank's results.
    await transport.barrier();
    const stagedBytes = [served, outputs, arrived, gradients].reduce((sum, lease) => sum + lease.stagedBytes, 0);
    await dispatcher.close();
    await stream.close();
    return {
      rank,
      milliseconds: clock.milliseconds as Record<Phase, number>,
      bytesSent: attention.bytesSent,
      stagedBytes,
      compared,
    };
  } finally {
    await transport.close();
  }
}
