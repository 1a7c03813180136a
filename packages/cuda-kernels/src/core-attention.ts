/**
 * Core attention of one attention server on the host: causal, blocked, grouped-query, fp32 sums, results rounded once. The kernel and its
 * formulas are in native/core/attention/core_attention.hpp; here tensors are checked and launched on a host stream.
 */
import {
  type AbortOptions,
  checkAttached,
  checkInteger,
  type DType,
  EpError,
  invalid,
  rowLayout,
  type Tensor,
} from '@ep/core';
import {
  codeOfStatus,
  EP_DTYPE_BF16,
  EP_DTYPE_F32,
  type NativeHostStream,
  type NativeRows,
  nativePlaceOf,
  type OperationId,
} from '@ep/native';
import type { ServerLayout } from '@ep/plan';
import { checkObject, hasArrays } from './check-spec.js';
import { HostStream } from './host-stream.js';

export type AttentionDType = 'f32' | 'bf16';

/**
 * Which queries read which keys. Group k has the query rows `qRow[k] .. + qLength[k]` and the key-value rows `kvRow[k] .. + kvLength[k]`;
 * its query t sees the first `kvLength - qLength + t + 1` of them. Groups may share key-value rows, never query rows.
 */
export interface AttentionGroups {
  readonly qRow: Int32Array;
  readonly qLength: Int32Array;
  readonly kvRow: Int32Array;
  readonly kvLength: Int32Array;
}

/** Q, O: [query rows, heads, head dimension]. K, V: [key-value rows, kv heads, head dimension]. lse: f32 [query rows, heads]. */
export interface AttentionForwardTensors {
  readonly q: Tensor<AttentionDType>;
  readonly k: Tensor<AttentionDType>;
  readonly v: Tensor<AttentionDType>;
  readonly o: Tensor<AttentionDType>;
  readonly lse: Tensor<'f32'>;
}

/** `o` and `lse` are those of the forward pass; dQ, dK and dV are written, shaped like q, k and v. */
export interface AttentionBackwardTensors extends AttentionForwardTensors {
  readonly dO: Tensor<AttentionDType>;
  readonly dQ: Tensor<AttentionDType>;
  readonly dK: Tensor<AttentionDType>;
  readonly dV: Tensor<AttentionDType>;
}

export interface AttentionOptions extends AbortOptions {
  /** Default 1 / sqrt(head dimension). */
  readonly scale?: number;
  /** Threads of the one call, the stream's own included. Default 1. Results do not depend on it. */
  readonly threads?: number;
}

/** Of the addon. @internal */
export const ATTENTION_DTYPES: Readonly<Record<AttentionDType, number>> = { f32: EP_DTYPE_F32, bf16: EP_DTYPE_BF16 };

/** The groups of a server: one per query shard, as its plan laid them out. */
export function groupsOfServer(layout: ServerLayout): AttentionGroups {
  if (!hasArrays(layout, ['cuSeqlensQ', 'kvLength', 'kvStart'])) {
    throw invalid('layout', { where: 'groupsOfServer', expected: 'the layout of one server of a plan', found: layout });
  }
  const { cuSeqlensQ, groups, kvLength, kvStart } = layout;
  checkInteger(groups, 'layout.groups', 'groupsOfServer');
  checkLengths({ cuSeqlensQ }, groups + 1, 'layout', 'groupsOfServer');
  checkLengths({ kvLength, kvStart }, groups, 'layout', 'groupsOfServer');
  return {
    qRow: cuSeqlensQ.slice(0, groups),
    qLength: Int32Array.from({ length: groups }, (_, k) => cuSeqlensQ[k + 1]! - cuSeqlensQ[k]!),
    kvRow: kvStart,
    kvLength,
  };
}

/**
 * Writes `o` and `lse` for the query rows of the groups, and no other row. Resolves when they are written.
 *
 * All tensors must lie in native memory (`allocateHost`, or a view of symmetric memory); rows may have a stride. Rejects with
 * `EP_INVALID_ARGUMENT` (shapes, dtypes, groups out of range, outputs over inputs: nothing was written), `EP_DETACHED`, `EP_MEMORY_LIMIT`,
 * `EP_CLOSED`, or the caller's `signal.reason` (outputs are then partly written).
 */
