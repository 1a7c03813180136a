import type { KvSharing } from './attention.js';
import { type Assignment, better, exhaustiveRanks, type Move, type Piece, type RowBytes } from './balance-state.js';
import { PlanError } from './error.js';

/** What an assignment within memory caps depends on. */
export interface MemorySettings extends RowBytes {
  readonly block: number;
  readonly cap: Float64Array;
  readonly sharing: KvSharing;
}

/** Recipients that a step looks at beyond `exhaustiveRanks`: those with the most room. */
const roomiestConsidered = 8;

/**
 * An assignment in which no server exceeds its cap: the home assignment where that fits; otherwise that with work moved off the servers
 * that exceed theirs, cheapest bytes first; otherwise, where that gets stuck, every document packed anew, the longest first. None of
 * these is an exhaustive search (packing is NP-hard): EP_CAPACITY says that nothing was found, or that a document fits nowhere at all.
 */
export function withinCaps(home: Assignment, settings: MemorySettings): Assignment {
  const { cap } = settings;
  if (exceeding(home, cap).length === 0) return home;
  refuseLongDocument(home, settings);
  const relieved = home.clone();
  relieve(relieved, settings);
  if (exceeding(relieved, cap).length === 0) return relieved;
  for (const order of ['fewest-bytes', 'tightest'] as const) {
    const packed = pack(home, order, settings);
    if (packed !== undefined && exceeding(packed, cap).length === 0) return packed;
  }
  const server = exceeding(relieved, cap)[0]!;
  const needed = relieved.memory[server]!;
  throw new PlanError(
    'EP_CAPACITY',
    `server ${server} needs ${needed} bytes after all that was found to fit elsewhere moved away (${home.memory[server]} at home), its memory cap is ${cap[server]}: raise memoryBytes or use more servers`,
    { rank: server, needed, available: cap[server], atHome: home.memory[server] },
  );
}

/** Whoever computes the last row of a document holds all of its keys and values, so a document may be too long for every server. */
function refuseLongDocument(home: Assignment, { cap, qRowBytes, kvRowBytes }: MemorySettings): void {
  const largest = cap.indexOf(Math.max(...cap));
  home.documents.forEach((pieces, document) => {
    const rows = pieces[pieces.length - 1]?.to ?? 0;
    const needed = rows === 0 ? 0 : qRowBytes + rows * kvRowBytes;
    if (needed > cap[largest]!) {
      throw new PlanError(
        'EP_CAPACITY',
        `server ${largest} has the largest memory cap, ${cap[largest]} bytes, but the last row of document ${document} needs ${needed} with the keys and values of all ${rows} rows`,
        { rank: largest, needed, available: cap[largest], document },
      );
    }
  });
}

/** Servers above their cap, the one that exceeds it most first. */
function exceeding({ memory }: Assignment, cap: Float64Array): number[] {
  const over = (t: number) => memory[t]! - cap[t]!;
  return [...memory.keys()].filter((t) => over(t) > 0).sort((a, b) => over(b) - over(a) || a - b);
}

/** Moves what costs the fewest bytes for the memory it frees until no server exceeds its cap, or nothing more fits. */
function relieve(assignment: Assignment, settings: MemorySettings): void {
  const { cap } = settings;
  // Every move frees at least a byte of what is too much and none adds to it; stuck donors may be worth another look after the others.
  for (let moved = true; moved; ) {
    moved = false;
    for (const donor of exceeding(assignment, cap)) {
      let best: Move | undefined;
      for (const server of roomiest(assignment, donor, cap)) {
        for (const piece of assignment.piecesOn(donor)) {
          for (const [from, to] of freeingRuns(assignment, piece, server, settings))
            best = better(best, freeing(assignment, piece, from, to, server, cap));
        }
      }
      if (best === undefined) continue;
      assignment.apply(best);
      moved = true;
      break;
    }
  }
}

function roomiest({ memory }: Assignment, donor: number, cap: Float64Array): number[] {
  const room = (t: number) => cap[t]! - memory[t]!;
  const servers = [...memory.keys()].filter((t) => t !== donor && room(t) > 0);
  if (memory.length <= exhaustiveRanks) return servers;
  return servers.sort((a, b) => room(b) - room(a) || a - b).slice(0, roomiestConsidered);
}

/** A move priced by the bytes that it frees of those that are too much; undefined when it frees none or does not fit. */
function freeing(
  assignment: Assignment,
  piece: Piece,
  from: number,
  to: number,
  server: number,
  cap: Float64Array,
): Move | undefined {
  const move = assignment.price(piece, from, to, server, Number.POSITIVE_INFINITY);
  const change = assignment.memoryChange(move);
  const useful = Math.min(-change.donor, assignment.memory[piece.server]! - cap[piece.server]!);
  return useful > 0 && assignment.memory[server]! + change.server <= cap[server]! ? { ...move, useful } : undefined;
}

