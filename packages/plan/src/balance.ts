import type { KvSharing } from './attention.js';
import { withinCaps } from './balance-memory.js';
import { MoveSearch, type MoveSettings } from './balance-moves.js';
import { Assignment, better, exhaustiveRanks, type Move, mergePieces, type Piece } from './balance-state.js';
import { checkInteger, checkObject, describe } from './check.js';
import { maxOverAverage } from './cost.js';
import { invalidArgument } from './error.js';
import { type DocumentShards, documentIndex, shardRows } from './shards.js';

export interface BalanceOptions {
  /** What a query and a key-value row cost to move and to hold, in bytes; only their ratio matters without a memory cap. */
  readonly qRowBytes: number;
  readonly kvRowBytes: number;
  /** A server may have up to (1 + tolerance) times the average work. Default 0, which stops at `resolution` since no kernel could tell. */
  readonly tolerance?: number;
  /** New shard borders lie at multiples of this many tokens from the document's start. Default 1; attention kernels like 128. */
  readonly block?: number;
  /**
   * Cap on the Q plus KV receive tensors of each server, in bytes: one number or one per server. Default: no cap. Counted are all rows that
   * the server computes with, its own home rows included, since they are copied into those tensors: `qRowBytes` for each query row,
   * `kvRowBytes` for each key-value row, once per document with `each-server` (its longest prefix there), once per query shard with
   * `each-query`. Not counted are home tensors, outputs and gradients.
   */
  readonly memoryBytes?: number | ArrayLike<number>;
  /** How keys and values will be sent (see `planAttention`). Default `each-server`. */
  readonly sharing?: KvSharing;
}

export interface BalancedShards {
  /** The home shards, split where a part of one is computed elsewhere; rows stay where they are in the home tensors. */
  readonly shards: DocumentShards;
  readonly serverRank: Int32Array;
  /** Attended pairs per server, with every shard at home and as assigned. */
  readonly loadBefore: Float64Array;
  readonly loadAfter: Float64Array;
  readonly imbalanceBefore: number;
  readonly imbalanceAfter: number;
  /** Rows that change rank in the forward pass, and their bytes. */
  readonly movedQueryTokens: number;
  readonly movedKvTokens: number;
  readonly movedBytes: number;
  /** Q plus KV receive tensors of each server. */
  readonly memoryBytes: Float64Array;
}

/** Work is balanced to this fraction of the average, however small the tolerance: finer would only move bytes. */
export const resolution = 1e-4;

/** Recipients that a step looks at beyond `exhaustiveRanks`: the idlest ones. */
const idlestConsidered = 4;

/** `settle`: give a little more than needed where there is room, instead of leaving a crumb for another move. */
type Search = readonly [strategy: Strategy, settle: boolean];

const strategies = ['cheapest', 'busiest', 'busiest-to-idlest'] as const;
const exhaustiveSearches: readonly Search[] = strategies.flatMap((s) => [[s, false] as const, [s, true] as const]);
const quickSearches: readonly Search[] = [['busiest', true]];

type Strategy = (typeof strategies)[number];

/**
 * Assigns the attention work of documents to servers, starting from every shard being computed at home. Work is attended pairs. While
 * a server is above (1 + tolerance) times the average, it gives part of a shard, or all of it, to servers below. A part is a run out of the
 * shard: the donor keeps the shard's head and tail. For a given amount of work the run is placed where it moves the fewest bytes: high
 * rows have more work per query row, low rows need fewer key-value rows, and with fresh keys and values the cheapest run [a, b) has
 * b / a = 1 + kvRowBytes / qRowBytes. Several greedy orders are tried; the result is the one with the fewest bytes among those within
 * the limit, or the best balance when none is. Deterministic. Not the optimum, which would be a partition problem: over documents of so few rows
 * that all assignments can be tried it moves 8 % more bytes than needed on average, the fewest in two of three, twice as many at worst.
 *
 * A memory cap is never exceeded and comes before balance: servers whose home shards exceed theirs first give work away, at the fewest bytes
 * for the memory freed, and what the caps rule out shows in `imbalanceAfter`, which may then be above `imbalanceBefore`. Throws EP_CAPACITY,
 * naming a server, what it needs and its cap, when no assignment within the caps is found.
 */
