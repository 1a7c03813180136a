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
  /** Of those, the pairs that the donor has to get rid of: the measure of what the bytes buy. */
  readonly useful: number;
  readonly bytes: number;
}

export interface RowBytes {
  readonly qRowBytes: number;
  readonly kvRowBytes: number;
}

/** Who computes what, with the load and the memory of every server; moves are tried on copies (`clone`) and compared. */
export class Assignment {
  readonly load: Float64Array;
  readonly memory: Float64Array;
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
      // Only the piece that reaches furthest decides how much of the document its server holds.
      if (piece.to === reach && to === reach) {
        let left = from > piece.from ? from : 0;
        for (const p of this.#documents[d]!) if (p.server === piece.server && p !== piece && p.to > left) left = p.to;
        kv -= this.#foreign(d, piece.server, reach) - this.#foreign(d, piece.server, left);
      }
    } else {
      kv = this.#foreign(d, server, to) - this.#foreign(d, piece.server, piece.to);
      if (from > piece.from) kv += this.#foreign(d, piece.server, from);
      if (to < piece.to) kv += this.#foreign(d, piece.server, piece.to);
    }
    const pairs = attendedPairs(from, to);
    return { piece, from, to, server, pairs, useful: Math.min(pairs, wanted), bytes: q * qRowBytes + kv * kvRowBytes };
  }

  /** The most memory that the receiving server could need after a move: neighbours that merge may need less. */
  memoryAfter(move: Move): number {
    const { piece, from, to, server } = move;
    const kv = this.#sharing === 'each-query' ? to : Math.max(0, to - this.reach(piece.document, server));
    return this.memory[server]! + (to - from) * this.#rowBytes.qRowBytes + kv * this.#rowBytes.kvRowBytes;
  }

  apply(move: Move): void {
    const { piece, from, to, server } = move;
    const d = piece.document;
    const before = this.#documents[d]!;
    const parts: Piece[] = [];
    if (from > piece.from) parts.push({ ...piece, to: from });
    parts.push({ ...piece, from, to, server });
    if (to < piece.to) parts.push({ ...piece, from: to });
    const at = before.indexOf(piece);
    const after = [...before.slice(0, at), ...parts, ...before.slice(at + 1)];
    for (const t of [piece.server, server]) this.memory[t]! += this.#memoryOf(after, t) - this.#memoryOf(before, t);
    this.#documents[d] = after;
    for (const t of [piece.server, server]) this.#setReach(d, t);
    this.#onServer[piece.server]!.delete(piece);
    for (const part of parts) this.#onServer[part.server]!.add(part);
    this.load[piece.server]! -= move.pairs;
    this.load[server]! += move.pairs;
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
