import fc from 'fast-check';
import { type DocumentShards, reorder, shardsOfDocuments } from '../src/index.js';

/** Documents with parts on any ranks, any server for each part: uneven, empty parts and empty documents included. */
export interface Placement {
  readonly shards: DocumentShards;
  readonly serverRank: Int32Array;
}

export const worldSizes = fc.oneof(fc.integer({ min: 1, max: 9 }), fc.constantFrom(16, 65, 128));

export interface PlacementBounds {
  readonly maxDocuments?: number;
  readonly maxParts?: number;
  readonly maxLength?: number;
}

export function placements({
  maxDocuments = 12,
  maxParts = 16,
  maxLength = 9,
}: PlacementBounds = {}): fc.Arbitrary<Placement> {
  return worldSizes.chain((worldSize) => {
    // A few ranks get most of the parts, so that others have none: idle homes and idle servers are the interesting ones.
    const rank = fc.oneof(
      fc.integer({ min: 0, max: worldSize - 1 }),
      fc.integer({ min: 0, max: Math.min(2, worldSize - 1) }),
    );
    const part = fc.record({
      home: rank,
      server: rank,
      length: fc.oneof(fc.integer({ min: 0, max: maxLength }), fc.constant(0)),
    });
    return fc.array(fc.array(part, { maxLength: maxParts }), { maxLength: maxDocuments }).map((documents) => {
      const parts = documents.flat();
      const documentOffsets = new Int32Array(documents.length + 1);
      documents.forEach((d, i) => {
        documentOffsets[i + 1] = documentOffsets[i]! + d.length;
      });
      const { shards, order } = shardsOfDocuments({
        worldSize,
        documentOffsets,
        homeRank: Int32Array.from(parts, (p) => p.home),
        lengths: Int32Array.from(parts, (p) => p.length),
      });
      return {
        shards,
        serverRank: reorder(
          Int32Array.from(parts, (p) => p.server),
          order,
        ),
      };
    });
  });
}

/** Row ids of every rank's home tensor: document * 2^16 + row in the document + 1, so that 0 is "never written". */
export function rowIds(shards: DocumentShards): Int32Array[] {
  const start = new Map<string, number>();
  for (let d = 0; d < shards.documents; d++) {
    const parts = [...shards.document.keys()]
      .filter((g) => shards.document[g] === d)
      .sort((a, b) => shards.position[a]! - shards.position[b]!);
    let row = 0;
    for (const g of parts) {
      start.set(String(g), row);
      row += shards.lengths[g]!;
    }
  }
  return Array.from({ length: shards.worldSize }, (_, r) => {
    const ids: number[] = [];
    for (let g = shards.shardOffsets[r]!; g < shards.shardOffsets[r + 1]!; g++) {
      for (let i = 0; i < shards.lengths[g]!; i++)
        ids.push(shards.document[g]! * 2 ** 16 + start.get(String(g))! + i + 1);
    }
    return Int32Array.from(ids);
  });
}
