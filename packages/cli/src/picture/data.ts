/** What the picture shows, from an explanation: numbers only, no drawing. */
import type { Explanation } from '@ep/plan';

/** A run of ranks drawn as one row and column: one rank each while they fit. */
export interface Band {
  readonly first: number;
  readonly last: number;
  readonly label: string;
}

/** More rows than this would be thinner than a line. */
export const mostBands = 64;

export function bandsOf(worldSize: number): Band[] {
  const size = Math.ceil(worldSize / mostBands);
  const bands: Band[] = [];
  for (let first = 0; first < worldSize; first += size) {
    const last = Math.min(worldSize, first + size) - 1;
    bands.push({ first, last, label: first === last ? `${first}` : `${first}-${last}` });
  }
  return bands;
}

export interface TrafficCell {
  readonly from: string;
  readonly to: string;
  readonly bytes: number;
  /** Between a rank and itself: copied, not sent. */
  readonly local: boolean;
  readonly text: string;
}

/** Every pair of bands, those without traffic as 0, so that the matrix has no holes. */
export function trafficOf(
  explanation: Explanation,
  bands: readonly Band[],
  rowBytesQ: number,
  rowBytesKv: number,
): TrafficCell[] {
  const size = bands[0]!.last - bands[0]!.first + 1;
  const remote = new Float64Array(bands.length ** 2);
  const local = new Float64Array(bands.length);
  for (const { from, to, queryTokens, kvTokens } of explanation.traffic) {
    const bytes = queryTokens * rowBytesQ + kvTokens * rowBytesKv;
    const [row, column] = [Math.floor(from / size), Math.floor(to / size)];
    if (from === to) local[row]! += bytes;
    else remote[row * bands.length + column]! += bytes;
  }
  const cells: TrafficCell[] = [];
  for (const [row, from] of bands.entries()) {
    for (const [column, to] of bands.entries()) {
      const sent = remote[row * bands.length + column]!;
      // On the diagonal of single ranks there is nothing but local copies.
      const isLocal = row === column && size === 1;
      const bytes = isLocal ? local[row]! : sent;
      cells.push({ from: from.label, to: to.label, bytes, local: isLocal, text: bytes === 0 ? '' : shortBytes(bytes) });
    }
  }
  return cells;
}

export interface LoadBar {
  readonly rank: string;
  readonly plan: 'at home' | 'as planned';
  /** Attended pairs over the average: 1 is even. */
  readonly load: number;
}

/** Bands of several ranks show their busiest one. */
export function loadOf(explanation: Explanation, bands: readonly Band[]): LoadBar[] {
  const total = explanation.ranks.reduce((sum, rank) => sum + rank.pairsBefore, 0);
  const average = total / explanation.worldSize || 1;
  return bands.flatMap(({ first, last, label }) => {
    const ranks = explanation.ranks.slice(first, last + 1);
    return [
      { rank: label, plan: 'at home' as const, load: Math.max(...ranks.map((r) => r.pairsBefore)) / average },
      { rank: label, plan: 'as planned' as const, load: Math.max(...ranks.map((r) => r.pairsAfter)) / average },
    ];
  });
}

/** Three digits and a decimal unit, as on the legend, for a cell of the matrix. */
export function shortBytes(bytes: number): string {
  const units = ['', 'k', 'M', 'G', 'T'];
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${unit === 0 || value >= 9.95 ? Math.round(value) : value.toFixed(1)}${units[unit]}`;
}
