/** What one collective dispatch moves, checked against its plan and laid out in a lease before anything moves. */
import { type DType, EpError, elementBytes, elementCount, invalid } from '@ep/core';
import { type NativeDispatchProgram, type NativeReplicaSumProgram, native } from '@ep/native';
import { type DispatchPlan, digest, type GradientReduction, rankDispatch, sizes } from '@ep/plan';
import { checkObject, checkParts, checkReductions, checkSizedParts } from './check-spec.js';
import { inTurns } from './send-order.js';

/** One tensor of a dispatch: rows that travel by a plan. */
export interface PartSpec {
  readonly name: string;
  readonly plan: DispatchPlan;
  readonly dtype: DType;
  /** Shape of one row, for example [heads, head dimension]. */
  readonly rowShape: readonly number[];
  /**
   * Sums the replicas that arrive by a `rev-kv-compact` plan into the home tensor: fp32, replica 0 first, rounded once. Without it the replicas are
   * delivered as they are.
   */
  readonly reduce?: GradientReduction;
}

/** Dtypes that the reduction knows: `EP_DTYPE_*` in native/include/ep/abi/dispatch.h. */
const REDUCIBLE: Partial<Record<DType, number>> = { f32: 1, f16: 2, bf16: 3 };

const ALIGNMENT = 256;
const align = (bytes: number): number => Math.ceil(bytes / ALIGNMENT) * ALIGNMENT;

export interface BoundPart {
  readonly spec: PartSpec;
  readonly rowElements: number;
  readonly rowBytes: number;
  readonly program: NativeDispatchProgram;
  readonly sendRows: number;
  /** Rows that arrive at this rank, and their tensor's place in a lease. */
  readonly receiveRows: number;
  readonly receiveOffset: number;
  /** The largest receive tensor of any rank: what peers' writes are checked against. */
  readonly receiveCapacity: number;
  /** Runs of rows that no sender writes: [first row, rows]. They are zeroed when the lease is handed out. */
  readonly gaps: readonly (readonly [number, number])[];
  readonly sum?: {
    readonly program: NativeReplicaSumProgram;
    readonly dtype: number;
    readonly rows: number;
    readonly offset: number;
  };
}

export interface BoundSpec {
  readonly parts: readonly BoundPart[];
  /** Bytes of a lease that this dispatch uses, the same on every rank. */
  readonly leaseBytes: number;
  /** Chunks that arrive from each rank. */
  readonly chunksFrom: Float64Array;
  readonly bytesSent: number;
  readonly bytesReceived: number;
  /** Everything that must be equal on all ranks, one fact per line. */
  readonly identity: readonly string[];
}

function bindPart(
  spec: PartSpec,
  rank: number,
  chunkBytes: number,
  offset: number,
  chunksFrom: Float64Array,
): { part: BoundPart; end: number } {
  const where = `bind ${spec.name}`;
  const { plan } = spec;
  const rowElements = elementCount(spec.rowShape);
  const rowBytes = rowElements * elementBytes(spec.dtype);
  const planned = sizes(plan, { rowBytes, chunkBytes });
  const mine = rankDispatch(plan, rank);
  for (const [i, peer] of mine.received.peer.entries())
    chunksFrom[peer]! += planned.received.chunks[plan.received.offsets[rank]! + i]!;
  const { binding } = native();
  const { srcOffset, dstOffset, length, dstRank } = inTurns(mine, rank, plan.worldSize, planned.chunkRows);
  const program = new binding.DispatchProgram(srcOffset, dstOffset, length, dstRank, planned.chunkRows);
  const receiveCapacity = plan.recvTokens.reduce((most, rows) => Math.max(most, rows), 0);
  let end = align(offset + receiveCapacity * rowBytes);
  const part = {
    spec,
    rowElements,
    rowBytes,
    program,
    sendRows: mine.sendTokens,
    receiveRows: mine.recvTokens,
    receiveOffset: offset,
    receiveCapacity,
    gaps: gapsOf(plan, rank),
  };
  if (spec.reduce === undefined) return { part, end };
  const dtype = REDUCIBLE[spec.dtype];
  if (dtype === undefined)
    throw invalid('dtype', {
      where,
      expected: `one of ${Object.keys(REDUCIBLE).join(', ')} to reduce`,
      found: spec.dtype,
    });
  const { reduction, homeRows, homeCapacity } = homeReduction(spec.reduce, plan, rank);
  const sum = { program: reduction, dtype, rows: homeRows, offset: end };
  end = align(end + homeCapacity * rowBytes);
  return { part: { ...part, sum }, end };
}

/** The part of a reduction that this rank does, and how many home rows this rank and the largest rank have. */
function homeReduction(reduce: GradientReduction, plan: DispatchPlan, rank: number) {
  const from = reduce.shardOffsets[rank]!;
  const to = reduce.shardOffsets[rank + 1]!;
  const firstSlot = reduce.slotOffsets[from]!;
  const rowsOfRank = Array.from({ length: plan.worldSize }, (_, r) => {
    let rows = 0;
    for (let g = reduce.shardOffsets[r]!; g < reduce.shardOffsets[r + 1]!; g++)
      rows = Math.max(rows, reduce.homeRow[g]! + reduce.lengths[g]!);
    return rows;
  });
  const reduction = new (native().binding.ReplicaSumProgram)(
    reduce.homeRow.subarray(from, to),
    reduce.lengths.subarray(from, to),
    Int32Array.from(reduce.slotOffsets.subarray(from, to + 1), (slot) => slot - firstSlot),
    reduce.compactRow.subarray(firstSlot, reduce.slotOffsets[to]!),
  );
  return { reduction, homeRows: rowsOfRank[rank]!, homeCapacity: Math.max(0, ...rowsOfRank) };
}

