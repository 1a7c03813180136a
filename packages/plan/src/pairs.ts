import type { PairTable } from './dispatch-plan.js';

/** Both pair tables of sender-major entries, peers ascending, in time linear in entries + pairs + ranks. */
export function pairTables(
  worldSize: number,
  entryOffsets: Int32Array,
  dstRank: Int32Array,
  length: Int32Array,
): { readonly sent: PairTable; readonly received: PairTable } {
  const lastSender = new Int32Array(worldSize).fill(-1);
  const offsets = new Int32Array(worldSize + 1);
  let pairs = 0;
  for (let r = 0; r < worldSize; r++) {
    for (let e = entryOffsets[r]!; e < entryOffsets[r + 1]!; e++) {
      const t = dstRank[e]!;
      if (lastSender[t] !== r) {
        lastSender[t] = r;
        pairs++;
      }
    }
    offsets[r + 1] = pairs;
  }
  const peer = new Int32Array(pairs);
  const tokens = new Int32Array(pairs);
  const dispatches = new Int32Array(pairs);
  const pairOf = new Int32Array(worldSize);
  lastSender.fill(-1);
  let next = 0;
  for (let r = 0; r < worldSize; r++) {
    for (let e = entryOffsets[r]!; e < entryOffsets[r + 1]!; e++) {
      const t = dstRank[e]!;
      if (lastSender[t] !== r) {
        lastSender[t] = r;
        peer[next] = t;
        pairOf[t] = next++;
      }
      const p = pairOf[t]!;
      tokens[p]! += length[e]!;
      dispatches[p]!++;
    }
  }
  // Transposing visits senders in ascending order, so each transposition leaves its peers sorted: two of them sort both tables.
  const received = transposePairs(worldSize, { offsets, peer, tokens, dispatches });
  return { sent: transposePairs(worldSize, received), received };
}

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
