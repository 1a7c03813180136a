import { afterEach, expect, it, vi } from 'vitest';
import { type AttentionPlan, planAttention, planReplicas, shardsOfDocuments } from '../../src/index.js';

afterEach(() => vi.restoreAllMocks());

/** Fresh memory is full of `byte` from now on. Returns how much of it was asked for. */
function fillMemoryWith(byte: number): () => number {
  let bytes = 0;
  vi.spyOn(Buffer, 'allocUnsafeSlow').mockImplementation((size) => {
    bytes += size;
    return Buffer.from(new ArrayBuffer(size)).fill(byte);
  });
  return () => bytes;
}

/** Every element of every array of a plan, by its place. */
function elementsOf(value: object, path = ''): [string, readonly number[]][] {
  return Object.entries(value).flatMap(([key, part]: [string, unknown]): [string, readonly number[]][] => {
    if (part instanceof Int32Array) return [[`${path}${key}`, [...part]]];
    return typeof part === 'object' && part !== null ? elementsOf(part, `${path}${key}.`) : [];
  });
}

/** Large enough for unzeroed columns: 7 ranks, documents of 1 to 40 shards, some of no rows, one rank that homes none. */
function attention(sharing: AttentionPlan['sharing']): AttentionPlan {
  const worldSize = 7;
  const documentOffsets = [0];
  for (let d = 0; documentOffsets.at(-1)! < 6000; d++)
    documentOffsets.push(documentOffsets.at(-1)! + 1 + ((d * 13) % 40));
  const n = documentOffsets.at(-1)!;
  const { shards } = shardsOfDocuments({
    worldSize,
    documentOffsets: Int32Array.from(documentOffsets),
    homeRank: Int32Array.from({ length: n }, (_, i) => (i * 5) % (worldSize - 1)),
    lengths: Int32Array.from({ length: n }, (_, i) => (i * 7) % 11),
  });
  return planAttention(
    shards,
    Int32Array.from({ length: n }, (_, i) => (i * 31) % worldSize),
    { sharing },
  );
}

function replicas() {
  const n = 6000;
  const shards = { worldSize: 3, shardOffsets: Int32Array.of(0, 2000, 4000, n), lengths: new Int32Array(n).fill(2) };
  const offsets = Int32Array.from({ length: n + 1 }, (_, g) => 2 * g);
  const dstRank = Int32Array.from({ length: 2 * n }, (_, e) => (e * 7) % 3);
  return planReplicas(shards, { replicas: 2, offsets, dstRank, replica: Int32Array.from(dstRank, (_, e) => e % 2) });
}

it.each([
  ['each-query', () => attention('each-query')],
  ['each-server', () => attention('each-server')],
  ['explicit replicas', replicas],
])('%s: every element of a plan is written, whatever the memory held before', (_, plan) => {
  const asked = fillMemoryWith(0x5a);
  const first = elementsOf(plan());
  expect(asked()).toBeGreaterThan(100_000);
  fillMemoryWith(0x00);
  expect(elementsOf(plan())).toEqual(first);
});
