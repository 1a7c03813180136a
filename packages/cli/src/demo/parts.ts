/** Where documents lie, part by part, and who verifies which. */
import type { AttentionPlan } from '@ep/plan';

/** Where the parts of a document lie: home rank, first row there, first token, tokens. */
export interface Part {
  readonly rank: number;
  readonly row: number;
  readonly token: number;
  readonly tokens: number;
}

export function partsOfDocuments(plan: AttentionPlan): Part[][] {
  const { shards } = plan;
  const parts: Part[][] = Array.from({ length: shards.documents }, () => []);
  const byPosition: { document: number; position: number; rank: number; row: number; tokens: number }[] = [];
  for (let rank = 0; rank < shards.worldSize; rank++) {
    let row = 0;
    for (let g = shards.shardOffsets[rank]!; g < shards.shardOffsets[rank + 1]!; g++) {
      byPosition.push({
        document: shards.document[g]!,
        position: shards.position[g]!,
        rank,
        row,
        tokens: shards.lengths[g]!,
      });
      row += shards.lengths[g]!;
    }
  }
  byPosition.sort((a, b) => a.document - b.document || a.position - b.position);
  for (const { document, rank, row, tokens } of byPosition) {
    const before = parts[document]!.at(-1);
    parts[document]!.push({ rank, row, tokens, token: before === undefined ? 0 : before.token + before.tokens });
  }
  return parts;
}

export const tokensOfDocuments = (parts: readonly (readonly Part[])[]): number[] =>
  parts.map((document) => document.reduce((sum, part) => sum + part.tokens, 0));

/** Who verifies which document: longest first, each to the rank with the least work so far. Attention costs length squared. */
export function verifierOf(parts: readonly (readonly Part[])[], worldSize: number): Int32Array {
  const cost = tokensOfDocuments(parts).map((tokens) => tokens ** 2);
  const load = new Float64Array(worldSize);
  const verifier = new Int32Array(parts.length);
  for (const document of [...cost.keys()].sort((a, b) => cost[b]! - cost[a]!)) {
    const rank = load.indexOf(Math.min(...load));
    verifier[document] = rank;
    load[rank]! += cost[document]!;
  }
  return verifier;
}
