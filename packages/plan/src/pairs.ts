import type { PairTable } from './dispatch-plan.js';

/**
 * Both pair tables of sender-major entries, peers ascending, in time linear in entries + ranks. Nothing is sorted: entries come by
 * ascending sender, so each receiver's list grows in order, and the receivers' lists, read by ascending receiver, give the senders'.
 */
export function pairTables(
  worldSize: number,
  entryOffsets: Int32Array,
  dstRank: Int32Array,
  length: Int32Array,
): { readonly sent: PairTable; readonly received: PairTable } {
  const { sentOffsets, receivedOffsets } = countPairs(worldSize, entryOffsets, dstRank);
  const received = emptyPairs(receivedOffsets);
  const { peer, tokens, dispatches } = received;
  const lastSender = new Int32Array(worldSize).fill(-1);
  const next = receivedOffsets.slice(0, worldSize);
  for (let r = 0; r < worldSize; r++) {
    const end = entryOffsets[r + 1]!;
    for (let e = entryOffsets[r]!; e < end; e++) {
      const t = dstRank[e]!;
      // Added instead of branched on: whether an entry opens a pair is a coin toss, which the processor would mispredict.
      const after = next[t]! + (lastSender[t] === r ? 0 : 1);
      const p = after - 1;
      next[t] = after;
      lastSender[t] = r;
      peer[p] = r;
      tokens[p]! += length[e]!;
      dispatches[p]!++;
    }
  }
  return { sent: transposePairs(received, sentOffsets), received };
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
    peer: new Int32Array(pairs),
    tokens: new Int32Array(pairs),
    dispatches: new Int32Array(pairs),
  });
}
