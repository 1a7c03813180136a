/** What is measured: operations by size, and who takes part in each. */
import { KIB, MIB } from './goals.js';
import { BENCH_OPS, type BenchOp, type Target } from './protocol.js';

export const ALL_SIZES: readonly number[] = [
  8,
  64,
  KIB,
  16 * KIB,
  64 * KIB,
  256 * KIB,
  MIB,
  4 * MIB,
  16 * MIB,
  64 * MIB,
  256 * MIB,
];

/** For `quick`: one of each way in which small and large are treated. */
export const QUICK_SIZES: readonly number[] = [8, 16 * KIB, MIB];

export interface BenchCase {
  readonly op: BenchOp;
  /** Of the larger buffer of a rank, as f32; 0 for a barrier. */
  readonly bytes: number;
}

export type SeriesName =
  | 'group'
  | 'typed'
  | 'awaited'
  | 'native'
  | 'exchange'
  | 'bf16'
  | 'copy'
  | 'copy-non-temporal'
  | 'Open MPI'
  | 'Gloo';

/** Copies are compared where the bound is that of memory, bf16 where it matters how many bytes an element has. */
const COPIED_FROM = 16 * MIB;
const BF16_FROM = MIB;

const ROOM_IN = 2;
/** Our ranks have group memory, ordinary arrays and what the copies use; Gloo's compare with arrays of expected values. */
const BUFFERS_OF_A_RANK = { ours: 3 * ROOM_IN, 'Open MPI': ROOM_IN, Gloo: 2 * ROOM_IN } as const;

/** Bytes that all contenders together need for a size. */
export function memoryFor(bytes: number, ranks: number): number {
  return bytes * ranks * Object.values(BUFFERS_OF_A_RANK).reduce((sum, count) => sum + count, 0);
}

export interface Choice {
  readonly cases: readonly BenchCase[];
  /** What is left out, and why. */
  readonly skipped: readonly string[];
}

/** Operations and sizes in the order in which they are measured: small ones first, so that no buffer is larger than it must be. */
export function chooseCases(
  ranks: number,
  wanted: { readonly ops: readonly BenchOp[]; readonly sizes: readonly number[] },
  memoryAvailable: number,
): Choice {
  const skipped: string[] = [];
  const sizes = wanted.sizes
    .toSorted((a, b) => a - b)
    .filter((bytes) => {
      const needed = memoryFor(bytes, ranks);
      if (needed <= memoryAvailable * 0.8) return true;
      skipped.push(
        `${ranks} ranks, ${sizeText(bytes)}: all contenders together need ${sizeText(needed)} of memory, ${sizeText(memoryAvailable)} are available`,
      );
      return false;
    });
  const cases = BENCH_OPS.filter((op) => wanted.ops.includes(op)).flatMap((op): BenchCase[] => {
    if (op === 'barrier') return [{ op, bytes: 0 }];
    return sizes
      .filter((bytes) => {
        const inBlocks = op !== 'all-reduce' && op !== 'broadcast';
        if (bytes % (inBlocks ? 4 * ranks : 4) === 0) return true;
        skipped.push(`${ranks} ranks, ${op} of ${sizeText(bytes)}: not whole f32 elements for every rank`);
        return false;
      })
      .map((bytes) => ({ op, bytes }));
  });
  return { cases, skipped };
}

/** Our own series of a case, by name. */
export function ourTargets({ op, bytes }: BenchCase): readonly (readonly [SeriesName, Target])[] {
  const target: Target = { variant: 'group', op, dtype: 'f32', elements: bytes / 4 };
  const series: [SeriesName, Target][] = [['group', target]];
  if (op !== 'barrier') series.push(['typed', { ...target, variant: 'typed' }]);
  if (op === 'barrier' || (op === 'all-reduce' && bytes === 8)) {
    for (const variant of ['awaited', 'native', 'exchange'] as const) series.push([variant, { ...target, variant }]);
  }
  if (op !== 'all-reduce') return series;
  if (bytes >= BF16_FROM) series.push(['bf16', { ...target, dtype: 'bf16' }]);
  if (bytes >= COPIED_FROM) {
    series.push(['copy', { ...target, variant: 'copy' }]);
    series.push(['copy-non-temporal', { ...target, variant: 'copy-non-temporal' }]);
  }
  return series;
}

export function peerTarget({ op, bytes }: BenchCase): Target {
  return { variant: 'group', op, dtype: 'f32', elements: bytes / 4 };
}

/** In powers of 1 024. */
export function sizeText(bytes: number): string {
  const [unit, name] =
    bytes >= 2 ** 30 ? [2 ** 30, 'GB'] : bytes >= MIB ? [MIB, 'MB'] : bytes >= KIB ? [KIB, 'KB'] : [1, 'B'];
  return `${Number((bytes / unit).toFixed(1))} ${name}`;
}
