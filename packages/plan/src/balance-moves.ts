import { RunBound } from './balance-bound.js';
import {
  closestRuns,
  endsTried,
  freestEnd,
  headEnd,
  type RunSettings,
  type Runs,
  RunsFromStart,
  runEnds,
} from './balance-runs.js';
import { type Assignment, better, type Move, type Piece } from './balance-state.js';
import { attendedPairs } from './cost.js';

export interface MoveSettings extends RunSettings {
  readonly cap: Float64Array;
  /** Give a little more than needed where there is room, instead of leaving a crumb for another move. */
  readonly settle: boolean;
}

/** What is known of the pieces on a donor until a move changes them. In the order in which they are tried: of equals the first is moved. */
interface Donor {
  readonly server: number;
  readonly changes: number;
  readonly pieces: readonly Piece[];
  readonly pairs: Float64Array;
  /** 1 where a piece is all of its document and at home: to every other server it is as good as any of the same length. */
  readonly alone: Uint8Array;
  /** Rows that the donor would no longer have to get if it gave the piece away, at most. */
  readonly spared: Float64Array;
  /** Runs of pieces that are alone, for the work that was wanted when they were last looked at. */
  runs?: RunsFromStart;
}

interface Found {
  readonly wanted: number;
  readonly room: number;
  readonly donorChanges: number;
  readonly serverChanges: number;
  readonly move: Move | undefined;
}

/** A piece is passed over only if it is dearer than the best by more than rounding could hide: else `better` has to tell, as it always did. */
const rounding = 1e-6;

/**
 * Finds the cheapest moves of one assignment, looking only at what may have changed since. Every rank makes the same plan from its own search,
 * so what is found may not depend on what is remembered or passed over: a piece is passed over only where `better` would have refused it.
 */
export class MoveSearch {
  readonly #assignment: Assignment;
  readonly #settings: MoveSettings;
  readonly #donors: (Donor | undefined)[] = [];
  readonly #found = new Map<number, Found>();

  constructor(assignment: Assignment, settings: MoveSettings) {
    this.#assignment = assignment;
    this.#settings = settings;
  }

  /**
   * The move from donor to server with the fewest bytes for each pair that the donor has to get rid of (`wanted`); at most `room` pairs, and
   * no more than the server's memory holds.
   */
  cheapest(donor: number, server: number, wanted: number, room: number): Move | undefined {
    const { changes, load } = this.#assignment;
    const donorChanges = changes[donor]!;
    const serverChanges = changes[server]!;
    const key = donor * load.length + server;
    const last = this.#found.get(key);
    // A price depends on what the two servers hold, and on nothing that a move between others changes.
    if (
      last?.donorChanges === donorChanges &&
      last.serverChanges === serverChanges &&
      last.wanted === wanted &&
      last.room === room
    )
      return last.move;
    const move = new PairSearch(this.#assignment, this.#settings, this.#donor(donor), server, wanted, room).best();
    this.#found.set(key, { wanted, room, donorChanges, serverChanges, move });
    return move;
  }

  #donor(server: number): Donor {
    const assignment = this.#assignment;
    const changes = assignment.changes[server]!;
    const known = this.#donors[server];
    if (known?.changes === changes) return known;
    const pieces = [...assignment.piecesOn(server)];
    const donor: Donor = {
      server,
      changes,
      pieces,
      pairs: Float64Array.from(pieces, (p) => attendedPairs(p.from, p.to)),
      alone: Uint8Array.from(pieces, (p) => Number(assignment.isAlone(p))),
      spared: Float64Array.from(pieces, (p) => assignment.foreignRows(p.document, server)),
    };
    this.#donors[server] = donor;
    return donor;
  }
}

/** Looks for the best move of one donor's pieces to one server, in their order. */
class PairSearch {
  readonly #assignment: Assignment;
  readonly #settings: MoveSettings;
  readonly #from: Donor;
  readonly #server: number;
  readonly #wanted: number;
  readonly #room: number;
  /** Work that a move should take; none is good for more. */
  readonly #pairs: number;
  readonly #capped: boolean;
  readonly #bound: RunBound;
  /** Pieces that are alone and reach this far have the same runs, but for those that end near their own end. */
  readonly #common: number;
  readonly #runs: RunsFromStart;
  #best: Move | undefined;
  /** A move with more bytes for each pair than this cannot be better. */
  #dearest = Number.POSITIVE_INFINITY;
  /** What was best when runs, or all that are common, were refused: while it is the best, their likes in other pieces are refused, too. */
  readonly #refusedBy = new Map<Runs, Move>();
  #commonRefusedBy: Move | undefined;

