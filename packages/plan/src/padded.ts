import { checkInteger, checkObject, describe, maxRows } from './check.js';
import { invalidArgument, shown } from './error.js';
import { checkDispatchPlan, checkReduction } from './form.js';
import type { DispatchTable, KvPlans } from './query.js';
import type { DocumentShards, ShardTable } from './shards.js';

/** A matrix as the original has it: one row per rank, all rows equally wide. */
export type PaddedMatrix = readonly (ArrayLike<number> | readonly number[])[];
export type PaddedCube = readonly PaddedMatrix[];

/** What a padded query input says: column s of rank r is global shard `shards.shardOffsets[r] + s`. */
export interface PaddedQuery {
  readonly shards: ShardTable;
  readonly dstRank: Int32Array;
}

/**
 * Reads padded lengths and destinations, both (ranks, width), -1 = no destination. Columns after a row's last one with a length or a
 * destination are padding; a column before it is a shard even at length 0, sent where it has a destination (the original drops the
 * last shards of a row with interior padding). `numSeqs` gives the count per rank instead, for rows that end in empty, unsent shards.
 */
export function fromPaddedQuery(
  seqLen: PaddedMatrix,
  dispatch: PaddedMatrix,
  numSeqs?: ArrayLike<number>,
): PaddedQuery {
  const width = checkMatrix(seqLen, 'seqLen');
  const worldSize = seqLen.length;
  checkMatrix(dispatch, 'dispatch', worldSize, width);
  const shards = paddedShards(seqLen, width, numSeqs, (r, s) => dispatch[r]![s]! >= 0);
  const dstRank = new Int32Array(shards.lengths.length);
  for (let r = 0; r < worldSize; r++) {
    for (let s = 0; s < width; s++) {
      const t = checkInteger(dispatch[r]![s], `dispatch[${r}][${s}]`, -1, worldSize - 1);
      const g = shards.shardOffsets[r]! + s;
      if (g < shards.shardOffsets[r + 1]!) dstRank[g] = t;
      else refuseBeyondCount(t >= 0, `dispatch[${r}][${s}]`, r, s, shards);
    }
  }
  return { shards, dstRank };
}

/** The same with a replica axis, (ranks, width, replicas); -1 may stand anywhere on it and replica ids keep their column. */
export function fromPaddedReplicas(
  seqLen: PaddedMatrix,
  dispatch: PaddedCube,
  numSeqs?: ArrayLike<number>,
): { readonly shards: ShardTable; readonly table: DispatchTable } {
  const width = checkMatrix(seqLen, 'seqLen');
  const worldSize = seqLen.length;
  const replicas = checkCube(dispatch, 'dispatch', worldSize, width);
  const shards = paddedShards(seqLen, width, numSeqs, (r, s) =>
    Array.prototype.some.call(dispatch[r]![s]!, (t: number) => t >= 0),
  );
  const offsets = new Int32Array(shards.lengths.length + 1);
  const dstRank: number[] = [];
  const replica: number[] = [];
  for (let r = 0; r < worldSize; r++) {
    for (let s = 0; s < width; s++) {
      const g = shards.shardOffsets[r]! + s;
      const isShard = g < shards.shardOffsets[r + 1]!;
      for (let c = 0; c < replicas; c++) {
        const name = `dispatch[${r}][${s}][${c}]`;
        const t = checkInteger(dispatch[r]![s]![c], name, -1, worldSize - 1);
        if (!isShard) refuseBeyondCount(t >= 0, name, r, s, shards);
        if (t < 0) continue;
        dstRank.push(t);
        replica.push(c);
      }
      if (isShard) offsets[g + 1] = dstRank.length;
    }
  }
  return {
    shards,
    table: {
      replicas: Math.max(1, replicas),
      offsets,
      dstRank: Int32Array.from(dstRank),
      replica: Int32Array.from(replica),
    },
  };
}

/** The original's inputs of a query and key-value plan. */
export interface PaddedAttentionInput {
  readonly seqLen: PaddedMatrix;
  readonly numSeqs: ArrayLike<number>;
  readonly qDispatch: PaddedMatrix;
  /** (ranks, width, C, 2): rank and shard of the c-th query that a KV shard serves. */
  readonly kvToQMapping: readonly PaddedCube[];
  /** (ranks, width, C): the KV shard's position in that query's context. */
  readonly kvToQRank: PaddedCube;
  readonly kvContextSize: PaddedMatrix;
  readonly qToNumKvSeq: PaddedMatrix;
  readonly qToNumKvToken: PaddedMatrix;
}

/**
 * Reads the original's padded inputs back into documents. They say every fact several times (context, counts, mapping, ranks); this
 * derives the documents from the mapping and refuses inputs that contradict it, naming the cell. Only causal prefixes are accepted: KV
 * part p serves exactly the queries p, p+1, … of its document, in that order.
 */
