import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { DispatchPlan, PairTable } from '../../src/index.js';

const folder = join(import.meta.dirname, 'data');

export type Matrix = number[][];
export type Cube = number[][][];

export function goldenNames(): string[] {
  return readdirSync(folder)
    .map((name) => name.replace(/\.json$/, ''))
    .sort();
}

export function readGolden<T>(name: string): T {
  return JSON.parse(readFileSync(join(folder, `${name}.json`), 'utf8')) as T;
}

/** A metadata record of the original, as the golden files hold it. */
export interface Metadata<T = Matrix> {
  readonly dst_rank: T;
  readonly dst_offset: T;
  readonly seq_len: Matrix;
  readonly num_recv_tokens: Matrix;
  readonly num_seqs: number[];
  readonly num_total_recv_tokens: number[];
  readonly seq_recv_mask: Cube | null;
  readonly recv_seq_lens: Matrix | null;
}

/** The original's (ranks, ranks + 1) matrix out of the sparse receiver-major pairs. */
export function receiveMatrix(plan: DispatchPlan): Matrix {
  return Array.from({ length: plan.worldSize }, (_, t) => {
    const row = new Array<number>(plan.worldSize).fill(0);
    eachPair(plan.received, t, (peer, tokens) => {
      row[peer] = tokens;
    });
    return [...row, row.reduce((a, b) => a + b, 0)];
  });
}

export function eachPair(
  pairs: PairTable,
  rank: number,
  visit: (peer: number, tokens: number, dispatches: number) => void,
): void {
  for (let p = pairs.offsets[rank]!; p < pairs.offsets[rank + 1]!; p++)
    visit(pairs.peer[p]!, pairs.tokens[p]!, pairs.dispatches[p]!);
}

/** Rows of entries, one per sender, padded to the widest: what the original's reverse metadata looks like. */
export function reverseRows(
  plan: DispatchPlan,
  width?: number,
): { dst_rank: Matrix; dst_offset: Matrix; seq_len: Matrix } {
  const rows = Array.from(
    { length: plan.worldSize },
    (_, r) => [plan.entryOffsets[r]!, plan.entryOffsets[r + 1]!] as const,
  );
  const wide = width ?? Math.max(0, ...rows.map(([from, to]) => to - from));
  const padded = (values: Int32Array, pad: number) =>
    rows.map(([from, to]) => [...values.subarray(from, to), ...new Array<number>(wide - (to - from)).fill(pad)]);
  return { dst_rank: padded(plan.dstRank, -1), dst_offset: padded(plan.dstOffset, 0), seq_len: padded(plan.length, 0) };
}

/** Forward entries in a (ranks, width, replicas) cube. */
export function forwardCube(
  plan: DispatchPlan,
  values: Int32Array,
  width: number,
  replicas: number,
  pad: number,
): Cube {
  const cube = Array.from({ length: plan.worldSize }, () =>
    Array.from({ length: width }, () => new Array<number>(replicas).fill(pad)),
  );
  for (let r = 0; r < plan.worldSize; r++) {
    for (let e = plan.entryOffsets[r]!; e < plan.entryOffsets[r + 1]!; e++)
      cube[r]![plan.srcShard[e]!]![plan.replica[e]!] = values[e]!;
  }
  return cube;
}

export function squeeze(cube: Cube): Matrix {
  return cube.map((rows) => rows.map((cell) => cell[0]!));
}

/** Token ids of the goldens' movement: 1000 * rank + index + 1. */
export function tokenIds(tokens: Int32Array): Int32Array[] {
  return Array.from(tokens, (n, r) => Int32Array.from({ length: n }, (_, i) => 1000 * r + i + 1));
}

export const lists = (tensors: readonly Int32Array[]): Matrix => tensors.map((t) => [...t]);
