import type { Piece, RowBytes } from './balance-state.js';
import { attendedPairs } from './cost.js';

/** A run of rows [from, to) of a piece. */
type Run = readonly [from: number, to: number];

/** Of runs that end at or little before one end: that which comes closest to the wanted work from below, and from above. */
export interface Runs {
  readonly below: Run | undefined;
  readonly above: Run | undefined;
}

/** Where the price of one more row changes: rows that the server holds already, and ends of home parts. */
interface Landmarks {
  readonly reach: number;
  readonly borders: Iterable<number>;
}

export interface RunSettings extends RowBytes {
  readonly block: number;
}

/**
 * Where the cheapest run with so much work ends, if all of its queries and its whole prefix have to move: minimum of
 * qRowBytes * (b - a) + kvRowBytes * b with b^2 - a^2 = 2 * pairs.
 */
export function freestEnd(pairs: number, { qRowBytes, kvRowBytes }: RowBytes): number {
  const ratio = 1 + kvRowBytes / qRowBytes;
  return Math.sqrt((2 * pairs * ratio * ratio) / (ratio * ratio - 1));
}

/** Where runs of a piece with about `pairs` of work, less than it has, may end: each end that could be the cheapest, at the blocks next to it. */
export function runEnds(
  piece: Piece,
  pairs: number,
  { reach, borders }: Landmarks,
  settings: RunSettings,
): Iterable<number> {
  const ends = new Set<number>();
  addBlocks(ends, piece, headEnd(piece.from, pairs), settings);
  addBlocks(ends, piece, freestEnd(pairs, settings), settings);
  addBlocks(ends, piece, reach, settings);
  addBlocks(ends, piece, piece.to, settings);
  for (const end of borders) addBlocks(ends, piece, end, settings);
  return ends;
}

function addBlocks(ends: Set<number>, { from, to }: Piece, end: number, { block }: RunSettings): void {
  for (const rounded of [Math.floor(end / block) * block, Math.ceil(end / block) * block]) {
    const within = Math.min(to, Math.max(rounded, from + 1));
    if (within === to || within % block === 0) ends.add(within);
  }
}

/** End of the longest head of a piece with no more work than `pairs`. */
export function headEnd(from: number, pairs: number): number {
  return rowsWithin(attendedPairs(0, from) + pairs);
}

/** Borders are whole blocks, so the work is met from below or from above; of `tries` ends from `end` down the ones that come closest. */
export function closestRuns(start: number, end: number, pairs: number, block: number, tries = endsTried): Runs {
  let below: Run | undefined;
  let above: Run | undefined;
  let most = 0;
  let least = Number.POSITIVE_INFINITY;
  for (let i = 0, to = end; i < tries && to > start; i++, to = blockBefore(to, block)) {
    const reaching = rowsReaching(attendedPairs(0, to) - pairs);
    const up = reaching <= start ? start : Math.ceil(reaching / block) * block;
    const less = attendedPairs(up, to);
    if (up < to && less <= pairs && less > most) {
      below = [up, to];
      most = less;
    }
    const down = Math.max(start, Math.floor((reaching - 1) / block) * block);
    const more = attendedPairs(down, to);
    if (more >= pairs && more < least) {
      above = [down, to];
      least = more;
    }
  }
  return { below, above };
}

/** Ends that are tried for each that could be the cheapest: blocks that lie below it. */
export const endsTried = 32;

function blockBefore(end: number, block: number): number {
  return Math.floor((end - 1) / block) * block;
}

/** What `closestRuns` says of runs in pieces that begin their documents. These share all ends but their own, and those share all blocks below. */
export class RunsFromStart {
  readonly pairs: number;
  readonly #block: number;
  readonly #atBlock = new Map<number, Runs>();
  readonly #belowEnd = new Map<number, Runs>();

  constructor(pairs: number, block: number) {
    this.pairs = pairs;
    this.#block = block;
  }

  at(end: number): Runs {
    if (end % this.#block === 0) return this.#remembered(this.#atBlock, end, endsTried);
    const own = closestRuns(0, end, this.pairs, this.#block, 1);
    const others = this.#remembered(this.#belowEnd, blockBefore(end, this.#block), endsTried - 1);
    const { below = others.below, above = others.above } = own;
    const nearerBelow = others.below !== undefined && attendedPairs(...others.below) > attendedPairs(...below!);
    const nearerAbove = others.above !== undefined && attendedPairs(...others.above) < attendedPairs(...above!);
    if ((nearerBelow || below === others.below) && (nearerAbove || above === others.above)) return others;
    return { below: nearerBelow ? others.below : below, above: nearerAbove ? others.above : above };
  }

  #remembered(known: Map<number, Runs>, end: number, tries: number): Runs {
    let found = known.get(end);
    if (found === undefined) {
      found = closestRuns(0, end, this.pairs, this.#block, tries);
      known.set(end, found);
    }
    return found;
  }
}

/** Largest n with n * (n + 1) / 2 <= pairs. */
function rowsWithin(pairs: number): number {
  let n = Math.max(0, Math.floor((Math.sqrt(1 + 8 * pairs) - 1) / 2));
  while (attendedPairs(0, n) > pairs) n--;
  while (attendedPairs(0, n + 1) <= pairs) n++;
  return n;
}

/** Smallest n with n * (n + 1) / 2 >= pairs. */
function rowsReaching(pairs: number): number {
  if (pairs <= 0) return 0;
  const n = rowsWithin(pairs);
  return attendedPairs(0, n) >= pairs ? n : n + 1;
}
