import { unwrittenColumn } from './column.js';
import type { PairTable } from './dispatch-plan.js';

/**
 * Both pair tables of sender-major entries, peers ascending. Nothing is sorted: each sender's entries are added up by receiver in arrays of
 * one element per rank, which stay in the first-level cache, and a bit per rank says in ascending order which of them to write down. Time is
 * linear in entries + pairs, plus ranks² / 32 looks at words of bits.
 */
export function pairTables(
  worldSize: number,
  entryOffsets: Int32Array,
  dstRank: Int32Array,
  length: Int32Array,
): { readonly sent: PairTable; readonly received: PairTable } {
  const { sentOffsets, receivedOffsets } = countPairs(worldSize, entryOffsets, dstRank);
  const sent = emptyPairs(sentOffsets);
  const { peer, tokens, dispatches } = sent;
  const tokensTo = new Int32Array(worldSize);
  const dispatchesTo = new Int32Array(worldSize);
  const bits = new Int32Array((worldSize + 31) >> 5);
  let p = 0;
  for (let r = 0; r < worldSize; r++) {
    const end = entryOffsets[r + 1]!;
    for (let e = entryOffsets[r]!; e < end; e++) {
      const t = dstRank[e]!;
      tokensTo[t]! += length[e]!;
      dispatchesTo[t]!++;
      bits[t >> 5]! |= 1 << (t & 31);
    }
    for (let w = 0; w < bits.length; w++) {
      for (let left = bits[w]!; left !== 0; left &= left - 1) {
        const t = 32 * w + 31 - Math.clz32(left & -left);
        peer[p] = t;
        tokens[p] = tokensTo[t]!;
        dispatches[p] = dispatchesTo[t]!;
        tokensTo[t] = 0;
        dispatchesTo[t] = 0;
        p++;
      }
      bits[w] = 0;
    }
  }
  return { sent, received: transposePairs(sent, receivedOffsets) };
}

/** First pair of each sender and of each receiver. */
function countPairs(
  worldSize: number,
  entryOffsets: Int32Array,
  dstRank: Int32Array,
): { readonly sentOffsets: Int32Array; readonly receivedOffsets: Int32Array } {
  const lastSender = new Int32Array(worldSize).fill(-1);
  const sentOffsets = new Int32Array(worldSize + 1);
  const receivedOffsets = new Int32Array(worldSize + 1);
  let pairs = 0;
  for (let r = 0; r < worldSize; r++) {
    const end = entryOffsets[r + 1]!;
    for (let e = entryOffsets[r]!; e < end; e++) {
      const t = dstRank[e]!;
      const opens = lastSender[t] === r ? 0 : 1;
      lastSender[t] = r;
      receivedOffsets[t + 1]! += opens;
      pairs += opens;
    }
    sentOffsets[r + 1] = pairs;
  }
  for (let t = 0; t < worldSize; t++) receivedOffsets[t + 1]! += receivedOffsets[t]!;
  return { sentOffsets, receivedOffsets };
}

/** The same pairs by their other side, whose first pairs are `offsets`. */
function transposePairs(table: PairTable, offsets: Int32Array): PairTable {
  const ranks = offsets.length - 1;
  const transposed = emptyPairs(offsets);
  const { peer, tokens, dispatches } = transposed;
  const next = offsets.slice(0, ranks);
  for (let r = 0; r < ranks; r++) {
    const end = table.offsets[r + 1]!;
    for (let p = table.offsets[r]!; p < end; p++) {
      const other = table.peer[p]!;
      const to = next[other]!;
      next[other] = to + 1;
      peer[to] = r;
      tokens[to] = table.tokens[p]!;
      dispatches[to] = table.dispatches[p]!;
    }
  }
  return transposed;
}

function emptyPairs(offsets: Int32Array): PairTable {
  const pairs = offsets[offsets.length - 1]!;
  return Object.freeze({
    offsets,
    peer: unwrittenColumn(pairs),
    tokens: unwrittenColumn(pairs),
    dispatches: unwrittenColumn(pairs),
  });
}