export function fromPaddedAttention(input: PaddedAttentionInput): {
  readonly shards: DocumentShards;
  readonly serverRank: Int32Array;
} {
  checkObject(input, 'input');
  const width = checkMatrix(input.seqLen, 'seqLen');
  const worldSize = input.seqLen.length;
  const { shards, dstRank } = fromPaddedQuery(input.seqLen, input.qDispatch, input.numSeqs);
  const depth = checkCube(input.kvToQRank, 'kvToQRank', worldSize, width);
  checkRowsOf(input.kvToQMapping, 'kvToQMapping', worldSize);
  for (let r = 0; r < worldSize; r++) checkCubeRow(input.kvToQMapping[r]!, `kvToQMapping[${r}]`, width, depth);
  checkMatrix(input.kvContextSize, 'kvContextSize', worldSize, width);
  checkMatrix(input.qToNumKvSeq, 'qToNumKvSeq', worldSize, width);
  checkMatrix(input.qToNumKvToken, 'qToNumKvToken', worldSize, width);
  const n = shards.lengths.length;
  const document = new Int32Array(n).fill(-1);
  const position = new Int32Array(n);
  let documents = 0;
  const target = (r: number, s: number, c: number): number => {
    const cell = input.kvToQMapping[r]![s]![c]!;
    const name = `kvToQMapping[${r}][${s}][${c}]`;
    if (describe(cell).startsWith('an array') ? cell.length !== 2 : !ArrayBuffer.isView(cell) || cell.length !== 2) {
      throw invalidArgument(`${name} must be a pair (rank, shard), found ${describe(cell)}`, { name, found: cell });
    }
    const rank = checkInteger(cell[0], `${name}[0]`, -1, worldSize - 1);
    const shard = checkInteger(cell[1], `${name}[1]`, -1, width - 1);
    if (rank < 0 !== shard < 0) throw contradiction(name, 'a rank and a shard, or -1 for both', `${rank}, ${shard}`);
    if (rank < 0) return -1;
    const g = shards.shardOffsets[rank]! + shard;
    if (g >= shards.shardOffsets[rank + 1]!) {
      throw contradiction(
        name,
        `a shard of rank ${rank}, which has ${shards.shardOffsets[rank + 1]! - shards.shardOffsets[rank]!}`,
        shard,
      );
    }
    return g;
  };
  const shardsOf = (r: number) => shards.shardOffsets[r + 1]! - shards.shardOffsets[r]!;
  // A first part (rank 0 in the context of its queries) lists the whole document in order.
  for (let r = 0; r < worldSize; r++) {
    for (let s = 0; s < shardsOf(r); s++) {
      if (input.kvToQRank[r]![s]![0] !== 0) continue;
      for (let c = 0; c < depth; c++) {
        const g = target(r, s, c);
        if (g < 0) break;
        if (document[g] !== -1)
          throw contradiction(
            `kvToQMapping[${r}][${s}][${c}]`,
            'a query of no other document',
            `shard ${g} of document ${document[g]}`,
          );
        document[g] = documents;
        position[g] = c;
      }
      documents++;
    }
  }
  const parts = new Map<number, number>();
  for (let g = 0; g < n; g++) parts.set(document[g]! * n + position[g]!, g);
  for (let r = 0; r < worldSize; r++) {
    for (let s = 0; s < shardsOf(r); s++) {
      const g = shards.shardOffsets[r]! + s;
      if (document[g] === -1)
        throw contradiction(
          `kvToQMapping`,
          `shard ${s} of rank ${r} in the list of its document's first part`,
          'nowhere',
        );
      if (dstRank[g]! < 0) throw contradiction(`qDispatch[${r}][${s}]`, 'a server for every query shard', -1);
      let context = 0;
      for (let p = 0; p < position[g]!; p++) context += shards.lengths[parts.get(document[g]! * n + p)!]!;
      expectCell(input.kvContextSize, 'kvContextSize', r, s, context);
      expectCell(input.qToNumKvSeq, 'qToNumKvSeq', r, s, position[g]! + 1);
      expectCell(input.qToNumKvToken, 'qToNumKvToken', r, s, context + shards.lengths[g]!);
      for (let c = 0; c < depth; c++) {
        const found = target(r, s, c);
        const expected = parts.get(document[g]! * n + position[g]! + c) ?? -1;
        if (found !== expected)
          throw contradiction(
            `kvToQMapping[${r}][${s}][${c}]`,
            `global shard ${expected}, the next query of document ${document[g]}`,
            found,
          );
        const rank = input.kvToQRank[r]![s]![c];
        const expectedRank = expected < 0 ? -1 : position[g]!;
        if (rank !== expectedRank) throw contradiction(`kvToQRank[${r}][${s}][${c}]`, expectedRank, rank);
      }
    }
  }
  return { shards: { ...shards, documents, document, position }, serverRank: dstRank };
}

/** The dense (shards, replicas) mask of the original, by global shard index: 1 where the replica exists. */
export function replicaMask(plans: KvPlans): Uint8Array {
  checkObject(plans, 'plans');
  checkDispatchPlan(plans.fwdKv, 'plans.fwdKv');
  checkReduction(plans.reduction, 'plans.reduction');
  const { slotOffsets, replica } = plans.reduction;
  const shards = slotOffsets.length - 1;
  const mask = new Uint8Array(shards * plans.fwdKv.replicas);
  for (let g = 0; g < shards; g++) {
    for (let e = slotOffsets[g]!; e < slotOffsets[g + 1]!; e++) mask[g * plans.fwdKv.replicas + replica[e]!] = 1;
  }
  return mask;
}

