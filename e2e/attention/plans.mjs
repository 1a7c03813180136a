// Random plans and data that every rank makes for itself from a seed.
import { planAttention, shardsOfDocuments } from '@ep/plan';

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

/** Documents cut into shards with random homes and servers: empty shards, idle ranks and long ones included. */
export function randomPlan(
  seed,
  worldSize,
  { documents = 5, maxShards = 5, maxLength = 40, sharing = 'each-server' } = {},
) {
  const random = randomOf(seed);
  const lengths = [];
  const homeRank = [];
  const documentOffsets = [0];
  const busy = 1 + random(worldSize); // ranks from here on own nothing
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
  const servers = 1 + random(worldSize);
  const serverRank = Int32Array.from(shards.lengths, () => random(servers));
  return planAttention(shards, serverRank, { sharing });
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
