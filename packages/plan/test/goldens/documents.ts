import { reorder, shardsOfDocuments } from '../../src/index.js';

/** Documents as lists of [home, server, position, length]. */
export function shardsOfPlan(worldSize: number, docs: readonly (readonly (readonly number[])[])[]) {
  const parts = docs.flatMap((doc) => [...doc].sort((a, b) => a[2]! - b[2]!));
  const documentOffsets = new Int32Array(docs.length + 1);
  docs.forEach((doc, d) => {
    documentOffsets[d + 1] = documentOffsets[d]! + doc.length;
  });
  const { shards, order } = shardsOfDocuments({
    worldSize,
    documentOffsets,
    homeRank: Int32Array.from(parts, (p) => p[0]!),
    lengths: Int32Array.from(parts, (p) => p[3]!),
  });
  return {
    shards,
    serverRank: reorder(
      Int32Array.from(parts, (p) => p[1]!),
      order,
    ),
  };
}
