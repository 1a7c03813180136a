import type { KvSharing } from './attention.js';
import { attendedPairs } from './cost.js';
import type { DocumentIndex, DocumentShards } from './shards.js';

/** A run of document rows [from, to) that lies within one home shard and is computed on one server. */
export interface Piece {
  readonly document: number;
  /** Global index of the home shard it is part of. */
  readonly shard: number;
  readonly home: number;
  readonly from: number;
  readonly to: number;
  readonly server: number;
}

/** What moving the rows [from, to) of a piece to `server` would do. Bytes and memory are differences. */
export interface Move {
  readonly piece: Piece;
  readonly from: number;
  readonly to: number;
  readonly server: number;
  readonly pairs: number;
  /** What the bytes buy: the pairs, or where memory is short the bytes of it, that the donor has to get rid of. */
  readonly useful: number;
  readonly bytes: number;
}

export interface RowBytes {
  readonly qRowBytes: number;
  readonly kvRowBytes: number;
}

/** Up to this many ranks every pair of servers is considered for a move; beyond, only the most promising recipients. */
export const exhaustiveRanks = 64;

/** Who computes what, with the load and the memory of every server; moves are tried on copies (`clone`) and compared. */
export class Assignment {
  readonly load: Float64Array;
  readonly memory: Float64Array;
  /** How often each server has given or got something: what is known of one holds until this changes. */
  readonly changes: Int32Array;
  /** Pieces of each document in document order. */
  readonly #documents: (readonly Piece[])[];
  readonly #homes: readonly (readonly Piece[])[];
  readonly #onServer: Set<Piece>[];
  /** Furthest end of a piece, by document * servers + server. */
  readonly #reach: Map<number, number>;
  readonly #rowBytes: RowBytes;
  readonly #sharing: KvSharing;

  private constructor(
    homes: readonly (readonly Piece[])[],
    documents: (readonly Piece[])[],
    onServer: Set<Piece>[],
    reach: Map<number, number>,
    load: Float64Array,
    memory: Float64Array,
    rowBytes: RowBytes,
    sharing: KvSharing,
  ) {
    this.#homes = homes;
    this.#documents = documents;
    this.#onServer = onServer;
    this.#reach = reach;
    this.load = load;
    this.memory = memory;
    this.changes = new Int32Array(load.length);
    this.#rowBytes = rowBytes;
    this.#sharing = sharing;
  }

  /** Every shard where it lives. */
  static atHome(shards: DocumentShards, index: DocumentIndex, rowBytes: RowBytes, sharing: KvSharing): Assignment {
    const home = new Int32Array(shards.lengths.length);
    for (let r = 0; r < shards.worldSize; r++) home.fill(r, shards.shardOffsets[r]!, shards.shardOffsets[r + 1]!);
    const homes: Piece[][] = [];
    const onServer = Array.from({ length: shards.worldSize }, () => new Set<Piece>());
    const load = new Float64Array(shards.worldSize);
    for (let d = 0; d < shards.documents; d++) {
      const pieces: Piece[] = [];
      for (let i = index.offsets[d]!; i < index.offsets[d + 1]!; i++) {
        const g = index.shards[i]!;
        const from = index.context[g]!;
        const piece = { document: d, shard: g, home: home[g]!, from, to: from + shards.lengths[g]!, server: home[g]! };
        pieces.push(piece);
        onServer[piece.server]!.add(piece);
        load[piece.server]! += attendedPairs(piece.from, piece.to);
      }
      homes.push(pieces);
    }
    const memory = new Float64Array(shards.worldSize);
    const made = new Assignment(homes, homes.slice(), onServer, new Map(), load, memory, rowBytes, sharing);
    for (let d = 0; d < shards.documents; d++) {
      for (const t of new Set(homes[d]!.map((p) => p.server))) {
        made.#setReach(d, t);
        memory[t]! += made.#memoryOf(homes[d]!, t);
      }
    }
    return made;
  }