export async function attentionForward(
  stream: HostStream,
  groups: AttentionGroups,
  tensors: AttentionForwardTensors,
  options: AttentionOptions = {},
): Promise<void> {
  const where = 'attentionForward';
  checkCall(where, stream, tensors, FORWARD, options);
  const description = { ...problemOf(where, groups, tensors, options), ...forwardRows(where, tensors) };
  await finish(where, stream, (queue) => queue.attentionForward(description), options);
}

/** Writes dQ for the query rows of the groups, and every row of dK and dV: zero where no group reads. Otherwise as `attentionForward`. */
export async function attentionBackward(
  stream: HostStream,
  groups: AttentionGroups,
  tensors: AttentionBackwardTensors,
  options: AttentionOptions = {},
): Promise<void> {
  const where = 'attentionBackward';
  checkCall(where, stream, tensors, BACKWARD, options);
  const { q, k } = tensors;
  const description = {
    ...problemOf(where, groups, tensors, options),
    ...forwardRows(where, tensors),
    dO: rowsOfTensor(where, 'dO', tensors.dO, q.dtype, q.shape),
    dQ: rowsOfTensor(where, 'dQ', tensors.dQ, q.dtype, q.shape),
    dK: rowsOfTensor(where, 'dK', tensors.dK, k.dtype, k.shape),
    dV: rowsOfTensor(where, 'dV', tensors.dV, k.dtype, k.shape),
  };
  await finish(where, stream, (queue) => queue.attentionBackward(description), options);
}

const FORWARD = ['q', 'k', 'v', 'o', 'lse'] as const;
const BACKWARD = [...FORWARD, 'dO', 'dQ', 'dK', 'dV'] as const;

function checkCall(where: string, stream: unknown, tensors: unknown, names: readonly string[], options: unknown): void {
  if (!(stream instanceof HostStream)) throw invalid('stream', { where, expected: 'a HostStream', found: stream });
  checkObject(tensors, 'tensors', `an object with ${names.join(', ')}`, where);
  for (const name of names) {
    const tensor = tensors[name];
    checkObject(tensor, name, 'a tensor', where);
    if (!Array.isArray(tensor.shape))
      throw invalid(`${name}.shape`, { where, expected: 'extents', found: tensor.shape });
  }
  checkObject(options, 'options', 'an object with scale, threads and signal', where);
}

function problemOf(
  where: string,
  groups: AttentionGroups,
  tensors: AttentionForwardTensors,
  options: AttentionOptions,
) {
  const { q, k } = tensors;
  if (!Object.hasOwn(ATTENTION_DTYPES, q.dtype))
    throw invalid('q.dtype', { where, expected: 'f32 or bf16', found: q.dtype });
  for (const [name, { shape }] of [
    ['q', q],
    ['k', k],
  ] as const) {
    if (shape.length !== 3)
      throw invalid(`${name}.shape`, { where, expected: '[rows, heads, head dimension]', found: shape });
  }
  const [qRows, qHeads, headDim] = q.shape as readonly [number, number, number];
  const [kvRows, kvHeads, kvDim] = k.shape as readonly [number, number, number];
  if (kvDim !== headDim) {
    throw invalid('k.shape', { where, expected: `a head dimension of ${headDim}, as q has`, found: k.shape });
  }
  if (kvHeads < 1 || qHeads % kvHeads !== 0) {
    throw invalid('q.shape', { where, expected: `a multiple of k's ${kvHeads} heads`, found: q.shape });
  }
  const scale = options.scale ?? 1 / Math.sqrt(headDim);
  if (!Number.isFinite(scale)) throw invalid('scale', { where, expected: 'a finite number', found: scale });
  const threads = checkInteger(options.threads ?? 1, 'threads', where, 1, 1024);
  const dtype = ATTENTION_DTYPES[q.dtype];
  return { dtype, qRows, kvRows, qHeads, kvHeads, headDim, scale, threads, ...listsOf(where, groups, qRows, kvRows) };
}