/** The whole piece, and tails and heads that free as much as is too much or take as much as the server has room for. */
function* freeingRuns(
  assignment: Assignment,
  { document, from, to, server: donor }: Piece,
  server: number,
  { block, cap, qRowBytes, kvRowBytes, sharing }: MemorySettings,
): Iterable<readonly [number, number]> {
  yield [from, to];
  const excess = assignment.memory[donor]! - cap[donor]!;
  const room = cap[server]! - assignment.memory[server]!;
  const held = sharing === 'each-server' ? assignment.reach(document, server) : 0;
  const rowBytes = qRowBytes + kvRowBytes;
  // A tail frees queries, and keys too where nothing else on the donor reaches as far; it needs the whole prefix where it goes.
  const tails = [excess / rowBytes, excess / qRowBytes, (room - Math.max(0, to - held) * kvRowBytes) / qRowBytes];
  const starts = [
    ...tails.slice(0, 2).map((rows) => Math.floor((to - rows) / block) * block),
    Math.ceil((to - tails[2]!) / block) * block,
  ];
  for (const start of new Set(starts)) if (start > from && start < to) yield [start, to];
  // A head frees queries only, and needs a shorter prefix where it goes: x rows beyond `held` need qRowBytes * (x - from) + kvRowBytes * (x - held).
  const heads = [
    Math.ceil((from + excess / qRowBytes) / block) * block,
    Math.floor((room + from * qRowBytes + held * kvRowBytes) / rowBytes / block) * block,
    Math.min(held, Math.floor((from + room / qRowBytes) / block) * block),
  ];
  for (const end of new Set(heads)) if (end > from && end < to) yield [from, end];
}

/**
 * Packs all documents from nothing, the longest first, since it has the fewest places to go. A document goes whole where it fits;
 * otherwise it is filled into servers from its end, where rows need the most memory, each as far as its room goes. Undefined when
 * something does not fit.
 */
function pack(home: Assignment, order: 'fewest-bytes' | 'tightest', settings: MemorySettings): Assignment | undefined {
  const packed = home.clone();
  const room = settings.cap.slice();
  const length = (d: number) => home.documents[d]![home.documents[d]!.length - 1]?.to ?? 0;
  const longestFirst = [...home.documents.keys()].sort((a, b) => length(b) - length(a) || a - b);
  for (const d of longestFirst) {
    const left = home.documents[d]!.slice();
    const filled = new Set<number>();
    while (left.length > 0) {
      const server = pickServer(left, room, filled, order, settings);
      if (server === undefined) return undefined;
      filled.add(server);
      fillServer(packed, left, server, room, settings);
    }
  }
  return packed;
}

/** The server that takes all that is left of a document, or else the one with the most room that it has nothing of yet. */
function pickServer(
  left: readonly Piece[],
  room: Float64Array,
  filled: ReadonlySet<number>,
  order: 'fewest-bytes' | 'tightest',
  settings: MemorySettings,
): number | undefined {
  const needed = memoryOfAll(left, settings);
  const homeRows = new Map<number, number>();
  for (const p of left) homeRows.set(p.home, (homeRows.get(p.home) ?? 0) + p.to - p.from);
  const rowsAt = (t: number) => (order === 'tightest' ? 0 : (homeRows.get(t) ?? 0));
  let best: number | undefined;
  for (let t = 0; t < room.length; t++) {
    if (filled.has(t)) continue;
    if (best === undefined) {
      best = t;
      continue;
    }
    const [whole, wholeBest] = [room[t]! >= needed, room[best]! >= needed];
    if (whole !== wholeBest) best = whole ? t : best;
    else if (!whole) best = room[t]! > room[best]! ? t : best;
    else if (rowsAt(t) !== rowsAt(best)) best = rowsAt(t) > rowsAt(best) ? t : best;
    else best = room[t]! < room[best]! ? t : best;
  }
  return best;
}

function memoryOfAll(pieces: readonly Piece[], { qRowBytes, kvRowBytes, sharing }: MemorySettings): number {
  let q = 0;
  let kv = 0;
  for (const p of pieces) {
    q += p.to - p.from;
    kv = sharing === 'each-query' ? kv + p.to : Math.max(kv, p.to);
  }
  return q * qRowBytes + kv * kvRowBytes;
}

/** Moves pieces from the end of `left` to the server while it has room, the last of them in part; takes the room they need. */
function fillServer(
  packed: Assignment,
  left: Piece[],
  server: number,
  room: Float64Array,
  { block, qRowBytes, kvRowBytes, sharing }: MemorySettings,
): void {
  let holdsPrefix = false;
  while (left.length > 0) {
    const piece = left[left.length - 1]!;
    const prefix = sharing === 'each-query' || !holdsPrefix ? piece.to * kvRowBytes : 0;
    const rows = Math.floor((room[server]! - prefix) / qRowBytes);
    const start = piece.to - rows <= piece.from ? piece.from : Math.ceil((piece.to - rows) / block) * block;
    if (rows < 0 || (start >= piece.to && piece.to > piece.from)) return;
    packed.assign(piece.document, piece.shard, start, piece.to, server);
    room[server]! -= prefix + (piece.to - start) * qRowBytes;
    holdsPrefix = true;
    left.pop();
    if (start > piece.from) {
      left.push({ ...piece, to: start });
      return;
    }
  }
}