export function balance(shards: DocumentShards, options: BalanceOptions): BalancedShards {
  shardRows(shards);
  const index = documentIndex(shards);
  const settings = checkOptions(options, shards.worldSize);
  const { sharing, tolerance, qRowBytes, kvRowBytes } = settings;
  const start = Assignment.atHome(shards, index, { qRowBytes, kvRowBytes }, sharing);
  const first = withinCaps(start, settings);
  let total = 0;
  for (const pairs of start.load) total += pairs;
  const average = total / shards.worldSize;
  const limit = average * (1 + Math.max(tolerance, resolution));

  let best: { readonly assignment: Assignment; readonly excess: number; readonly bytes: number } | undefined;
  for (const [strategy, settle] of shards.worldSize <= exhaustiveRanks ? exhaustiveSearches : quickSearches) {
    const assignment = first.clone();
    shed(assignment, new MoveSearch(assignment, { ...settings, settle }), strategy, limit, average);
    evenOut(assignment, new MoveSearch(assignment, settings), limit, average);
    const { q, kv } = assignment.moved();
    const bytes = q * qRowBytes + kv * kvRowBytes;
    const excess = Math.max(0, Math.max(...assignment.load) - limit);
    if (best === undefined || excess < best.excess || (excess === best.excess && bytes < best.bytes))
      best = { assignment, excess, bytes };
  }
  const { assignment } = best!;
  const { q, kv } = assignment.moved();
  return Object.freeze({
    ...splitShards(shards, assignment),
    loadBefore: start.load,
    loadAfter: assignment.load,
    imbalanceBefore: maxOverAverage(start.load),
    imbalanceAfter: maxOverAverage(assignment.load),
    movedQueryTokens: q,
    movedKvTokens: kv,
    movedBytes: q * qRowBytes + kv * kvRowBytes,
    memoryBytes: assignment.memory,
  });
}

interface Settings extends MoveSettings {
  readonly tolerance: number;
  readonly sharing: KvSharing;
}

/** Moves work from servers above the limit to servers below it, never lifting one above it. */
function shed(assignment: Assignment, search: MoveSearch, strategy: Strategy, limit: number, average: number): void {
  // Donors aim a hair below the limit: a crumb above it would need a move, and a document prefix, of its own.
  const goal = limit - resolution * average;
  // Donors from which nothing fits any more: what they could give is larger than what anyone could take.
  const stuck = new Set<number>();
  const { load } = assignment;
  const considered =
    strategy === 'busiest-to-idlest' ? 1 : load.length <= exhaustiveRanks ? load.length : idlestConsidered;
  for (;;) {
    const donors = ranksBy(
      load,
      (t) => load[t]! > limit && !stuck.has(t),
      -1,
      strategy === 'cheapest' ? load.length : 1,
    );
    if (donors.length === 0) return;
    const recipients = ranksBy(load, (t) => load[t]! < limit, 1, considered);
    let best: Move | undefined;
    for (const donor of donors) {
      for (const server of recipients) {
        best = better(best, search.cheapest(donor, server, load[donor]! - goal, limit - load[server]!));
      }
    }
    if (best !== undefined) assignment.apply(best);
    else if (strategy === 'cheapest') return;
    else stuck.add(donors[0]!);
  }
}

/** When blocks are coarse the busiest server may stay above the limit: halve its distance to the idlest while that helps. */
function evenOut(assignment: Assignment, search: MoveSearch, limit: number, average: number): void {
  for (let step = 0; step < 4 * assignment.load.length; step++) {
    const donor = ranksBy(assignment.load, (t) => assignment.load[t]! > limit, -1, 1)[0];
    const server = ranksBy(assignment.load, () => true, 1, 1)[0]!;
    if (donor === undefined || donor === server) return;
    const distance = assignment.load[donor]! - assignment.load[server]!;
    const move = search.cheapest(donor, server, distance / 2, distance - resolution * average);
    if (move === undefined || Math.min(move.pairs, distance - move.pairs) < resolution * average) return;
    assignment.apply(move);
  }
}

