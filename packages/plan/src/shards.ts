import { checkInt32Array, checkInteger, checkObject, checkOffsets, checkRange, checkRows, maxRows } from './check.js';
import { invalidArgument } from './error.js';

/**
 * The shards of all ranks, home-major: shard `shardOffsets[r] + s` is the s-th contiguous token run in the tensor of rank r.
 * Its index in this table is its global shard index. `shardOffsets` has worldSize + 1 elements; `lengths` are tokens, 0 allowed.
 */
export interface ShardTable {
  readonly worldSize: number;
  readonly shardOffsets: Int32Array;
  readonly lengths: Int32Array;
}

/**
 * Shards that are parts of documents: `document[g]` in [0, documents), and `position[g]` = logical index of shard g in its document
 * (the shards of a document have the positions 0, 1, … in token order, each once). Homes are free: all shards of a document on one
 * rank is MLP-DP, spread over several is MLP-CP.
 */
export interface DocumentShards extends ShardTable {
  readonly documents: number;
  readonly document: Int32Array;
  readonly position: Int32Array;
}

/** Where the shards of a checked table lie: first row in the home tensor, rows of each home tensor. */
export interface ShardRows {
  readonly start: Int32Array;
  readonly tokens: Int32Array;
}

/** Checks a table and finds its rows. Throws EP_INVALID_ARGUMENT, or EP_CAPACITY when a rank has 2^31 tokens or more. */
export function shardRows(shards: ShardTable): ShardRows {
  checkObject(shards, 'shards');
  const worldSize = checkInteger(shards.worldSize, 'worldSize', 1, maxRows - 1);
  const offsets = checkInt32Array(shards.shardOffsets, 'shardOffsets', worldSize + 1);
  const lengths = checkInt32Array(shards.lengths, 'lengths');
  checkOffsets(offsets, 'shardOffsets', lengths.length);
  checkRange(lengths, 'lengths', 0, maxRows);
  const start = new Int32Array(lengths.length);
  const tokens = new Int32Array(worldSize);
  for (let r = 0; r < worldSize; r++) {
    let fill = 0;
    for (let g = offsets[r]!; g < offsets[r + 1]!; g++) {
      start[g] = fill;
      fill += lengths[g]!;
    }
    tokens[r] = checkRows(fill, `the tensor of rank ${r}`, { rank: r });
  }
  return { start, tokens };
}

/** Documents in document order: `shards[offsets[d] + p]` is the global shard index of part p of document d; `context[g]` the tokens before shard g. */
export interface DocumentIndex {
  readonly offsets: Int32Array;
  readonly shards: Int32Array;
  readonly context: Int32Array;
}

/** Checks that documents and positions are complete and finds each document's parts. */
export function documentIndex(shards: DocumentShards): DocumentIndex {
  const n = shards.lengths.length;
  const documents = checkInteger(shards.documents, 'documents', 0, maxRows - 1);
  const document = checkInt32Array(shards.document, 'document', n);
  const position = checkInt32Array(shards.position, 'position', n);
  checkRange(document, 'document', 0, documents - 1);
  const offsets = new Int32Array(documents + 1);
  for (let g = 0; g < n; g++) offsets[document[g]! + 1]!++;
  for (let d = 0; d < documents; d++) offsets[d + 1]! += offsets[d]!;
  const parts = new Int32Array(n).fill(-1);
  for (let g = 0; g < n; g++) {
    const d = document[g]!;
    const count = offsets[d + 1]! - offsets[d]!;
    const p = position[g]!;
    if (p < 0 || p >= count) {
      throw invalidArgument(`position[${g}] must be in [0, ${count}), document ${d} has ${count} shards, found ${p}`, {
        name: 'position',
        index: g,
        document: d,
        expected: `[0, ${count})`,
        found: p,
      });
    }
    const slot = offsets[d]! + p;
    if (parts[slot] !== -1) {
      throw invalidArgument(
        `position[${g}] must be unique in document ${d}, found ${p}, which shard ${parts[slot]} has too`,
        {
          name: 'position',
          index: g,
          document: d,
          expected: 'a position no other shard of the document has',
          found: p,
        },
      );
    }
    parts[slot] = g;
  }
  const context = new Int32Array(n);
  for (let d = 0; d < documents; d++) {
    let tokens = 0;
    for (let i = offsets[d]!; i < offsets[d + 1]!; i++) {
      const g = parts[i]!;
      context[g] = tokens;
      tokens += shards.lengths[g]!;
    }
    checkRows(tokens, `document ${d}`, { document: d });
  }
  return { offsets, shards: parts, context };
}

/** A document-major list of parts; `documentOffsets` has one element more than there are documents. */
export interface DocumentList {
  readonly worldSize: number;
  readonly documentOffsets: Int32Array;
  readonly homeRank: Int32Array;
  readonly lengths: Int32Array;
}

/**
 * Turns a document-major list into a home-major table: on each home the parts lie in list order. `order[g]` is the index in the list of
 * global shard g, so that any array parallel to the list is brought along with `reorder`.
 */
export function shardsOfDocuments(list: DocumentList): { readonly shards: DocumentShards; readonly order: Int32Array } {
  checkObject(list, 'list');
  const worldSize = checkInteger(list.worldSize, 'worldSize', 1, maxRows - 1);
  const lengths = checkInt32Array(list.lengths, 'lengths');
  const n = lengths.length;
  const homeRank = checkInt32Array(list.homeRank, 'homeRank', n);
  const documentOffsets = checkInt32Array(list.documentOffsets, 'documentOffsets');
  if (documentOffsets.length === 0)
    throw invalidArgument('documentOffsets must have at least 1 element, found 0', { name: 'documentOffsets' });
  checkOffsets(documentOffsets, 'documentOffsets', n);
  checkRange(homeRank, 'homeRank', 0, worldSize - 1);
  checkRange(lengths, 'lengths', 0, maxRows);
  const documents = documentOffsets.length - 1;
  const shardOffsets = new Int32Array(worldSize + 1);
  for (let i = 0; i < n; i++) shardOffsets[homeRank[i]! + 1]!++;
  for (let r = 0; r < worldSize; r++) shardOffsets[r + 1]! += shardOffsets[r]!;
  const next = shardOffsets.slice(0, worldSize);
  const order = new Int32Array(n);
  const document = new Int32Array(n);
  const position = new Int32Array(n);
  for (let d = 0; d < documents; d++) {
    for (let i = documentOffsets[d]!; i < documentOffsets[d + 1]!; i++) {
      const g = next[homeRank[i]!]!++;
      order[g] = i;
      document[g] = d;
      position[g] = i - documentOffsets[d]!;
    }
  }
  const shards = { worldSize, shardOffsets, lengths: reorder(lengths, order), documents, document, position };
  return { shards: Object.freeze(shards), order };
}

/** `result[g] = values[order[g]]`: brings an array along that is parallel to a document list. */
export function reorder(values: Int32Array, order: Int32Array): Int32Array {
  checkInt32Array(order, 'order');
  checkInt32Array(values, 'values', order.length);
  checkRange(order, 'order', 0, order.length - 1);
  const result = new Int32Array(order.length);
  for (let g = 0; g < order.length; g++) result[g] = values[order[g]!]!;
  return result;
}
