// Random plans and data that every rank makes for itself from a seed.
import { createStorage, encode } from '@ep/core';
import { planAttention, reorder, shardsOfDocuments } from '@ep/plan';

/** xorshift32: enough for test data, the same on every rank. */
export function randomOf(seed) {
  let state = (seed * 2654435761 + 88172645) >>> 0 || 1;
  return (below) => {
    state ^= state << 13;
    state >>>= 0;
    state ^= state >>> 17;
    state ^= state << 5;
    state >>>= 0;
    return state % below;
  };
}

/** Documents cut into shards with random homes and servers: empty shards, idle ranks (unless `everyone`) and long ones included. */
export function randomPlan(
  seed,
  worldSize,
  { documents = 5, maxShards = 5, maxLength = 40, sharing = 'each-server', everyone = false } = {},
) {
  const random = randomOf(seed);
  const lengths = [];
  const homeRank = [];
  const documentOffsets = [0];
  const busy = everyone ? worldSize : 1 + random(worldSize); // ranks from here on own nothing
  for (let d = 0; d < documents; d++) {
    const shards = 1 + random(maxShards);
    for (let s = 0; s < shards; s++) {
      lengths.push(random(5) === 0 ? 0 : random(maxLength));
      homeRank.push(random(busy));
    }
    documentOffsets.push(lengths.length);
  }
  const { shards } = shardsOfDocuments({
    worldSize,
    lengths: Int32Array.from(lengths),
    homeRank: Int32Array.from(homeRank),
    documentOffsets: Int32Array.from(documentOffsets),
  });
  const servers = everyone ? worldSize : 1 + random(worldSize);
  const serverRank = Int32Array.from(shards.lengths, () => random(servers));
  return planAttention(shards, serverRank, { sharing });
}

/**
 * Every rank but the last has rows for every other such rank and for itself, Q and KV, of each pair another number; the last one has nothing and serves nothing. A document
 * for each pair: its first part is for that pair, and the second one makes another rank want the first one's keys, too.
 */
export function unevenPlan(worldSize) {
  const busy = worldSize - 1;
  const pairs = Array.from({ length: busy * busy }, (_, p) => [Math.floor(p / busy), p % busy]);
  const next = (rank) => (rank + 1) % busy;
  const { shards, order } = shardsOfDocuments({
    worldSize,
    lengths: Int32Array.from(pairs.flatMap((_, p) => [1 + 5 * p, 1 + (p % 4)])),
    homeRank: Int32Array.from(pairs.flatMap(([from]) => [from, next(from)])),
    documentOffsets: Int32Array.from({ length: pairs.length + 1 }, (_, d) => 2 * d),
  });
  const servers = Int32Array.from(pairs.flatMap(([, to]) => [to, next(to)]));
  return planAttention(shards, reorder(servers, order));
}

/** Values as the dtype's carrier: floats are encoded, raw carriers hold the integers themselves. */
export function storageOf(dtype, values) {
  if (dtype === 'f16' || dtype === 'bf16') return encode(dtype, values);
  const out = createStorage(dtype, values.length);
  out.set(values);
  return out;
}

/** Small integers, exact in every float type, that name rank, row and column. */
export function fillRows(data, rank, rowElements, salt) {
  for (let i = 0; i < data.length; i++)
    data[i] = (rank * 37 + Math.floor(i / rowElements) * 11 + (i % rowElements) * 3 + salt) % 127;
  return data;
}

/** Every rank has rows for every rank. */
export function fullPlan(worldSize, rows) {
  const pairs = Array.from({ length: worldSize * worldSize }, (_, i) => i);
  const { shards } = shardsOfDocuments({
    worldSize,
    lengths: Int32Array.from(pairs, (i) => rows + (i % 3)),
    homeRank: Int32Array.from(pairs, (i) => Math.floor(i / worldSize)),
    documentOffsets: Int32Array.from({ length: pairs.length + 1 }, (_, i) => i),
  });
  return planAttention(
    shards,
    Int32Array.from(pairs, (i) => i % worldSize),
  );
}

const FLOATS = new Set(['f32', 'f16', 'bf16']);

/** The calls of one step; f32, f16 and bf16 have the reduced form of the gradient, too. Row sizes in elements. */
export function specsOf(plan, { dtype, qRow, kvRow }) {
  const specs = {
    forward: [
      { name: 'q', plan: plan.fwdQ, dtype, rowShape: [qRow] },
      { name: 'kv', plan: plan.fwdKv, dtype, rowShape: [kvRow] },
    ],
    output: [{ name: 'o', plan: plan.revQ, dtype, rowShape: [qRow] }],
    dense: [{ name: 'dKv', plan: plan.revKv, dtype, rowShape: [kvRow] }],
  };
  if (FLOATS.has(dtype))
    specs.reduced = [{ name: 'dKv', plan: plan.revKvCompact, dtype, rowShape: [kvRow], reduce: plan.reduction }];
  return specs;
}