/** HAZARD: arrays whose buffers are gone are all of one length, 0: as if there were nothing to do. */
function checkLengths(arrays: Readonly<Record<string, Int32Array>>, length: number, of: string, where: string): void {
  for (const [name, values] of Object.entries(arrays)) {
    checkAttached(values, `${where}: ${of}.${name}`);
    if (values.length !== length)
      throw invalid(`${of}.${name}`, { where, expected: `${length} elements`, found: values.length });
  }
}

/** One piece per group: a plan lays a group's keys out as one run. @internal */
export function listsOf(where: string, groups: AttentionGroups, qRows: number, kvRows: number) {
  if (!hasArrays(groups, ['qRow', 'qLength', 'kvRow', 'kvLength'])) {
    throw invalid('groups', { where, expected: 'Int32Arrays qRow, qLength, kvRow and kvLength', found: groups });
  }
  const { qRow, qLength, kvRow, kvLength } = groups;
  const count = qRow.length;
  checkLengths({ qRow, qLength, kvRow, kvLength }, count, 'groups', where);
  const shards = new BigInt64Array(count * 4);
  const pieces = new BigInt64Array(count * 2);
  for (let k = 0; k < count; k++) {
    checkInteger(qRow[k], `groups.qRow[${k}]`, where, 0, qRows);
    checkInteger(qLength[k], `groups.qLength[${k}]`, where, 0, qRows - qRow[k]!);
    checkInteger(kvRow[k], `groups.kvRow[${k}]`, where, 0, kvRows);
    checkInteger(kvLength[k], `groups.kvLength[${k}]`, where, 0, kvRows - kvRow[k]!);
    shards.set([BigInt(qRow[k]!), BigInt(qLength[k]!), BigInt(k), 1n], k * 4);
    pieces.set([BigInt(kvRow[k]!), BigInt(kvLength[k]!)], k * 2);
  }
  return { shards, pieces };
}

function forwardRows(where: string, { q, k, v, o, lse }: AttentionForwardTensors) {
  return {
    q: rowsOfTensor(where, 'q', q, q.dtype, q.shape),
    k: rowsOfTensor(where, 'k', k, q.dtype, k.shape),
    v: rowsOfTensor(where, 'v', v, q.dtype, k.shape),
    o: rowsOfTensor(where, 'o', o, q.dtype, q.shape),
    lse: rowsOfTensor(where, 'lse', lse, 'f32', q.shape.slice(0, 2)),
  };
}

function rowsOfTensor(where: string, name: string, t: Tensor, dtype: DType, shape: readonly number[]): NativeRows {
  if (t.dtype !== dtype) throw invalid(`${name}.dtype`, { where, expected: dtype, found: t.dtype });
  if (t.shape.length !== shape.length || t.shape.some((extent, axis) => extent !== shape[axis])) {
    throw invalid(`${name}.shape`, { where, expected: `[${shape.join(', ')}]`, found: t.shape });
  }
  checkAttached(t.data, `${where}: ${name}`);
  const layout = rowLayout(t);
  if (layout === undefined) {
    throw invalid(`${name}.strides`, {
      where,
      expected: 'those of contiguous rows that do not overlap',
      found: t.strides,
    });
  }
  const { strideBytes } = layout;
  if (layout.rows === 0) return { byteOffset: 0, strideBytes };
  const place = nativePlaceOf(t.data);
  if (place === undefined) {
    throw invalid(`${name}.data`, {
      where,
      expected: 'in native memory: a view on allocateHost(byteLength) or of a symmetric memory',
      found: t.data,
    });
  }
  return { operand: place.operand, byteOffset: place.byteOffset, strideBytes };
}

async function finish(
  where: string,
  stream: HostStream,
  start: (queue: NativeHostStream) => OperationId,
  { signal }: AbortOptions,
): Promise<void> {
  const outcome = await stream.launch(start, signal);
  if (outcome.status === 0) return;
  throw new EpError(
    codeOfStatus(outcome.status),
    `${where}: ${outcome.message ?? `ended with status ${outcome.status}`}`,
  );
}
