import type { PairTable } from './dispatch-plan.js';

/** Both pair tables of sender-major entries, peers ascending, in time linear in entries + pairs + ranks (but for sorting short lists). */
export function pairTables(
  worldSize: number,
  entryOffsets: Int32Array,
  dstRank: Int32Array,
  length: Int32Array,
): { readonly sent: PairTable; readonly received: PairTable } {
  const offsets = countPairs(worldSize, entryOffsets, dstRank);
  const pairs = offsets[worldSize]!;
  const peer = new Int32Array(pairs);
  const tokens = new Int32Array(pairs);
  const dispatches = new Int32Array(pairs);
  const tokensTo = new Int32Array(worldSize);
  const dispatchesTo = new Int32Array(worldSize);
  for (let r = 0; r < worldSize; r++) {
    const first = offsets[r]!;
    const end = offsets[r + 1]!;
    const dense = (end - first) * 8 >= worldSize;
    let found = first;
    for (let e = entryOffsets[r]!; e < entryOffsets[r + 1]!; e++) {
      const t = dstRank[e]!;
      const before = dispatchesTo[t]!;
      if (!dense && before === 0) peer[found++] = t;
      dispatchesTo[t] = before + 1;
      tokensTo[t] = tokensTo[t]! + length[e]!;
    }
    if (dense) {
      // Written unconditionally and kept by advancing: a branch here is mispredicted every third time. The last pair of r ends the loop,
      // so nothing is written beyond it.
      for (let t = 0, p = first; p < end; t++) {
        const count = dispatchesTo[t]!;
        peer[p] = t;
        tokens[p] = tokensTo[t]!;
        dispatches[p] = count;
        tokensTo[t] = 0;
        dispatchesTo[t] = 0;
        p += count > 0 ? 1 : 0;
      }
    } else {
      peer.subarray(first, end).sort();
      for (let p = first; p < end; p++) {
        const t = peer[p]!;
        tokens[p] = tokensTo[t]!;
        dispatches[p] = dispatchesTo[t]!;
        tokensTo[t] = 0;
        dispatchesTo[t] = 0;
      }
    }
  }
  const sent = Object.freeze({ offsets, peer, tokens, dispatches });
  return { sent, received: transposePairs(worldSize, sent) };
}

function countPairs(worldSize: number, entryOffsets: Int32Array, dstRank: Int32Array): Int32Array {
  const lastSender = new Int32Array(worldSize).fill(-1);
  const offsets = new Int32Array(worldSize + 1);
  let pairs = 0;
  for (let r = 0; r < worldSize; r++) {
    for (let e = entryOffsets[r]!; e < entryOffsets[r + 1]!; e++) {
      const t = dstRank[e]!;
      pairs += lastSender[t] === r ? 0 : 1;
      lastSender[t] = r;
    }
    offsets[r + 1] = pairs;
  }
  return offsets;
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