  constructor(
    assignment: Assignment,
    settings: MoveSettings,
    from: Donor,
    server: number,
    wanted: number,
    room: number,
  ) {
    const { cap, block } = settings;
    this.#assignment = assignment;
    this.#settings = settings;
    this.#from = from;
    this.#server = server;
    this.#wanted = wanted;
    this.#room = room;
    this.#pairs = Math.min(wanted, room);
    this.#capped = cap[from.server] !== Number.POSITIVE_INFINITY || cap[server] !== Number.POSITIVE_INFINITY;
    this.#bound = new RunBound(settings, this.#pairs);
    this.#common = Math.ceil(Math.max(headEnd(0, this.#pairs), freestEnd(this.#pairs, settings)) / block) * block;
    if (from.runs?.pairs === this.#pairs) this.#runs = from.runs;
    else this.#runs = new RunsFromStart(this.#pairs, block);
    if (this.#pairs === wanted) from.runs = this.#runs;
  }

  best(): Move | undefined {
    if (this.#room < 1) return undefined;
    const { pieces, pairs, alone } = this.#from;
    for (let i = 0; i < pieces.length; i++) {
      const piece = pieces[i]!;
      if (piece.from === piece.to) continue;
      if (alone[i] === 1 && pairs[i]! > this.#pairs && !this.#capped) this.#tryAlone(piece);
      else if (this.#best === undefined || this.#leastPerPair(i) <= this.#dearest) this.#tryAll(i);
    }
    return this.#best;
  }

  /** A run out of a piece that is as good as any of its length. */
  #tryAlone(piece: Piece): void {
    const { block } = this.#settings;
    const best = this.#best;
    const hasCommon = piece.to >= this.#common;
    if (best !== undefined && hasCommon && best === this.#commonRefusedBy) {
      if (this.#bound.perPair(Math.max(1, piece.to - endsTried * block), piece.to) > this.#dearest) return;
      const lastBlock = Math.floor(piece.to / block) * block;
      if (lastBlock > 0 && lastBlock < piece.to) this.#tryEnd(piece, lastBlock);
      this.#tryEnd(piece, piece.to);
      return;
    }
    if (best !== undefined && this.#bound.perPair(1, piece.to) > this.#dearest) return;
    for (const end of runEnds(piece, this.#pairs, noLandmarks, this.#settings)) this.#tryEnd(piece, end);
    if (hasCommon && best === this.#best) this.#commonRefusedBy = best;
  }

  #tryEnd(piece: Piece, end: number): void {
    const runs = this.#runs.at(end);
    const best = this.#best;
    if (best !== undefined && this.#refusedBy.get(runs) === best) return;
    this.#tryRuns(piece, runs, this.#room);
    if (best !== undefined && best === this.#best) this.#refusedBy.set(runs, best);
  }

  #tryAll(i: number): void {
    const piece = this.#from.pieces[i]!;
    // Where memory is short, less work may still fit.
    for (let most = this.#room; most >= 1; most = Math.min(most, this.#wanted) / 2) {
      const pairs = Math.min(this.#wanted, most);
      let fits = false;
      if (this.#from.pairs[i]! <= pairs) fits = this.#try(piece, piece.from, piece.to);
      else {
        const { block } = this.#settings;
        const reach = this.#assignment.reach(piece.document, this.#server);
        const borders = this.#assignment.homeBorders(piece.document, headEnd(piece.from, pairs), piece.to);
        for (const end of runEnds(piece, pairs, { reach, borders }, this.#settings))
          fits = this.#tryRuns(piece, closestRuns(piece.from, end, pairs, block), most) || fits;
      }
      if (fits || !this.#capped) break;
    }
  }

  #tryRuns(piece: Piece, { below, above }: Runs, room: number): boolean {
    const hasRoom = above !== undefined && attendedPairs(...above) <= room;
    let fits = false;
    if (below !== undefined && !(this.#settings.settle && hasRoom)) fits = this.#try(piece, ...below);
    if (hasRoom) fits = this.#try(piece, ...above) || fits;
    return fits;
  }

  /** Whether the move fits the servers' memory. */
  #try(piece: Piece, from: number, to: number): boolean {
    const move = this.#assignment.price(piece, from, to, this.#server, this.#wanted);
    if (!this.#assignment.fits(move, this.#settings.cap)) return false;
    const best = better(this.#best, move)!;
    if (best !== this.#best) {
      this.#best = best;
      this.#dearest = best.bytes > 0 ? (best.bytes / best.useful) * (1 + rounding) : 0;
    }
    return true;
  }

  /** No run of the piece has fewer bytes for each pair that is useful. */
  #leastPerPair(i: number): number {
    const { pieces, pairs, alone, spared } = this.#from;
    const piece = pieces[i]!;
    // Only where all of its queries have to move, and the keys and values of its whole prefix, is there a bound.
    if (alone[i] === 0 && (piece.home !== piece.server || this.#assignment.knows(piece.document, this.#server)))
      return Number.NEGATIVE_INFINITY;
    const { qRowBytes, kvRowBytes } = this.#settings;
    const all = (piece.to - piece.from) * qRowBytes + (piece.to - spared[i]!) * kvRowBytes;
    const work = pairs[i]!;
    if (work <= this.#pairs && !this.#capped) return all / work;
    const part = this.#bound.perPair(1, piece.to);
    // Only a donor that gives all of a piece away may be spared the rows before it.
    return spared[i] === 0 || work > this.#room ? part : Math.min(part, all / Math.min(work, this.#pairs));
  }
}

/** No other part of the document is anywhere. */
const noLandmarks = { reach: 0, borders: [] } as const;