  clone(): Assignment {
    return new Assignment(
      this.#homes,
      this.#documents.slice(),
      this.#onServer.map((s) => new Set(s)),
      new Map(this.#reach),
      this.load.slice(),
      this.memory.slice(),
      this.#rowBytes,
      this.#sharing,
    );
  }

  piecesOn(server: number): Iterable<Piece> {
    return this.#onServer[server]!;
  }

  /** The pieces of each document, in document order. */
  get documents(): readonly (readonly Piece[])[] {
    return this.#documents;
  }

  /** Rows [0, reach) of the document's keys and values are on the server already; 0 when it serves none of its queries. */
  reach(document: number, server: number): number {
    return this.#reach.get(document * this.load.length + server) ?? 0;
  }

  /** Whether the piece is all of its document, and at home. */
  isAlone({ document, server, home }: Piece): boolean {
    return this.#documents[document]!.length === 1 && this.#homes[document]!.length === 1 && server === home;
  }

  /** Whether some of the document's rows are on the server already: it is their home, or computes some of them. */
  knows(document: number, server: number): boolean {
    return this.reach(document, server) > 0 || this.#homes[document]!.some((p) => p.home === server);
  }

  /** Rows of the document's keys and values that the server holds and that live elsewhere. */
  foreignRows(document: number, server: number): number {
    return this.#foreign(document, server, this.reach(document, server));
  }

  /** Ends of home parts inside [from, to): where the price of one more KV row may change. */
  *homeBorders(document: number, from: number, to: number): Iterable<number> {
    for (const p of this.#homes[document]!) if (p.to > from && p.to < to) yield p.to;
  }

  /** The price of a move in bytes of the forward pass: rows that change rank more or less than now, on the donor's side too. */
  price(piece: Piece, from: number, to: number, server: number, wanted: number): Move {
    const { qRowBytes, kvRowBytes } = this.#rowBytes;
    const rows = to - from;
    const q = rows * (Number(server !== piece.home) - Number(piece.server !== piece.home));
    let kv: number;
    const d = piece.document;
    if (this.#sharing === 'each-server') {
      const held = this.reach(d, server);
      kv = to > held ? this.#foreign(d, server, to) - this.#foreign(d, server, held) : 0;
      const reach = this.reach(d, piece.server);
      const left = this.#reachWithout(piece, from, to);
      if (left < reach) kv -= this.#foreign(d, piece.server, reach) - this.#foreign(d, piece.server, left);
    } else {
      kv = this.#foreign(d, server, to) - this.#foreign(d, piece.server, piece.to);
      if (from > piece.from) kv += this.#foreign(d, piece.server, from);
      if (to < piece.to) kv += this.#foreign(d, piece.server, piece.to);
    }
    const pairs = attendedPairs(from, to);
    return { piece, from, to, server, pairs, useful: Math.min(pairs, wanted), bytes: q * qRowBytes + kv * kvRowBytes };
  }

  /** Bytes that a move adds to the memory of both servers; less than 0 where it frees some. */
  memoryChange(move: Move): { readonly donor: number; readonly server: number } {
    const { piece, from, to, server } = move;
    if (this.#sharing === 'each-server') {
      const { qRowBytes, kvRowBytes } = this.#rowBytes;
      const freed = this.reach(piece.document, piece.server) - this.#reachWithout(piece, from, to);
      const fetched = Math.max(0, to - this.reach(piece.document, server));
      return {
        donor: (from - to) * qRowBytes - freed * kvRowBytes,
        server: (to - from) * qRowBytes + fetched * kvRowBytes,
      };
    }
    // Here neighbours that meet on a server become one query shard with one prefix, so what a move changes depends on more than its rows.
    const before = this.#documents[piece.document]!;
    const after = replacePiece(before, piece, splitPiece(move));
    const change = (t: number) => this.#memoryOf(after, t) - this.#memoryOf(before, t);
    return { donor: change(piece.server), server: change(server) };
  }

  /** How far the donor reaches in the document once the rows [from, to) of a piece have left it. */
  #reachWithout(piece: Piece, from: number, to: number): number {
    const reach = this.reach(piece.document, piece.server);
    // Only the piece that reaches furthest decides how much of the document its server holds.
    if (piece.to < reach || to < piece.to) return reach;
    let left = from > piece.from ? from : 0;
    for (const p of this.#documents[piece.document]!) {
      if (p.server === piece.server && p !== piece && p.to > left) left = p.to;
    }
    return left;
  }

  /** Whether both servers of a move stay within their caps. The donor can get larger: a split piece may need its prefix twice. */
  fits(move: Move, cap: Float64Array): boolean {
    const donor = move.piece.server;
    if (cap[donor] === Number.POSITIVE_INFINITY && cap[move.server] === Number.POSITIVE_INFINITY) return true;
    const change = this.memoryChange(move);
    return (
      this.memory[move.server]! + change.server <= cap[move.server]! &&
      (change.donor <= 0 || this.memory[donor]! + change.donor <= cap[donor]!)
    );
  }

  apply(move: Move): void {
    const { piece, server } = move;
    const d = piece.document;
    const before = this.#documents[d]!;
    const parts = splitPiece(move);
    const after = replacePiece(before, piece, parts);
    for (const t of [piece.server, server]) this.memory[t]! += this.#memoryOf(after, t) - this.#memoryOf(before, t);
    this.#documents[d] = after;
    for (const t of [piece.server, server]) this.#setReach(d, t);
    this.#onServer[piece.server]!.delete(piece);
    for (const part of parts) this.#onServer[part.server]!.add(part);
    this.load[piece.server]! -= move.pairs;
    this.load[server]! += move.pairs;
    this.changes[piece.server]!++;
    this.changes[server]!++;
  }

  /** Moves rows [from, to) of one piece, wherever it is now, to `server`. `shard` tells an empty piece from its neighbours. */
  assign(document: number, shard: number, from: number, to: number, server: number): void {
    const piece = this.#documents[document]!.find((p) => p.shard === shard && p.from <= from && to <= p.to)!;
    if (piece.server !== server) this.apply(this.price(piece, from, to, server, Number.POSITIVE_INFINITY));
  }

  #setReach(document: number, server: number): void {
    let reach = 0;
    for (const p of this.#documents[document]!) if (p.server === server && p.to > reach) reach = p.to;
    this.#reach.set(document * this.load.length + server, reach);
  }

  /** Rows that change rank in the forward pass. */
  moved(): { readonly q: number; readonly kv: number } {
    let q = 0;
    let kv = 0;
    this.#documents.forEach((pieces, d) => {
      const merged = mergePieces(pieces);
      const servers = new Map<number, number>();
      for (const p of merged) {
        if (p.server !== p.home) q += p.to - p.from;
        if (this.#sharing === 'each-query') kv += this.#foreign(d, p.server, p.to);
        else servers.set(p.server, Math.max(servers.get(p.server) ?? 0, p.to));
      }
      for (const [t, reach] of servers) kv += this.#foreign(d, t, reach);
    });
    return { q, kv };
  }