function paddedShards(
  seqLen: PaddedMatrix,
  width: number,
  numSeqs: ArrayLike<number> | undefined,
  sent: (r: number, s: number) => boolean,
): ShardTable {
  const worldSize = seqLen.length;
  if (numSeqs !== undefined && !isRow(numSeqs)) throw contradiction('numSeqs', 'a row of numbers', describe(numSeqs));
  if (numSeqs !== undefined && numSeqs.length !== worldSize) {
    throw invalidArgument(`numSeqs must have ${worldSize} elements, found ${numSeqs.length}`, {
      name: 'numSeqs',
      expected: worldSize,
      found: numSeqs.length,
    });
  }
  const shardOffsets = new Int32Array(worldSize + 1);
  const lengths: number[] = [];
  for (let r = 0; r < worldSize; r++) {
    let count = 0;
    for (let s = 0; s < width; s++) {
      const length = checkInteger(seqLen[r]![s], `seqLen[${r}][${s}]`, 0, maxRows);
      if (length > 0 || sent(r, s)) count = s + 1;
    }
    if (numSeqs !== undefined) {
      const given = checkInteger(numSeqs[r], `numSeqs[${r}]`, 0, width);
      if (given < count)
        throw contradiction(
          `numSeqs[${r}]`,
          `at least ${count}, column ${count - 1} has a length or a destination`,
          given,
        );
      count = given;
    }
    for (let s = 0; s < count; s++) lengths.push(seqLen[r]![s]!);
    shardOffsets[r + 1] = lengths.length;
  }
  return { worldSize, shardOffsets, lengths: Int32Array.from(lengths) };
}

function refuseBeyondCount(hasDestination: boolean, name: string, r: number, s: number, shards: ShardTable): void {
  if (!hasDestination) return;
  throw contradiction(
    name,
    `-1, rank ${r} has ${shards.shardOffsets[r + 1]! - shards.shardOffsets[r]!} shards`,
    `a destination for shard ${s}`,
  );
}

function expectCell(matrix: PaddedMatrix, name: string, r: number, s: number, expected: number): void {
  const found = matrix[r]![s];
  if (found !== expected) throw contradiction(`${name}[${r}][${s}]`, expected, found);
}

function contradiction(name: string, expected: unknown, found: unknown) {
  return invalidArgument(`${name} must be ${shown(expected)}, found ${shown(found)}`, { name, expected, found });
}

function checkRowsOf(value: unknown, name: string, rows?: number): asserts value is readonly unknown[] {
  if (!Array.isArray(value))
    throw invalidArgument(`${name} must be an array of one row per rank, found ${describe(value)}`, {
      name,
      found: describe(value),
    });
  if (value.length === 0) throw contradiction(name, 'at least one row', 'none');
  if (rows !== undefined && value.length !== rows) throw contradiction(name, `${rows} rows`, `${value.length}`);
}

function isRow(value: unknown): value is ArrayLike<unknown> {
  return Array.isArray(value) || (ArrayBuffer.isView(value) && !(value instanceof DataView));
}

function checkMatrix(value: unknown, name: string, rows?: number, width?: number): number {
  checkRowsOf(value, name, rows);
  let expected = width;
  for (let r = 0; r < value.length; r++) {
    const row = value[r];
    if (!isRow(row))
      throw invalidArgument(`${name}[${r}] must be a row of numbers, found ${describe(row)}`, {
        name,
        index: r,
        found: describe(row),
      });
    expected ??= row.length;
    if (row.length !== expected) throw contradiction(`${name}[${r}]`, `${expected} wide like the rest`, row.length);
  }
  return expected ?? 0;
}

function checkCube(value: unknown, name: string, rows: number, width: number): number {
  checkRowsOf(value, name, rows);
  let depth: number | undefined;
  for (let r = 0; r < rows; r++) depth = checkCubeRow(value[r], `${name}[${r}]`, width, depth);
  return depth ?? 0;
}

function checkCubeRow(value: unknown, name: string, width: number, depth?: number): number {
  if (!isRow(value))
    throw invalidArgument(`${name} must be a row, found ${describe(value)}`, { name, found: describe(value) });
  if (value.length !== width) throw contradiction(name, `${width} wide`, value.length);
  let expected = depth;
  for (let s = 0; s < width; s++) {
    const cell = value[s];
    if (!isRow(cell))
      throw invalidArgument(`${name}[${s}] must be a row, found ${describe(cell)}`, {
        name: `${name}[${s}]`,
        found: describe(cell),
      });
    expected ??= cell.length;
    if (cell.length !== expected) throw contradiction(`${name}[${s}]`, `${expected} deep like the rest`, cell.length);
  }
  return expected ?? 0;
}