/** Rows of this rank's receive tensor that no dispatch writes. */
function gapsOf(plan: DispatchPlan, rank: number): (readonly [number, number])[] {
  const { received, recvTokens } = plan;
  let arriving = 0;
  for (let p = received.offsets[rank]!; p < received.offsets[rank + 1]!; p++) arriving += received.tokens[p]!;
  if (arriving === recvTokens[rank]!) return [];
  const runs: [number, number][] = [];
  for (let e = 0; e < plan.dstRank.length; e++)
    if (plan.dstRank[e] === rank) runs.push([plan.dstOffset[e]!, plan.length[e]!]);
  runs.sort((a, b) => a[0] - b[0]);
  const gaps: [number, number][] = [];
  let row = 0;
  for (const [start, rows] of runs) {
    if (start > row) gaps.push([row, start - row]);
    row = Math.max(row, start + rows);
  }
  if (row < recvTokens[rank]!) gaps.push([row, recvTokens[rank]! - row]);
  return gaps;
}

interface BindPlace {
  readonly rank: number;
  readonly worldSize: number;
  readonly chunkBytes: number;
  readonly leaseBytes: number;
}

/** Throws `EP_INVALID_ARGUMENT` for what is no set of dispatches or does not fit together, `EP_CAPACITY` when a lease is too small. */
export function bindSpecs(
  specs: Readonly<Record<string, readonly PartSpec[]>>,
  place: BindPlace,
): (readonly [string, BoundSpec])[] {
  checkObject(specs, 'specs', 'an object with a list of parts for each dispatch', 'bind');
  return Object.entries(specs).map(([name, parts]) => {
    checkParts(parts, place.worldSize, `bind ${name}`);
    checkReductions(parts, `bind ${name}`);
    return [name, bindSpec(parts, place)] as const;
  });
}

function bindSpec(specs: readonly PartSpec[], place: BindPlace): BoundSpec {
  const chunksFrom = new Float64Array(place.worldSize);
  const parts: BoundPart[] = [];
  let offset = 0;
  let bytesSent = 0;
  let bytesReceived = 0;
  for (const spec of specs) {
    const { part, end } = bindPart(spec, place.rank, place.chunkBytes, offset, chunksFrom);
    parts.push(part);
    offset = end;
    const mine = rankDispatch(spec.plan, place.rank);
    bytesSent += mine.sent.tokens.reduce((sum, rows) => sum + rows, 0) * part.rowBytes;
    bytesReceived += mine.received.tokens.reduce((sum, rows) => sum + rows, 0) * part.rowBytes;
  }
  if (offset > place.leaseBytes) {
    throw new EpError(
      'EP_CAPACITY',
      `bind: the dispatch needs leases of ${offset} bytes, this dispatcher has ${place.leaseBytes} (leaseBytes)`,
      {
        context: { needed: offset, leaseBytes: place.leaseBytes },
      },
    );
  }
  return {
    parts,
    leaseBytes: offset,
    chunksFrom,
    bytesSent,
    bytesReceived,
    identity: [...specs.flatMap(identityOf), `chunks of ${place.chunkBytes} bytes`],
  };
}

function identityOf({ name, plan, dtype, rowShape, reduce }: PartSpec): string[] {
  return [
    `part ${JSON.stringify(name)}`,
    `rows of ${name} are ${dtype} [${rowShape.join(', ')}]`,
    `replicas of ${name} are ${reduce ? 'summed' : 'delivered'}`,
    `plan of ${name} is ${plan.kind}, ${plan.dstRank.length} dispatches, digest ${digest(plan)}`,
  ];
}

/** Bytes of one row. */
export function rowBytesOf(part: Pick<PartSpec, 'dtype' | 'rowShape'>): number {
  checkObject(part, 'part', 'an object with dtype and rowShape', 'rowBytesOf');
  if (!Array.isArray(part.rowShape)) {
    throw invalid('rowShape', { where: 'rowBytesOf', expected: 'a list of extents', found: part.rowShape });
  }
  return elementCount(part.rowShape) * elementBytes(part.dtype);
}

/** Bytes of a lease that a dispatch of these parts needs: what to open a dispatcher with. */
export function leaseBytesFor(specs: readonly Omit<PartSpec, 'name'>[]): number {
  checkSizedParts(specs, ['recvTokens'], 'leaseBytesFor');
  let bytes = 0;
  for (const spec of specs) {
    const rowBytes = rowBytesOf(spec);
    bytes = align(bytes + spec.plan.recvTokens.reduce((most, rows) => Math.max(most, rows), 0) * rowBytes);
    if (spec.reduce === undefined) continue;
    const { reduce } = spec;
    let most = 0;
    for (let g = 0; g < reduce.homeRow.length; g++) most = Math.max(most, reduce.homeRow[g]! + reduce.lengths[g]!);
    bytes = align(bytes + most * rowBytes);
  }
  return bytes;
}