  /** Rows of [0, end) whose home is another rank. */
  #foreign(document: number, server: number, end: number): number {
    let rows = end;
    for (const p of this.#homes[document]!) {
      if (p.from >= end) break;
      if (p.home === server) rows -= Math.min(p.to, end) - p.from;
    }
    return rows;
  }

  #memoryOf(pieces: readonly Piece[], server: number): number {
    let q = 0;
    let kv = 0;
    for (const p of mergePieces(pieces)) {
      if (p.server !== server) continue;
      q += p.to - p.from;
      kv = this.#sharing === 'each-query' ? kv + p.to : Math.max(kv, p.to);
    }
    return q * this.#rowBytes.qRowBytes + kv * this.#rowBytes.kvRowBytes;
  }
}

/** What becomes of a piece: what stays below the run, the run, what stays above it. */
function splitPiece({ piece, from, to, server }: Move): readonly Piece[] {
  const parts: Piece[] = [];
  if (from > piece.from) parts.push({ ...piece, to: from });
  parts.push({ ...piece, from, to, server });
  if (to < piece.to) parts.push({ ...piece, from: to });
  return parts;
}

function replacePiece(pieces: readonly Piece[], piece: Piece, parts: readonly Piece[]): readonly Piece[] {
  const at = pieces.indexOf(piece);
  return [...pieces.slice(0, at), ...parts, ...pieces.slice(at + 1)];
}

/** The move with fewer bytes for what it is good for; of equals the one that is good for more, then the first. */
export function better(a: Move | undefined, b: Move | undefined): Move | undefined {
  if (a === undefined || b === undefined) return a ?? b;
  const difference = b.bytes * a.useful - a.bytes * b.useful;
  return difference < 0 || (difference === 0 && b.useful > a.useful) ? b : a;
}

/** Neighbours of one home shard on one server become one shard. */
export function mergePieces(pieces: readonly Piece[]): Piece[] {
  const merged: Piece[] = [];
  for (const p of pieces) {
    const last = merged[merged.length - 1];
    if (last !== undefined && last.shard === p.shard && last.server === p.server && last.to === p.from)
      merged[merged.length - 1] = { ...last, to: p.to };
    else merged.push(p);
  }
  return merged;
}