/** The first `count` wanted ranks by load, ascending (1) or descending (-1), ties by rank; no sort where few are asked of many. */
function ranksBy(load: Float64Array, wanted: (rank: number) => boolean, direction: 1 | -1, count: number): number[] {
  const before = (a: number, b: number) => direction * (load[a]! - load[b]!) || a - b;
  const ranks: number[] = [];
  for (let t = 0; t < load.length; t++) {
    if (!wanted(t)) continue;
    if (ranks.length === count && before(t, ranks[count - 1]!) > 0) continue;
    let at = ranks.length < count ? ranks.length : count - 1;
    for (; at > 0 && before(t, ranks[at - 1]!) < 0; at--) ranks[at] = ranks[at - 1]!;
    ranks[at] = t;
  }
  return ranks;
}

function splitShards(
  shards: DocumentShards,
  assignment: Assignment,
): { readonly shards: DocumentShards; readonly serverRank: Int32Array } {
  const partsOf: { readonly piece: Piece; readonly position: number }[][] = Array.from(
    { length: shards.lengths.length },
    () => [],
  );
  let count = 0;
  for (const pieces of assignment.documents) {
    mergePieces(pieces).forEach((piece, position) => {
      partsOf[piece.shard]!.push({ piece, position });
      count++;
    });
  }
  const lengths = new Int32Array(count);
  const document = new Int32Array(count);
  const position = new Int32Array(count);
  const serverRank = new Int32Array(count);
  const shardOffsets = new Int32Array(shards.worldSize + 1);
  let next = 0;
  for (let r = 0; r < shards.worldSize; r++) {
    for (let g = shards.shardOffsets[r]!; g < shards.shardOffsets[r + 1]!; g++) {
      for (const part of partsOf[g]!) {
        lengths[next] = part.piece.to - part.piece.from;
        document[next] = part.piece.document;
        position[next] = part.position;
        serverRank[next++] = part.piece.server;
      }
    }
    shardOffsets[r + 1] = next;
  }
  return {
    shards: Object.freeze({
      worldSize: shards.worldSize,
      shardOffsets,
      lengths,
      documents: shards.documents,
      document,
      position,
    }),
    serverRank,
  };
}

function checkOptions(options: BalanceOptions, worldSize: number): Settings {
  checkObject(options, 'options');
  const { tolerance = 0, block = 1, memoryBytes = Number.POSITIVE_INFINITY, sharing = 'each-server' } = options;
  const qRowBytes = checkInteger(options.qRowBytes, 'qRowBytes', 1, 2 ** 31 - 1);
  const kvRowBytes = checkInteger(options.kvRowBytes, 'kvRowBytes', 1, 2 ** 31 - 1);
  if (typeof tolerance !== 'number' || !(tolerance >= 0))
    throw invalidArgument(`tolerance must be a number of at least 0, found ${describe(tolerance)}`, {
      name: 'tolerance',
      found: tolerance,
    });
  checkInteger(block, 'block', 1, 2 ** 31 - 1);
  if (sharing !== 'each-query' && sharing !== 'each-server') {
    throw invalidArgument(`sharing must be 'each-query' or 'each-server', found ${describe(sharing)}`, {
      name: 'sharing',
      found: sharing,
    });
  }
  if (typeof memoryBytes !== 'number' && memoryBytes.length !== worldSize) {
    throw invalidArgument(`memoryBytes must have ${worldSize} elements, one per server, found ${memoryBytes.length}`, {
      name: 'memoryBytes',
      expected: worldSize,
      found: memoryBytes.length,
    });
  }
  const cap =
    typeof memoryBytes === 'number' ? new Float64Array(worldSize).fill(memoryBytes) : Float64Array.from(memoryBytes);
  cap.forEach((bytes, t) => {
    if (!(bytes >= 0))
      throw invalidArgument(`the memory cap of server ${t} must be at least 0, found ${bytes}`, {
        name: 'memoryBytes',
        rank: t,
        found: bytes,
      });
  });
  return { qRowBytes, kvRowBytes, tolerance, block, cap, sharing, settle: false };
}
