import type { PairTable } from './dispatch-plan.js';

/** Both pair tables of sender-major entries, peers ascending, in time linear in entries + pairs + ranks (but for sorting short lists). */
export function pairTables(
  worldSize: number,
  entryOffsets: Int32Array,
  dstRank: Int32Array,
  length: Int32Array,
): { readonly sent: PairTable; readonly received: PairTable } {
  const offsets = new Int32Array(worldSize + 1);
  const peer = new Int32Array(dstRank.length);
  const tokens = new Int32Array(dstRank.length);
  const dispatches = new Int32Array(dstRank.length);
  const tokensTo = new Int32Array(worldSize);
  const dispatchesTo = new Int32Array(worldSize);
  let pairs = 0;
  for (let r = 0; r < worldSize; r++) {
    const first = pairs;
    for (let e = entryOffsets[r]!; e < entryOffsets[r + 1]!; e++) {
      const t = dstRank[e]!;
      if (dispatchesTo[t]!++ === 0) peer[pairs++] = t;
      tokensTo[t]! += length[e]!;
    }
    if ((pairs - first) * 8 < worldSize) peer.subarray(first, pairs).sort();
    else {
      let at = first;
      for (let t = 0; t < worldSize; t++) if (dispatchesTo[t]! > 0) peer[at++] = t;
    }
    for (let p = first; p < pairs; p++) {
      const t = peer[p]!;
      tokens[p] = tokensTo[t]!;
      dispatches[p] = dispatchesTo[t]!;
      tokensTo[t] = 0;
      dispatchesTo[t] = 0;
    }
    offsets[r + 1] = pairs;
  }
  const sent = Object.freeze({
    offsets,
    peer: peer.slice(0, pairs),
    tokens: tokens.slice(0, pairs),
    dispatches: dispatches.slice(0, pairs),
  });
  return { sent, received: transposePairs(worldSize, sent) };
}

/** Senders are visited in ascending order, so each receiver's list comes out sorted. */
function transposePairs(worldSize: number, table: PairTable): PairTable {
  const pairs = table.peer.length;
  const offsets = new Int32Array(worldSize + 1);
  for (let p = 0; p < pairs; p++) offsets[table.peer[p]! + 1]!++;
  for (let r = 0; r < worldSize; r++) offsets[r + 1]! += offsets[r]!;
  const next = offsets.slice(0, worldSize);
  const peer = new Int32Array(pairs);
  const tokens = new Int32Array(pairs);
  const dispatches = new Int32Array(pairs);
  for (let r = 0; r < worldSize; r++) {
    for (let p = table.offsets[r]!; p < table.offsets[r + 1]!; p++) {
      const to = next[table.peer[p]!]!++;
      peer[to] = r;
      tokens[to] = table.tokens[p]!;
      dispatches[to] = table.dispatches[p]!;
    }
  }
  return Object.freeze({ offsets, peer, tokens, dispatches });
}
